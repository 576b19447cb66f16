"""The table of parameters: what it says of each parameter is what the endpoint does."""

from __future__ import annotations

from typing import Any

import anthropic.types.message_count_tokens_params
import anthropic.types.message_create_params
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.responses.response_create_params
import pytest
from clients_support import Clients, use, user
from sessions_support import CHATML, Policy, read_by
from tables import table
from test_bad_input import FORMS

from async_rl.sessions.forms.parameters import TABLE, Parameter
from async_rl.sessions.session import Session

IDS = ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}})
COUNTED = ("/v1/messages/count_tokens", {"messages": [user("go")]})
GOOD = {name: form[:2] for name, form in FORMS.items()} | {
    "count_tokens": COUNTED,
    "generate": IDS,
    "sampling_params": IDS,
}
VALUES: dict[str, Any] = table(__file__, "values")
SPECIAL: dict[str, Any] = table(__file__, "special")
PACKAGES = {
    "chat": openai.types.chat.completion_create_params.CompletionCreateParamsBase,
    "completions": openai.types.completion_create_params.CompletionCreateParamsBase,
    "responses": openai.types.responses.response_create_params.ResponseCreateParamsBase,
    "messages": anthropic.types.message_create_params.MessageCreateParamsBase,
    "count_tokens": anthropic.types.message_count_tokens_params.MessageCountTokensParams,
}


def wanted(parameter: Parameter) -> Any:
    """A value that asks for something."""
    if parameter.type == "bool" and parameter.neutral:
        return False
    return SPECIAL.get(parameter.name, VALUES[parameter.type])


@pytest.mark.parametrize("api", GOOD)
def test_each_parameter_has_its_type_and_its_rule(api: str) -> None:
    path, fields = GOOD[api]

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        async def send(name: str, value: Any) -> tuple[int, str | None, str]:
            policy.say("one")
            changed = (
                {"sampling_params": {name: value}} if api == "sampling_params" else {name: value}
            )
            body = {"model": "policy", **fields, **changed}
            reply = await found.http.post(path, json=body)
            error = reply.json().get("error", {}) if reply.status_code != 200 else {}
            return reply.status_code, error.get("param"), error.get("message", "")

        for each in TABLE[api]:
            # No type is a list of lists and a number at the same time.
            if each.type.rstrip("!") not in ("any", "list", "objects"):
                assert (await send(each.name, [[1]]))[:2] == (400, each.name)
            if each.type not in VALUES or each.name == "stream":
                continue
            status, name, message = await send(each.name, wanted(each))
            if each.rule == "refused":
                assert (status, name) == (400, each.name)
                assert each.why in message
                assert (await send(each.name, each.neutral))[0] == 200
            else:
                assert status == 200, (each, message)
        assert (await send("surprise", 1))[:2] == (400, "surprise")

    use(agent)


@pytest.mark.parametrize("api", PACKAGES)
def test_every_parameter_of_the_packages_is_in_the_table_once(api: str) -> None:
    names = [parameter.name for parameter in TABLE[api]]
    assert len(names) == len(set(names))
    assert set(PACKAGES[api].__annotations__) <= set(names)


CALLS = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
EFFORT = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ reasoning_effort }}{% endif %}")
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ enable_thinking }}{% endif %}")


@pytest.mark.parametrize(
    ("api", "more"),
    [
        ("chat", {"parallel_tool_calls": False}),
        ("responses", {"parallel_tool_calls": False}),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_an_answer_with_one_call_at_most_ends_with_it(api: str, more: Any) -> None:
    path, fields = GOOD[api]
    tool: Any = {"name": "add", "input_schema": {}}
    if api != "messages":
        tool = {"type": "function", "name": "add", "function": {"name": "add"}}

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        for num_calls, asked in ((2, {}), (1, more)):
            policy.say(CALLS + CALLS)
            body = {"model": "policy", **fields, "tools": [tool], **asked}
            reply = await found.http.post(path, json=body)
            calls = sum(reply.text.count(field) for field in ('"arguments":"{}"', '"input":{}'))
            assert calls == num_calls

    session = use(agent)
    # The end of the call is a part of what the policy wrote, and is trained.
    assert session.chat.decode(session.record.turns[1].answer.token_ids).endswith("</tool_call>")


@pytest.mark.parametrize(
    ("api", "template", "more", "shown"),
    [
        ("chat", EFFORT, {"reasoning_effort": "low"}, "low"),
        ("chat", EFFORT, {"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ("responses", EFFORT, {"reasoning": {"effort": "low"}}, "low"),
        ("messages", EFFORT, {"output_config": {"effort": "low"}}, "low"),
        ("messages", THINKS, {"thinking": {"type": "disabled"}}, "False"),
        ("chat", CHATML, {"reasoning_effort": "low"}, "\n"),
        ("chat", CHATML, {"chat_template_kwargs": {"tools": 1}}, "\n"),
    ],
)
def test_a_chat_template_reads_what_it_knows(
    api: str, template: str, more: Any, shown: str
) -> None:
    path, fields = GOOD[api]

    async def agent(found: Clients, session: Session, _: Policy) -> None:
        reply = await found.http.post(path, json={"model": "policy", **fields, **more})
        assert reply.status_code == 200, reply.text

    session = use(agent, ["one"], template)
    assert session.chat.decode(read_by(session.record.turns[0])).endswith(shown)


def test_log_probs_may_name_tokens_by_their_ids() -> None:
    async def agent(found: Clients, session: Session, _: Policy) -> None:
        reply = await found.openai.chat.completions.create(
            model="policy",
            messages=[user("go")],
            logprobs=True,
            extra_body={"return_tokens_as_token_ids": True},
        )
        logprobs: Any = reply.choices[0].logprobs
        ids = session.record.turns[0].answer.token_ids
        assert [each.token for each in logprobs.content] == [f"token_id:{i}" for i in ids]

    use(agent, ["one"])
