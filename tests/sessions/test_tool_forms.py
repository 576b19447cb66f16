"""Tool calls in the forms of several models, read by vLLM's own parsers, served by all three APIs.

The ids that were served are those that are trained, special tokens included.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import numpy as np
import openai
import pytest
from composing import compose
from sessions_support import END, Policy, Row, endpoint, open_session
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.core.codec import decode, encode
from async_rl.core.errors import ConfigError, Unavailable
from async_rl.core.frozen import frozen
from async_rl.generation.vllm.tool_calls import ToolCalls
from async_rl.observability.activity import Activity
from async_rl.processes import generator
from async_rl.protocol.generator import ReadCalls
from async_rl.protocol.membership import Member
from async_rl.rollouts.remote import RemoteEngines
from async_rl.runtime.directory import Directory
from async_rl.sessions.session import Session
from async_rl.sessions.tools import HERMES, form_of

ADD = {
    "name": "add",
    "description": "",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL: Any = {"type": "function", "function": ADD}
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }} <HINT>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<CALL>{% endfor %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITH_JSON = "{{ c.function.name }} {{ c.function.arguments | tojson }}"


@frozen
class Form:
    """hint: marks in the template; special: tokens; call: an answer; broken: calls that are none;
    required, named: the rest of an answer that was forced; template: of a call.
    """

    name: str
    hint: str
    call: str
    broken: tuple[str, ...]
    required: str
    named: str
    special: tuple[str, ...] = ()
    template: str = WITH_JSON


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
DEEPSEEK = (*DEEPSEEK, "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
BEGIN, ENDS, ONE, DONE, SEP = DEEPSEEK
KIMI = tuple(
    f"<|tool_{word}|>" for word in ("calls_section_begin", "calls_section_end", "call_begin")
)
KIMI = (*KIMI, "<|tool_call_end|>", "<|tool_call_argument_begin|>")
GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FORMS = [
    Form(
        name="hermes",
        hint="<tool_call>{}</tool_call>",
        call='I add\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        broken=('<tool_call>{"name": "add", "argu</tool_call>', "<tool_call>[]</tool_call>"),
        required='{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        named='{"a": 1}}\n</tool_call>',
    ),
    Form(
        name="llama3_json",
        hint='{"name": function name, "parameters": dictionary of argument name and its value}',
        call='<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        broken=('{"name": "add", "param', '{"a": 1}', '{"name": "add", "parameters": 1}'),
        required='add", "parameters": {"a": 1}}',
        named='{"a": 1}}',
        special=("<|python_tag|>",),
    ),
    Form(
        name="mistral",
        hint="[TOOL_CALLS] [ARGS]",
        call='I add[TOOL_CALLS]add[ARGS]{"a": 1}',
        broken=('[TOOL_CALLS]add[ARGS]{"a": ', "[TOOL_CALLS]"),
        required='add[ARGS]{"a": 1}',
        named='{"a": 1}',
        special=("[TOOL_CALLS]", "[ARGS]"),
        # Mistral's own template refuses the ids of other packages.
        template="{% if c.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}"
        + WITH_JSON,
    ),
    Form(
        name="mistral",
        hint="[TOOL_CALLS] [{}]",
        call='I add[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
        broken=('[TOOL_CALLS] [{"name": "add", "argu', "[TOOL_CALLS]"),
        required='add", "arguments": {"a": 1}}]',
        named='{"a": 1}}]',
        special=("[TOOL_CALLS]",),
    ),
    Form(
        name="deepseek_v3",
        hint=f"{BEGIN}```json```",
        call=f'I add{BEGIN}{ONE}function{SEP}add\n```json\n{{"a": 1}}\n```{DONE}{ENDS}',
        broken=(
            f"{BEGIN}{ONE}function{SEP}add\n",
            f"{BEGIN}{ONE}function{SEP}add\n```json\n[1\n```{DONE}",
        ),
        required=f'add\n```json\n{{"a": 1}}\n```{DONE}{ENDS}',
        named=f'{{"a": 1}}\n```{DONE}{ENDS}',
        special=DEEPSEEK,
        # DeepSeek's own template puts the arguments between texts.
        template="{{ c.function.name + ' ' + c.function.arguments }}",
    ),
    Form(
        name="deepseek_v31",
        hint=BEGIN,
        call=f'I add{BEGIN}{ONE}add{SEP}{{"a": 1}}{DONE}{ENDS}',
        broken=(f"{BEGIN}{ONE}add", f"{BEGIN}{ONE}add{SEP}[1{DONE}{ENDS}"),
        required=f'add{SEP}{{"a": 1}}{DONE}{ENDS}',
        named=f'{{"a": 1}}{DONE}{ENDS}',
        special=DEEPSEEK,
    ),
    Form(
        name="qwen3_coder",
        hint="<tool_call>\n<function=name>\n<parameter=key>\n",
        call="I add\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
        broken=("<tool_call>\n", "<tool_call>\nadd 1\n</tool_call>"),
        required="add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        named="<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        special=("<tool_call>", "</tool_call>"),
    ),
    Form(
        name="glm45",
        hint="<tool_call>{name}\n<arg_key>key</arg_key>",
        call="I add\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        broken=("<tool_call>", "<tool_call></tool_call>"),
        required="add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        named="<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        special=GLM,
    ),
    Form(
        name="kimi_k2",
        hint=KIMI[0],
        call=f'I add{KIMI[0]}{KIMI[2]}functions.add:0{KIMI[4]}{{"a": 1}}{KIMI[3]}{KIMI[1]}',
        broken=(f"{KIMI[0]}{KIMI[2]}functions.add:0{KIMI[4]}[1{KIMI[3]}", KIMI[0]),
        required=f'add:0{KIMI[4]}{{"a": 1}}{KIMI[3]}{KIMI[1]}',
        named=f'{{"a": 1}}{KIMI[3]}{KIMI[1]}',
        special=KIMI,
    ),
    Form(
        name="seed_oss",
        hint="<seed:tool_call>\n<function=name>\n<parameter=key>",
        call="I add<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n"
        "</seed:tool_call>",
        broken=("<seed:tool_call>\n",),
        required="add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
        named="<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
        special=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    Form(
        name="minimax_m2",
        hint="<minimax:tool_call>",
        call='I add<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        broken=("<minimax:tool_call>\n",),
        required='add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
        named='<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
        special=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
]
each_form = pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])


@pytest.fixture(autouse=True, scope="module")
def vllm_is_imported() -> None:
    with warnings.catch_warnings():
        # Of torch, about vLLM's own code.
        warnings.simplefilter("ignore")
        import vllm.parser.parser_manager  # noqa: F401


class Bytes(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A byte is a token, and so is each special token; the end token has id 0."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return dict(super().__call__(*args, **kwargs))


def tokenizer(form: Form) -> Any:
    alphabet = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core: Any = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = Bytes(tokenizer_object=core, eos_token=END, clean_up_tokenization_spaces=False)
    made.add_special_tokens({"additional_special_tokens": list(form.special)})
    hint = "{% raw %}" + form.hint + "{% endraw %}"
    made.chat_template = TEMPLATE.replace("<HINT>", hint).replace("<CALL>", form.template)
    return made


class Agent:
    """One session, with the clients of both APIs."""

    def __init__(self, form: Form, texts: list[str], **options: Any) -> None:
        self.form = form
        words = tokenizer(form)
        self.calls = ToolCalls(words)
        options = {"read": self.calls.read, **options}
        self.session, self.policy = open_session(texts=texts, tokenizer=words, **options)

    def run(self, play: Any, *, is_cut: bool = False) -> Session:
        async def main() -> None:
            key = self.session.token
            async with (
                endpoint(self.session) as url,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
                anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as claude,
            ):
                await play(client, claude)

        asyncio.run(main())
        if not is_cut:
            served_is_trained(self.session, self.policy)
        return self.session


def served_is_trained(session: Session, policy: Policy) -> None:
    row = Row(session)
    served = [written.token_ids for _, written in policy.served]
    # Segments are in the order of their ends; here each answer ends one, or continues it.
    trained = row.tokens.token_ids[row.tokens.is_written]
    assert sorted(np.concatenate(served).tolist()) == sorted(trained.tolist())
    for turn in session.record.turns.values():
        assert turn.answer is not None
        assert any(np.array_equal(turn.answer.token_ids, ids) for ids in served)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


FUNCTION: Any = {"type": "function", **ADD}
CLAUDE: Any = {"name": "add", "input_schema": ADD["parameters"]}


async def by_chat(client: Any, _: Any, text: str) -> tuple[str, list[Any]]:
    reply = await client.chat.completions.create(
        model="policy", messages=[user(text)], tools=[TOOL]
    )
    return of_chat(reply)


async def by_chat_stream(client: Any, _: Any, text: str) -> tuple[str, list[Any]]:
    manager = client.chat.completions.stream(model="policy", messages=[user(text)], tools=[TOOL])
    async with manager as stream:
        return of_chat(await stream.get_final_completion())


def of_chat(reply: Any) -> tuple[str, list[Any]]:
    message = reply.choices[0].message
    calls = message.tool_calls or []
    assert reply.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    return message.content or "", [(c.function.name, c.function.arguments) for c in calls]


async def by_responses(client: Any, _: Any, text: str) -> tuple[str, list[Any]]:
    return of_response(await client.responses.create(model="policy", input=text, tools=[FUNCTION]))


async def by_responses_stream(client: Any, _: Any, text: str) -> tuple[str, list[Any]]:
    manager = client.responses.stream(model="policy", input=text, tools=[FUNCTION])
    async with manager as stream:
        return of_response(await stream.get_final_response())


def of_response(reply: Any) -> tuple[str, list[Any]]:
    calls = [item for item in reply.output if item.type == "function_call"]
    return reply.output_text, [(call.name, call.arguments) for call in calls]


async def by_messages(_: Any, claude: Any, text: str) -> tuple[str, list[Any]]:
    return of_message(
        await claude.messages.create(
            model="policy", messages=[user(text)], tools=[CLAUDE], max_tokens=900
        )
    )


async def by_messages_stream(_: Any, claude: Any, text: str) -> tuple[str, list[Any]]:
    manager = claude.messages.stream(
        model="policy", messages=[user(text)], tools=[CLAUDE], max_tokens=900
    )
    async with manager as stream:
        return of_message(await stream.get_final_message())


def of_message(reply: Any) -> tuple[str, list[Any]]:
    texts = [block.text for block in reply.content if block.type == "text"]
    uses = [block for block in reply.content if block.type == "tool_use"]
    return "".join(texts), [(use.name, json.dumps(use.input)) for use in uses]


APIS = [
    by_chat,
    by_chat_stream,
    by_responses,
    by_responses_stream,
    by_messages,
    by_messages_stream,
]


@each_form
def test_every_api_serves_a_call_in_the_form_of_the_model(form: Form) -> None:
    content = "" if form.name == "llama3_json" else "I add"

    async def play(client: Any, claude: Any) -> None:
        for number, api in enumerate(APIS):
            text, calls = await api(client, claude, f"go {number}")
            ((name, arguments),) = calls
            assert (text, name, json.loads(arguments)) == (content, "add", {"a": 1}), api
            # A later answer without a call is text in every form.
            assert await api(client, claude, f"say {number}") == ("no call", []), api

    agent = Agent(form, [form.call, "no call"] * len(APIS))
    assert agent.session.chat.form.name == form.name
    agent.run(play)


@each_form
def test_a_broken_call_remains_text(form: Form) -> None:
    async def play(client: Any, claude: Any) -> None:
        for number, broken in enumerate(form.broken):
            visible = broken
            for token in form.special:
                visible = visible.replace(token, "")
            for api in (by_chat, by_messages_stream):
                text, calls = await api(client, claude, f"go {number} {api.__name__}")
                assert (text, calls) == (visible, [])

    texts = [broken for broken in form.broken for _ in range(2)]
    Agent(form, texts).run(play)


@each_form
def test_a_tool_loop_is_one_segment_with_the_ids_that_were_served(form: Form) -> None:
    async def play(client: Any, claude: Any) -> None:
        messages: list[Any] = [user("go")]
        for result in ("1", "2"):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
            message = reply.choices[0].message
            call = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}
            messages += [message, call]
        await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        # Rewritten history, with the first call written by the template this time.
        messages[-1] = {**messages[-1], "content": "3"}
        messages[0] = user("rewritten")
        await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])

    agent = Agent(form, [form.call, form.call, "done", "again"])
    row = Row(agent.run(play))
    assert row.num_segments == 2
    words = agent.session.chat
    first = row.tokens.token_ids[: row.starts[-1]] if row.starts[-1] else row.tokens.token_ids
    text = words.decode(first, with_special=True)
    loop = f"{form.call}{END}\n[tool]1{END}\n[assistant]{form.call}{END}\n[tool]2{END}\n"
    assert f"{loop}[assistant]done{END}" in words.decode(row.tokens.token_ids, with_special=True), (
        text
    )


@each_form
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_begun_for_the_policy_and_only_its_rest_is_trained(
    form: Form, choice: Any
) -> None:
    rest = form.required if choice == "required" else form.named

    async def play(client: Any, claude: Any) -> None:
        reply = await client.chat.completions.create(
            model="policy", messages=[user("go")], tools=[TOOL], tool_choice=choice
        )
        (call,) = reply.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})

    agent = Agent(form, [rest])
    row = Row(agent.run(play))
    written = agent.session.chat.decode(
        row.tokens.token_ids[row.tokens.is_written], with_special=True
    )
    assert written == rest + END


@each_form
def test_tools_that_must_not_be_used_are_not_shown_and_calls_remain_text(form: Form) -> None:
    async def play(client: Any, claude: Any) -> None:
        reply = await client.chat.completions.create(
            model="policy", messages=[user("go")], tools=[TOOL], tool_choice="none"
        )
        assert reply.choices[0].message.content == "text"

    agent = Agent(form, ["text"])
    row = Row(agent.run(play))
    assert "TOOLS" not in agent.session.chat.decode(row.tokens.token_ids)


CODER = next(form for form in FORMS if form.name == "qwen3_coder")


def test_a_call_that_the_limit_cut_is_not_completed_by_the_parser() -> None:
    """vLLM's parser returns a call without the argument that is missing."""

    async def play(client: Any, claude: Any) -> None:
        reply = await client.chat.completions.create(
            model="policy", messages=[user("go")], tools=[TOOL], max_tokens=40
        )
        assert reply.choices[0].finish_reason == "length"
        assert reply.choices[0].message.tool_calls is None

    Agent(CODER, [CODER.call]).run(play)


