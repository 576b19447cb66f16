"""Tool calls and thinking in the forms of several models, read by the gateway or by vLLM's own
parsers.
"""

import asyncio
import contextlib
import copy
import functools
import json
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import yaml
from clients_support import APIS, CALL, TOOL, Clients, user, using
from sessions_support import CHATML, END, Policy, Row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.generation.vllm.tool_calls import ToolCalls
from async_rl.protocol.generator import CallsRead, ReadCalls
from async_rl.sessions.session import Session
from async_rl.sessions.tools import HERMES, TAGS, form_of, split, thinking_form

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }} <HINT>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<CALL>{% endfor %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@frozen
class Form:
    """As in tool_forms.yaml."""

    name: str
    hint: str
    call: str = ""
    broken: tuple[str, ...] = ()
    required: str = ""
    named: str = ""
    special: tuple[str, ...] = ()
    template: str = "{{ c.function.name }} {{ c.function.arguments | tojson }}"


FORMS = msgspec.convert(
    yaml.safe_load(Path(__file__).with_name("tool_forms.yaml").read_text()), list[Form]
)
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


@functools.cache
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


@contextlib.asynccontextmanager
async def playing(
    form: Form, texts: list[str], words: Any = None, read: Any = None
) -> AsyncIterator[tuple[Clients, Session, Policy]]:
    """One session of a model with this form. What it served is what it trains."""
    words = words or tokenizer(form)
    how = {"tokenizer": words, "read": read or ToolCalls(words).read}
    async with using(texts, **how) as (found, session, policy):
        yield found, session, policy
    tokens = Row(session).tokens
    served = [written.token_ids for _, written in policy.served]
    trained = tokens.token_ids[tokens.is_written]
    assert sorted(np.concatenate(served).tolist()) == sorted(trained.tolist())
    for turn in session.record.turns.values():
        assert any(np.array_equal(turn.answer.token_ids, ids) for ids in served)


def shown(session: Session, *, is_written: bool = False) -> str:
    """The text of a row, or of what the policy wrote of it."""
    tokens = Row(session).tokens
    ids = tokens.token_ids[tokens.is_written] if is_written else tokens.token_ids
    return session.chat.decode(ids, with_special=True)


async def chat(found: Clients, *messages: Any, **more: Any) -> Any:
    """Return the choice of a chat completion with the tool."""
    reply = await found.openai.chat.completions.create(
        model="policy", messages=list(messages), tools=[TOOL], **more
    )
    return reply.choices[0]


@each_form
async def test_a_call_of_the_model_is_a_call_and_a_broken_one_is_text(form: Form) -> None:
    async with playing(form, [form.call]) as (found, session, policy):
        assert session.chat.form.name == form.name
        reply = await APIS["responses"].ask(found, [user("go")], tools=True)
        ((_, name, arguments),) = reply.calls
        assert (name, arguments, reply.why) == ("add", {"a": 1}, "tool_calls")
        assert reply.text == ("" if form.name == "llama3_json" else "I add")
        for number, broken in enumerate(("no call", *form.broken)):
            visible = broken
            for token in form.special:
                visible = visible.replace(token, "")
            policy.say(broken)
            history = [user(f"break {number}")]
            reply = await APIS["messages"].ask(found, history, tools=True, stream=True)
            assert (reply.text, reply.calls, reply.why) == (visible, [], "stop")


@each_form
async def test_a_tool_loop_is_one_segment_with_the_ids_that_were_served(form: Form) -> None:
    async with playing(form, [form.call, form.call, "done", "again"]) as (found, session, _):
        messages: list[Any] = [user("go")]
        for result in ("1", "2"):
            reply = await APIS["chat"].ask(found, messages, tools=True)
            messages += [*reply.items, APIS["chat"].result(reply.calls[0][0], result)]
        await chat(found, *messages)
        # Rewritten history, with the first call written by the template this time.
        await chat(found, user("rewritten"), *messages[1:-1], {**messages[-1], "content": "3"})
    assert Row(session).num_segments == 2
    loop = f"{form.call}{END}\n[tool]1{END}\n[assistant]{form.call}{END}\n[tool]2{END}\n"
    assert f"{loop}[assistant]done{END}" in shown(session)


@each_form
async def test_a_forced_call_is_begun_for_the_policy_and_its_rest_is_trained(form: Form) -> None:
    async with playing(form, [form.required, form.named]) as (found, session, _):
        for choice in ("required", NAMED):
            reply = await chat(found, user(f"go {choice}"), tool_choice=choice)
            (call,) = reply.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert shown(session, is_written=True) == f"{form.required}{END}{form.named}{END}"


CODER = next(form for form in FORMS if form.name == "qwen3_coder")


async def test_calls_that_must_not_be_or_are_cut_off_are_none() -> None:
    async with playing(CODER, [CODER.call, CODER.call]) as (found, session, _):
        choice = await chat(found, user("go"), tool_choice="none")
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert "TOOLS" not in shown(session)
        # vLLM's parser returns a call without the argument that is missing.
        choice = await chat(found, user("on"), max_tokens=40)
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


async def test_a_form_that_cannot_be_forced_is_refused() -> None:
    gpt = Form(name="openai", hint="<|channel|>commentary to=functions.x")
    async with playing(gpt, ["text"]) as (found, *_):
        for choice in ("required", NAMED):
            with pytest.raises(openai.BadRequestError, match=r"tool_choice=.* form openai"):
                await chat(found, user("go"), tool_choice=choice)
        await APIS["chat"].ask(found, [user("go")])


async def test_a_template_that_needs_the_call_before_its_result_is_followed() -> None:
    # As the template of gpt-oss, which refuses a result after an answer that has no call.
    needs = "{% for m in messages %}"
    needs += "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    needs += "{{ raise_exception('no call before') }}{% endif %}"
    words = copy.deepcopy(tokenizer(CODER))
    words.chat_template = words.chat_template.replace("{% for m in messages %}", needs)
    async with playing(CODER, [CODER.call, "done"], words) as (found, session, _):
        reply = await APIS["chat"].ask(found, [user("go")], tools=True)
        result = APIS["chat"].result(reply.calls[0][0], "1")
        await chat(found, user("go"), *reply.items, result)
    assert Row(session).num_segments == 1
    assert f"{CODER.call}{END}[tool]1{END}\n[assistant]done{END}" in shown(session)


def read(words: Any, text: str, ids: Any = (), **how: Any) -> Any:
    asked = ReadCalls(text=text, token_ids=np.array(ids, np.int32), **how)
    return asyncio.run(ToolCalls(words).read(asked))


def test_gpt_oss_is_read_by_its_token_ids() -> None:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    text = "<|channel|>analysis<|message|>think<|end|><|start|>assistant"
    text += ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    ids = get_encoding().encode(text, allowed_special="all")
    tools = json.dumps([TOOL]).encode()
    found = read(tokenizer(FORMS[0]), "", ids, parser="openai", tools=tools)
    assert [(name, arguments) for _, name, arguments in found.calls] == [("add", '{"a": 1}')]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("deepseek_r1", "<think>1 and 1</think>two"),
        ("seed_oss", "<seed:think>1 and 1</seed:think>two"),
        ("mistral", "[THINK]1 and 1[/THINK]two"),
    ],
)
def test_vllm_reads_the_thinking_of_its_parsers(parser: str, text: str) -> None:
    words = copy.deepcopy(tokenizer(FORMS[0]))
    tags = [word + ">" for word in ("<think", "</think", "<seed:think", "</seed:think")]
    words.add_tokens([*tags, "[THINK]", "[/THINK]", "[TOOL_CALLS]"])
    ids = words(text, add_special_tokens=False)["input_ids"]
    found = read(words, text, ids, parser="", thinking=parser, tools=b"[]")
    assert (found.thinking, found.content, found.calls) == ("1 and 1", "two", [])


