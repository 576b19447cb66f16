"""Prompts with their hidden tests, ready to be sampled from: of the embedded task, or of data files.

Invariants
- A prompt's token ids are those of its text, chat template and generation prompt included; none is longer than data.max_prompt_tokens.
- Ids are unique within what is loaded; the same configuration gives the same prompts in the same order.
Called by the buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from async_rl.config import RunConfig
from async_rl.data import list_functions
from async_rl.data.files import Row, read_rows
from async_rl.data.problems import read_problem
from async_rl.errors import DataError
from async_rl.types import CodeProblem, Prompt

_ID_COLUMNS = ("prompt_id", "id", "query_id", "task_id")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A prompt before tokenization. has_template: the text already has what the tokenizer would otherwise add."""

    place: str
    prompt_id: str
    text: str
    has_template: bool
    data_source: str
    problem: CodeProblem


def load_train_prompts(config: RunConfig, tokenizer: Any) -> Sequence[Prompt]:
    """What is trained on. Raises DataError where a file or a row cannot be used."""
    if config.data.train_files:
        return _load_files(config.data.train_files, config, tokenizer)
    specs, _ = list_functions.split(config.data.list_functions)
    return _embedded(specs, config, tokenizer)


def load_eval_prompts(config: RunConfig, tokenizer: Any) -> Sequence[Prompt]:
    """The held-out prompts: any first n of the embedded task are a fair sample; empty where train_files come without val_files."""
    if config.data.train_files or config.data.val_files:
        return _load_files(config.data.val_files, config, tokenizer) if config.data.val_files else []
    _, specs = list_functions.split(config.data.list_functions)
    return _embedded(specs, config, tokenizer)


def _embedded(specs: Sequence[list_functions.Spec], config: RunConfig, tokenizer: Any) -> list[Prompt]:
    """Each spec once with one of its wordings, in turn, then each with the other."""
    tests = list_functions.HiddenTests(config.data.list_functions)
    problems = [tests(spec) for spec in specs]
    drafts = []
    for turn in range(list_functions.NUM_WORDINGS):
        for number, (spec, problem) in enumerate(zip(specs, problems, strict=True)):
            which = (number + turn) % list_functions.NUM_WORDINGS
            name = f"{list_functions.DATA_SOURCE}/{spec.name}/{which}"
            drafts.append(
                _Draft(
                    place=name,
                    prompt_id=name,
                    text=list_functions.wording(spec, which),
                    has_template=False,
                    data_source=list_functions.DATA_SOURCE,
                    problem=problem,
                )
            )
    if tokenizer.chat_template:
        drafts = [_with_template(draft, tokenizer) for draft in drafts]
    return _encode(drafts, config, tokenizer)


def _load_files(files: Sequence[str], config: RunConfig, tokenizer: Any) -> list[Prompt]:
    drafts: dict[str, _Draft] = {}
    for file in files:
        for draft in _read_drafts(file, config.data.prompt_key, tokenizer):
            if (other := drafts.get(draft.prompt_id)) is not None:
                raise DataError(f"{draft.place}: id {draft.prompt_id} is also that of {other.place}; give each row its own id")
            drafts[draft.prompt_id] = draft
    if not drafts:
        raise DataError(f"{', '.join(files)}: no rows; give files with at least one prompt")
    return _encode(list(drafts.values()), config, tokenizer)


def _read_drafts(file: str, prompt_key: str, tokenizer: Any) -> Iterator[_Draft]:
    stem = PurePosixPath(file).stem
    for number, (place, row) in enumerate(read_rows(file), start=1):
        problem, shown = read_problem(place, row)
        messages = _messages(place, row, prompt_key, shown)
        source = row.get("data_source")
        name = next((str(row[column]) for column in _ID_COLUMNS if row.get(column) is not None), str(number))
        yield _Draft(
            place=place,
            prompt_id=f"{stem}/{name}",
            text=_render(place, messages, tokenizer, is_chat=isinstance(row[prompt_key], list)),
            has_template=bool(tokenizer.chat_template),
            data_source=source if isinstance(source, str) else "code",
            problem=problem,
        )


def _messages(place: str, row: Row, prompt_key: str, shown: Sequence[str]) -> list[dict[str, str]]:
    """The chat of a row; a plain string is one user message. Assert statements that must be seen are added to the last message."""
    prompt = row.get(prompt_key)
    if prompt is None:
        raise DataError(f"{place}: no column {prompt_key!r}, only {sorted(row)}; set data.prompt_key to the one with the prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    is_chat = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not is_chat or not messages:
        raise DataError(f"{place}: column {prompt_key!r} must be a string or a list of {{role, content}}, this is {str(prompt)[:80]!r}")
    last = messages[-1]["content"]
    if shown:
        last = f"{last}\nYour code should pass these tests:\n" + "\n".join(shown)
    return [*({"role": m["role"], "content": m["content"]} for m in messages[:-1]), {"role": messages[-1]["role"], "content": last}]


def _render(place: str, messages: list[dict[str, str]], tokenizer: Any, *, is_chat: bool) -> str:
    """The text to be continued: chat template and generation prompt, or the plain text and a newline where there is no template."""
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    if is_chat:
        raise DataError(
            f"{place}: the prompt is a chat and the tokenizer has no chat template; use a chat model, or plain strings as prompts"
        )
    return messages[0]["content"] + "\n"


def _with_template(draft: _Draft, tokenizer: Any) -> _Draft:
    text = _render(draft.place, [{"role": "user", "content": draft.text}], tokenizer, is_chat=False)
    return _Draft(
        place=draft.place, prompt_id=draft.prompt_id, text=text, has_template=True, data_source=draft.data_source, problem=draft.problem
    )


def _encode(drafts: Sequence[_Draft], config: RunConfig, tokenizer: Any) -> list[Prompt]:
    """Tokenize all drafts; one over the limit is an error, or dropped and counted in the log, by data.truncation."""
    limit = config.data.max_prompt_tokens
    add_special = not drafts[0].has_template
    rows = tokenizer([draft.text for draft in drafts], add_special_tokens=add_special, verbose=False)["input_ids"]
    prompts = []
    for draft, ids in zip(drafts, rows, strict=True):
        if len(ids) > limit and config.data.truncation == "error":
            raise DataError(
                f"{draft.place}: {len(ids)} tokens are over data.max_prompt_tokens={limit}; raise it, or set data.truncation=drop"
            )
        if len(ids) <= limit:
            prompts.append(
                Prompt(
                    prompt_id=draft.prompt_id,
                    text=draft.text,
                    token_ids=np.array(ids, dtype=np.int32),
                    data_source=draft.data_source,
                    problem=draft.problem,
                )
            )
    if len(prompts) < len(drafts):
        _log.warning("dropped %d of %d prompts over data.max_prompt_tokens=%d", len(drafts) - len(prompts), len(drafts), limit)
    if not prompts:
        raise DataError(f"all {len(drafts)} prompts are over data.max_prompt_tokens={limit}; raise it")
    return prompts