def test_the_end_of_a_call_may_be_a_stop_text() -> None:
    form = next(form for form in FORMS if form.name == "minimax_m2")

    async def play(client: Any, claude: Any) -> None:
        reply = await client.chat.completions.create(
            model="policy", messages=[user("go")], tools=[TOOL], stop=["</invoke>"]
        )
        message = reply.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["add"]

    Agent(form, [form.call]).run(play, is_cut=True)


def test_a_call_is_read_again_for_a_request_that_is_sent_again() -> None:
    async def play(client: Any, claude: Any) -> None:
        for headers in ({}, {"x-stainless-retry-count": "1"}):
            reply = await client.chat.completions.create(
                model="policy", messages=[user("go")], tools=[TOOL], extra_headers=headers
            )
            assert reply.choices[0].message.tool_calls[0].function.arguments == '{"a":1}'

    Agent(CODER, [CODER.call]).run(play)


def test_a_form_that_cannot_be_forced_is_refused_in_the_form_of_the_api() -> None:
    gpt = Form(
        name="openai",
        hint="<|channel|>commentary to=functions.x",
        call="",
        broken=(),
        required="",
        named="",
    )

    async def play(client: Any, claude: Any) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            with pytest.raises(openai.BadRequestError, match=r"tool_choice=.* form openai"):
                await client.chat.completions.create(
                    model="policy", messages=[user("go")], tools=[TOOL], tool_choice=choice
                )
        with pytest.raises(anthropic.BadRequestError, match="form openai"):
            await claude.messages.create(
                model="policy",
                messages=[user("go")],
                tools=[CLAUDE],
                max_tokens=9,
                tool_choice={"type": "any"},
            )
        await client.chat.completions.create(model="policy", messages=[user("go")])

    Agent(gpt, ["text"]).run(play)