def test_a_parser_that_can_never_read_is_an_error_that_names_the_setting() -> None:
    for parser, words in (
        ("llama3_json", r"llama3_json.*tool_call_parser"),
        ("no_such", "vLLM's parsers no_such"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(tokenizer(CODER), "x", parser=parser, tools=b"[]")


async def test_unreadable_calls_are_refused_and_the_session_continues() -> None:
    async def refuse(request: ReadCalls) -> Any:
        raise ConfigError("no vLLM here")

    texts = [CODER.call, "text"]
    async with playing(CODER, texts, read=refuse) as (found, session, policy):
        with pytest.raises(openai.BadRequestError, match="no vLLM here"):
            await chat(found, user("go"))
        assert not session.record.turns
        policy.served.clear()
        assert (await APIS["chat"].ask(found, [user("go")])).text == "text"


def test_a_parser_by_name_wins_over_the_template() -> None:
    coder = tokenizer(CODER).chat_template
    assert form_of(coder).name == "qwen3_coder"
    assert form_of(coder, "hermes") == HERMES
    assert form_of("", "xlam").name == "xlam"
    assert form_of("[TOOL_CALLS]", "mistral").required == '[TOOL_CALLS][{"name": "'
    assert form_of("", "deepseek_v3").required
    assert form_of("") == form_of("no marks") == HERMES


# As Qwen3 writes the history: without earlier thinking.
PLAIN = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
# As DeepSeek-R1 and the thinking models of Qwen do.
BEGUN = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
THOUGHT = "<think>\n1 and 1\n</think>\n\n"
ENABLED: Any = {"type": "enabled", "budget_tokens": 1024}


def test_the_form_is_that_of_the_template_or_of_the_setting() -> None:
    assert thinking_form(CHATML) == ""
    assert thinking_form(PLAIN) == TAGS
    assert thinking_form("[THINK]") == "mistral"
    assert thinking_form(PLAIN, "qwen3") == "qwen3"


def test_thinking_is_what_the_tags_enclose() -> None:
    for text, begun, found in (
        ("two", False, ("", "two")),
        (THOUGHT + "two", False, ("1 and 1", "two")),
        ("1 and 1\n</think>two", True, ("1 and 1", "two")),
        ("\n<think>1 and", False, ("1 and", "")),
        ("two </think> three", False, ("", "two </think> three")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ):
        assert split(text, begun=begun) == found


THOUGHTS: dict[str, Callable[[Any], str]] = {
    "chat": lambda items: items[0].reasoning_content,
    "responses": lambda items: items[0].content[0].text,
    "messages": lambda items: items[0]["content"][0].thinking,
}


@pytest.mark.parametrize("name", APIS)
@pytest.mark.parametrize(("template", "stream"), [(PLAIN, True), (BEGUN, False)])
async def test_every_api_shows_it_in_its_form_and_the_next_request_continues(
    name: str, template: str, stream: bool
) -> None:
    written = THOUGHT.removeprefix("<think>\n") if template == BEGUN else THOUGHT
    more = {"thinking": ENABLED} if name == "messages" else {}
    async with using([written + "two", written + "four"], template) as (found, session, _):
        history = [user("1 + 1")]
        for text in ("two", "four"):
            reply = await APIS[name].ask(found, history, stream=stream, **more)
            assert (THOUGHTS[name](reply.items), reply.text) == ("1 and 1", text)
            history += [*reply.items, user("again")]
    row = Row(session)
    # All that the policy wrote is trained.
    assert row.num_segments == 1
    ids = row.tokens.token_ids[row.tokens.is_written]
    shown = session.chat.decode(ids, with_special=True)
    assert shown == f"{written}two{END}{written}four{END}"


async def test_a_call_after_thinking_is_a_call_and_an_unfinished_thought_is_no_answer() -> None:
    async with using(template=PLAIN) as (found, _, policy):
        chat = found.openai.chat.completions
        how: Any = {"model": "policy", "messages": [user("go")]}
        policy.say(THOUGHT + CALL)
        called = (await chat.create(**how, tools=[TOOL])).choices[0]
        assert called.finish_reason == "tool_calls"
        assert called.message.reasoning_content == "1 and 1"  # type: ignore[attr-defined]
        assert called.message.content is None
        policy.say(THOUGHT + "two")
        cut = (await chat.create(**how, max_tokens=3)).choices[0]
        assert (cut.finish_reason, cut.message.content) == ("length", "")
        # Without thinking in its request, Anthropic's client gets the text only.
        policy.say(THOUGHT + "two")
        (item,) = (await APIS["messages"].ask(found, [user("on")])).items
        assert [block.type for block in item["content"]] == ["text"]


async def test_other_forms_are_read_by_a_generator() -> None:
    asked: list[ReadCalls] = []

    async def read(request: ReadCalls) -> CallsRead:
        asked.append(request)
        return CallsRead(content="two", calls=[], thinking="1 and 1")

    texts, template = ["[THINK]1 and 1[/THINK]two"], CHATML + "{# [THINK] #}"
    async with using(texts, template, read=read) as (found, *_):
        chunks = []
        how: Any = {"model": "policy", "messages": [user("go")]}
        async for chunk in await found.openai.chat.completions.create(**how, stream=True):
            chunks.append(chunk.choices[0].delta)
        assert "".join(chunk.content or "" for chunk in chunks) == "two"
        assert chunks[1].model_extra == {"reasoning_content": "1 and 1"}
    (request,) = asked
    assert (request.parser, request.thinking) == ("", "mistral")
    assert request.text == "[THINK]1 and 1[/THINK]two"
