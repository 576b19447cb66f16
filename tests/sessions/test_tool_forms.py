"""Tool calls in the forms of several models, read by vLLM's own parsers, served by every API."""

import asyncio
import contextlib
import copy
import functools
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import numpy as np
import openai
import pytest
import yaml
from clients_support import APIS, CLAUDE, TOOL, Clients, user, using
from sessions_support import END, Policy, Row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.generation.vllm.tool_calls import ToolCalls
from async_rl.protocol.generator import ReadCalls
from async_rl.sessions.session import Session
from async_rl.sessions.tools import HERMES, form_of

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
async def test_every_api_serves_a_call_of_the_model_and_a_broken_one_is_text(form: Form) -> None:
    content = "" if form.name == "llama3_json" else "I add"
    ways = [(api, stream) for api in APIS.values() for stream in (False, True)]
    async with playing(form, [form.call, "no call"] * len(ways)) as (found, session, policy):
        assert session.chat.form.name == form.name
        for number, (api, stream) in enumerate(ways):
            how: Any = {"tools": True, "stream": stream}
            reply = await api.ask(found, [user(f"go {number}")], **how)
            ((_, name, arguments),) = reply.calls
            assert (reply.text, name, arguments) == (content, "add", {"a": 1})
            assert reply.why == "tool_calls"
            # A later answer without a call is text in every form.
            reply = await api.ask(found, [user(f"say {number}")], **how)
            assert (reply.text, reply.calls, reply.why) == ("no call", [], "stop")
        for number, broken in enumerate(form.broken):
            visible = broken
            for token in form.special:
                visible = visible.replace(token, "")
            for name, stream in (("chat", False), ("messages", True)):
                policy.say(broken)
                history = [user(f"break {number} {name}")]
                reply = await APIS[name].ask(found, history, tools=True, stream=stream)
                assert (reply.text, reply.calls) == (visible, [])


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


async def test_tools_that_must_not_be_used_are_not_shown_and_calls_remain_text() -> None:
    async with playing(CODER, ["text"]) as (found, session, _):
        message = (await chat(found, user("go"), tool_choice="none")).message
        assert (message.content, message.tool_calls) == ("text", None)
    assert "TOOLS" not in shown(session)


async def test_a_call_that_the_limit_cut_is_not_completed_by_the_parser() -> None:
    # vLLM's parser returns a call without the argument that is missing.
    async with playing(CODER, [CODER.call]) as (found, *_):
        choice = await chat(found, user("go"), max_tokens=40)
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


async def test_a_form_that_cannot_be_forced_is_refused_in_the_form_of_the_api() -> None:
    gpt = Form(name="openai", hint="<|channel|>commentary to=functions.x")
    async with playing(gpt, ["text"]) as (found, *_):
        for choice in ("required", NAMED):
            with pytest.raises(openai.BadRequestError, match=r"tool_choice=.* form openai"):
                await chat(found, user("go"), tool_choice=choice)
        how: Any = {"model": "policy", "messages": [user("go")], "max_tokens": 9}
        how |= {"tools": [CLAUDE], "tool_choice": {"type": "any"}}
        with pytest.raises(anthropic.BadRequestError, match="form openai"):
            await found.claude.messages.create(**how)
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


def read(form: Form, parser: str) -> Any:
    asked = ReadCalls(parser=parser, text="x", token_ids=np.zeros(0, np.int32), tools=b"[]")
    return asyncio.run(ToolCalls(tokenizer(form)).read(asked))


def test_gpt_oss_is_read_by_its_token_ids() -> None:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    text = "<|channel|>analysis<|message|>think<|end|><|start|>assistant"
    text += ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    ids = np.array(get_encoding().encode(text, allowed_special="all"), np.int32)
    request = ReadCalls(parser="openai", text="", token_ids=ids, tools=json.dumps([TOOL]).encode())
    found = asyncio.run(ToolCalls(tokenizer(FORMS[0])).read(request))
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
    ids = np.array(words(text, add_special_tokens=False)["input_ids"], np.int32)
    request = ReadCalls(parser="", thinking=parser, text=text, token_ids=ids, tools=b"[]")
    found = asyncio.run(ToolCalls(words).read(request))
    assert (found.thinking, found.content, found.calls) == ("1 and 1", "two", [])


def test_a_parser_that_can_never_read_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"llama3_json.*tool_call_parser"):
        read(CODER, "llama3_json")
    with pytest.raises(ConfigError, match="vLLM's parsers no_such"):
        read(CODER, "no_such")


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