def test_a_template_that_needs_the_call_before_its_result_is_followed() -> None:
    """As that of gpt-oss, which refuses a result after an answer that has no call."""
    needs = "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    needs += "{{ raise_exception('no call before') }}{% endif %}"

    async def play(client: Any, claude: Any) -> None:
        messages: list[Any] = [user("go")]
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
        await client.chat.completions.create(
            model="policy", messages=[*messages, message, result], tools=[TOOL]
        )

    agent = Agent(CODER, [CODER.call, "done"])
    template = agent.session.chat._tokenizer.chat_template
    begin = "{% for m in messages %}"
    agent.session.chat._tokenizer.chat_template = template.replace(begin, begin + needs)
    row = Row(agent.run(play))
    text = agent.session.chat.decode(row.tokens.token_ids, with_special=True)
    assert row.num_segments == 1
    assert f"{CODER.call}{END}\n[tool]1{END}\n[assistant]done{END}" in text.replace(
        f"{END}[tool]", f"{END}\n[tool]"
    )


def read(form: Form, parser: str, text: str = "x", tools: bytes = b"[]") -> Any:
    calls = ToolCalls(tokenizer(form))
    ids = np.zeros(0, np.int32)
    return asyncio.run(calls.read(ReadCalls(parser=parser, text=text, token_ids=ids, tools=tools)))


