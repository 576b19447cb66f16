"""The table of parameters: what it says of each parameter is what the endpoint does. The likeliest
tokens in the forms of the APIs: tests/generation compares them with those of the weights.
"""

import json
from typing import Any

import anthropic.types.message_count_tokens_params
import anthropic.types.message_create_params
import msgspec
import numpy as np
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.responses.response_create_params
import pytest
from clients_support import user, using
from sessions_support import CHATML, Policy, read_by
from tables import table
from test_bad_input import FORMS

from async_rl.protocol.generator import Completion, Scores
from async_rl.sessions.forms.parameters import TABLE, Parameter

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
async def test_each_parameter_has_its_type_and_its_rule(api: str) -> None:
    path, fields = GOOD[api]
    async with using() as (found, _, policy):

        async def send(name: str, value: Any) -> tuple[int, str | None, str]:
            policy.say("one")
            more = {name: value}
            more = {"sampling_params": more} if api == "sampling_params" else more
            body = {"model": "policy", **fields, **more}
            reply = await found.http.post(path, json=body)
            error = reply.json().get("error", {}) if reply.status_code != 200 else {}
            return reply.status_code, error.get("param"), error.get("message", "")

        seen = {"any", "list", "objects"}
        for each in TABLE[api]:
            # No type is a list of lists and a number at the same time.
            if (kind := each.type.rstrip("!")) not in seen:
                seen.add(kind)
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


@pytest.mark.parametrize("api", PACKAGES)
def test_every_parameter_of_the_packages_is_in_the_table_once(api: str) -> None:
    names = [parameter.name for parameter in TABLE[api]]
    assert len(names) == len(set(names))
    assert set(PACKAGES[api].__annotations__) <= set(names)


CALLS = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
EFFORT = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ reasoning_effort }}{% endif %}")
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ enable_thinking }}{% endif %}")


async def test_an_answer_with_one_call_at_most_ends_with_it() -> None:
    path, fields = GOOD["responses"]
    fields = {"model": "policy", **fields, "tools": [{"type": "function", "name": "add"}]}
    async with using() as (found, session, policy):
        for num_calls, asked in ((2, {}), (1, {"parallel_tool_calls": False})):
            policy.say(CALLS + CALLS)
            reply = await found.http.post(path, json=fields | asked)
            assert reply.text.count('"arguments":"{}"') == num_calls
    # The end of the call is a part of what the policy wrote, and is trained.
    assert session.chat.decode(session.record.turns[1].answer.token_ids).endswith("</tool_call>")


async def test_a_chat_template_reads_what_it_knows() -> None:
    for api, template, more, shown in (
        ("chat", EFFORT, {"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ("responses", EFFORT, {"reasoning": {"effort": "low"}}, "low"),
        ("messages", EFFORT, {"output_config": {"effort": "low"}}, "low"),
        ("messages", THINKS, {"thinking": {"type": "disabled"}}, "False"),
        ("chat", CHATML, {"reasoning_effort": "low"}, "\n"),
    ):
        path, fields = GOOD[api]
        async with using(["one"], template) as (found, session, _):
            reply = await found.http.post(path, json={"model": "policy", **fields, **more})
            assert reply.status_code == 200, reply.text
        assert session.chat.decode(read_by(session.record.turns[0])).endswith(shown)


TOP = ([[1, 0], [2, 1]], [[-1.0, -2.0], [-3.0, -np.inf]])
BEFORE = ([[0, 0], [2, 1]], [[np.nan, np.nan], [-4.0, -0.5]])


def scores(ids: Any, logprobs: Any) -> Scores:
    return Scores(ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32))


def scored(policy: Policy) -> Any:
    """A policy that writes a token and its end, with the log-probs that a call reads."""

    async def write(*given: Any) -> Completion:
        policy.say("go")
        done = await policy(*given)
        prompt = None if given[-1].num_prompt_top is None else scores(*BEFORE)
        return msgspec.structs.replace(done, likeliest=scores(*TOP), prompt=prompt)

    return write


def pairs(each: Any) -> list[tuple[str, float]]:
    return [(top.token, top.logprob) for top in each.top_logprobs]


async def test_alternatives_come_in_the_forms_of_the_apis() -> None:
    async with using() as (found, session, policy):
        session.write = scored(policy)
        name = session.chat.text_of_token
        expected = [[(name(1), -1), (name(0), -2)], [(name(2), -3), (name(1), -9999)]]
        how: Any = {"model": "policy", "messages": [user("go")], "logprobs": True}
        chat = await found.openai.chat.completions.create(**how, top_logprobs=2)
        shown: Any = chat.choices[0].logprobs
        assert [pairs(each) for each in shown.content] == expected
        text = await found.openai.completions.create(model="policy", prompt="go", logprobs=2)
        shown = text.choices[0].logprobs
        for token, found_here, tops in zip(shown.tokens, shown.top_logprobs, expected, strict=True):
            assert set(found_here) == {token, *dict(tops)}
            assert {n: found_here[n] for n, _ in tops} == dict(tops)
        response = await found.openai.responses.create(model="policy", input="go", top_logprobs=2)
        item: Any = response.output[0]
        assert [pairs(each) for each in item.content[0].logprobs] == expected
        body = {"token_ids": [1], "sampling_params": {"logprobs": 2}}
        reply = (await found.http.post("/inference/v1/generate", json=body)).json()
        content = reply["choices"][0]["logprobs"]["content"]
        ids = [[top["token_id"] for top in each["top_logprobs"]] for each in content]
        assert ids == TOP[0]
        # As clients of vLLM send it.
        for value, num_top in ((True, 1), (False, 0)):
            body = {"model": "policy", "prompt": "go", "logprobs": value}
            (choice,) = (await found.http.post("/v1/completions", json=body)).json()["choices"]
            assert (choice["logprobs"] is None, policy.shown[-1].num_top) == (not value, num_top)
        assert [shown.num_top for shown in policy.shown] == [2, 2, 2, 2, 1, 0]
        by_id = {"top_logprobs": 1, "extra_body": {"return_tokens_as_token_ids": True}}
        chat = await found.openai.chat.completions.create(**how, **by_id)
        shown = chat.choices[0].logprobs
        ids = session.record.turns[max(session.record.turns)].answer.token_ids
        assert [each.token for each in shown.content] == [f"token_id:{i}" for i in ids]


async def test_the_log_probs_of_a_prompt_come_in_the_form_of_vllm() -> None:
    async with using() as (found, session, policy):
        session.write = scored(policy)
        name = session.chat.text_of_token
        given = {"logprob": -4, "rank": None, "decoded_token": name(2)}
        best = {"logprob": -0.5, "rank": 1, "decoded_token": name(1)}
        expected = [None, {"2": given, "1": best}]
        more: Any = {"model": "policy", "prompt_logprobs": 1}
        body = {**more, "messages": [user("go")]}
        reply = (await found.http.post("/v1/chat/completions", json=body)).json()
        assert reply["prompt_logprobs"] == expected
        params = {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}
        reply = (await found.http.post("/inference/v1/generate", json=params)).json()
        assert reply["prompt_logprobs"] == expected
        stream = await found.http.post("/v1/chat/completions", json={**body, "stream": True})
        first = stream.text.partition("\n")[0].removeprefix("data: ")
        assert json.loads(first)["prompt_logprobs"] == expected