def test_gpt_oss_is_read_by_its_token_ids() -> None:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    text = "<|channel|>analysis<|message|>think<|end|><|start|>assistant"
    text += ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    ids = np.array(get_encoding().encode(text, allowed_special="all"), np.int32)
    request = ReadCalls(parser="openai", text="", token_ids=ids, tools=json.dumps([TOOL]).encode())
    found = asyncio.run(ToolCalls(tokenizer(FORMS[0])).read(request))
    assert [(name, arguments) for _, name, arguments in found.calls] == [("add", '{"a": 1}')]


def test_a_parser_that_can_never_read_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"llama3_json.*tool_call_parser"):
        read(CODER, "llama3_json")
    with pytest.raises(ConfigError, match="vLLM's parser no_such"):
        read(CODER, "no_such")
    with pytest.raises(ConfigError, match="refuses the tools"):
        read(CODER, "qwen3_coder", tools=b'[{"type": "function"}]')


def test_a_parser_that_fails_on_one_answer_finds_no_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any, request: Any) -> Any:
        raise RuntimeError("on this text")

    monkeypatch.setattr(ToolCalls, "_read", fail)
    assert read(CODER, "qwen3_coder").calls == []


def test_unreadable_calls_are_refused_and_the_session_continues() -> None:
    async def refuse(request: ReadCalls) -> Any:
        raise ConfigError("no vLLM here")

    async def play(client: Any, claude: Any) -> None:
        for reader, message in ((refuse, "no vLLM here"), (None, "qwen3_coder cannot be read")):
            agent.session.chat._read = reader
            with pytest.raises(openai.BadRequestError, match=message):
                await by_chat(client, claude, "go")
        assert not agent.session.record.turns
        agent.policy.served.clear()
        reply = await client.chat.completions.create(model="policy", messages=[user("go")])
        assert reply.choices[0].message.content == "text"

    agent = Agent(CODER, [CODER.call, CODER.call, "text"])
    agent.run(play)


def test_a_gateway_asks_the_same_generator_and_another_one_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose("grpo_code", ["rollout.fn=[a:b]"])
    monkeypatch.setattr(generator, "load_tokenizer", lambda *_: tokenizer(CODER))
    asked: list[str] = []
    gone: set[str] = set()

    class Context(SimpleNamespace):
        """Of both kinds of processes; a call goes over the wire's codec."""

        async def serve(self, handlers: Any, *, devices: Any) -> None:
            self.handlers = handlers

        def incarnation_of(self, member: Member) -> Any:
            async def call(request: Any, *, timeout_s: float) -> Any:
                asked.append(member.name)
                if member.name in gone:
                    raise Unavailable(f"{member.name} ended")
                reply = await self.handlers[type(request)](decode(encode(request), type(request)))
                return decode(encode(reply), type(reply))

            return SimpleNamespace(call=call)

    context: Any = Context(
        config=config,
        model_path=None,
        token="t",
        name="generator-0",
        activity=Activity(),
        directory=Directory(),
        incarnation="1",
        log=None,
        peer=lambda _: None,
    )
    names = ("generator-0", "generator-1")
    context.directory._members = {
        name: Member(name=name, role="generator", pid=1, state="serving", since_s=0.0, address="x")
        for name in names
    }

    async def devices() -> list[str]:
        return []

    async def main() -> None:
        made = generator.Generator(context, cast(Any, None))
        made.sleeping = cast(
            Any, SimpleNamespace(engine=SimpleNamespace(weight_devices=devices), sleep=None)
        )
        await made.serve()
        engines = RemoteEngines(context)
        engines._versions = {(name, 1): 1 for name in names}
        ids = np.zeros(0, np.int32)
        tools = json.dumps([TOOL]).encode()
        request = ReadCalls(parser="qwen3_coder", text=CODER.call, token_ids=ids, tools=tools)
        for _ in range(3):
            found = await engines.read_calls(request)
            assert [(name, arguments) for _, name, arguments in found.calls] == [
                ("add", '{"a": 1}')
            ]
            gone.update(asked[:1] if len(asked) == 2 else [])
        await made._rollouts.close()

    asyncio.run(main())
    first, second = (asked[0], asked[-1])
    assert asked == [first, first, first, second]
    assert {first, second} == set(names)


def test_a_parser_by_name_wins_over_the_template() -> None:
    coder = tokenizer(CODER).chat_template
    assert form_of(coder).name == "qwen3_coder"
    assert form_of(coder, "hermes") == HERMES
    assert form_of("", "xlam").name == "xlam"
    assert form_of("[TOOL_CALLS]", "mistral").required == '[TOOL_CALLS][{"name": "'
    assert form_of("", "deepseek_v3").required
    assert form_of("") == form_of("no marks") == HERMES


def test_a_gateway_knows_the_forms_without_torch_and_vllm() -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["vllm"] = None
import async_rl.processes.gateway
from async_rl.sessions.tools import form_of
assert form_of("[TOOL_CALLS]").name == "mistral"
heavy = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
assert not heavy & {"torch", "vllm", "openai", "fastapi", "transformers"}, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)
