"""Prompts with their hidden tests, ready to be sampled from: of the embedded task, or of data
files.

Invariants
- A prompt's token ids are those of its text, chat template and generation prompt included; none is
  longer than data.max_prompt_tokens.
- Ids are unique within what is loaded; the same configuration gives the same prompts in the same
  order.
- No row vanishes: each becomes a prompt or is among the rejected, with its place and the reason.
- Files of more than data.max_rows_in_memory rows are not held: streamed.py reads each row when it
  is asked for.
Called by the buffer and by `async-rl data check`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Protocol

import numpy as np

from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.core.types import AnswerTest, CodeProblem, Prompt
from async_rl.data import list_functions
from async_rl.data.embedded import LIST_FUNCTIONS
from async_rl.data.files import Placed, Rejected, Row, matching_files, read_placed, read_rows
from async_rl.data.fitting import filled, fitted
from async_rl.data.problems import read_hidden
from async_rl.data.streamed import StreamedPrompts
from async_rl.data.tables import open_table

_ID_COLUMNS = ("prompt_id", "id", "query_id", "task_id")
_QUESTION = "question"
_CHECKED_ROWS = 1000
"""Rows of large files that are checked before the run begins."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A prompt before tokenization. has_template: the text already has what the tokenizer would
    otherwise add.
    """

    place: str
    prompt_id: str
    text: str
    has_template: bool
    data_source: str
    problem: CodeProblem


@dataclass(slots=True)
class Examined:
    """What files hold. lengths: tokens of every prompt that could be read, before anything is cut."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_cut: int = 0


class PromptList(Protocol):
    """Prompts by number."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, index: int, /) -> Prompt:
        """The index-th, counted from 0."""


def _raise(error: DataError) -> None:
    raise error


def load_train_prompts(
    config: RunConfig, tokenizer: Any, refused: Callable[[DataError], None] = _raise
) -> PromptList:
    """What is trained on. Raises DataError where a file or a row cannot be used; `refused` is told
    of a row found so only later on.
    """
    if config.data.train_files:
        return _streamed(config, tokenizer, refused) or _checked(
            examine(config.data.train_files, config, tokenizer), config
        )
    specs, _ = list_functions.split(LIST_FUNCTIONS)
    return _embedded(specs, config, tokenizer)


def load_eval_prompts(config: RunConfig, tokenizer: Any) -> Sequence[Prompt]:
    """The held-out prompts: any first n of the embedded task are a fair sample; empty where
    train_files come without val_files.
    """
    if config.data.train_files or config.data.val_files:
        return (
            _checked(examine(config.data.val_files, config, tokenizer), config)
            if config.data.val_files
            else []
        )
    _, specs = list_functions.split(LIST_FUNCTIONS)
    return _embedded(specs, config, tokenizer)


def _embedded(
    specs: Sequence[list_functions.Spec], config: RunConfig, tokenizer: Any
) -> list[Prompt]:
    """Each spec once with one of its wordings, in turn, then each with the other."""
    tests = list_functions.HiddenTests(LIST_FUNCTIONS)
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
    examined = Examined()
    _encode(drafts, config, tokenizer, examined)
    return _checked(examined, config)


def _streamed(
    config: RunConfig, tokenizer: Any, refused: Callable[[DataError], None]
) -> StreamedPrompts | None:
    """Prompts that are read when they are asked for, the first ones checked now; None where the
    files are small enough to be held.
    """
    files = matching_files(config.data.train_files)
    tables = [open_table(file, config.cache_dir) for file in files]
    num_rows = sum(map(len, tables))
    if num_rows <= config.data.max_rows_in_memory:
        return None
    names, metadata = _names(files), _metadata(config)

    def read(table: int, number: int, placed: Placed) -> Prompt | Rejected:
        place, row = placed
        try:
            if isinstance(row, DataError):
                raise row
            draft = _draft(place, number, names[files[table]], row, config, tokenizer, metadata)
        except DataError as error:
            return Rejected(str(error), is_over_long=False)
        return _encoded(
            draft,
            tokenizer(draft.text, add_special_tokens=not draft.has_template, verbose=False)[
                "input_ids"
            ],
            config,
            tokenizer,
        )

    prompts = StreamedPrompts(
        tables, read, is_refused=lambda rejected: _is_refused(rejected, config), refused=refused
    )
    first = [
        found for found in map(prompts.read, range(_CHECKED_ROWS)) if isinstance(found, Rejected)
    ]
    if wrong := [rejected for rejected in first if _is_refused(rejected, config)]:
        raise DataError(wrong[0].reason)
    _log.info(
        "%d rows are read as they are asked for; of the first %d, %d cannot be used",
        num_rows,
        _CHECKED_ROWS,
        len(first),
    )
    return prompts


def examine(patterns: Sequence[str], config: RunConfig, tokenizer: Any) -> Examined:
    """Every row of the files, as a prompt or among the rejected. Raises DataError where a file
    cannot be read or there is no row.
    """
    files = matching_files(patterns)
    names = _names(files)
    metadata = _metadata(config)
    examined = Examined()
    drafts: dict[str, _Draft] = {}
    for file in files:
        for number, (place, row) in enumerate(
            read_placed(file, cache_dir=config.cache_dir), start=1
        ):
            try:
                if isinstance(row, DataError):
                    raise row
                draft = _draft(place, number, names[file], row, config, tokenizer, metadata)
                if (other := drafts.get(draft.prompt_id)) is not None:
                    raise DataError(
                        f"{place}: id {draft.prompt_id} is also that of {other.place}; give each"
                        " row its own id"
                    )
            except DataError as error:
                examined.rejected.append(Rejected(str(error), is_over_long=False))
            else:
                drafts[draft.prompt_id] = draft
    if not drafts and not examined.rejected:
        raise DataError(f"{', '.join(patterns)}: no rows; give files with at least one prompt")
    if drafts:
        _encode(list(drafts.values()), config, tokenizer, examined)
    return examined


def _names(files: Sequence[str]) -> dict[str, str]:
    """What the ids of each file's rows begin with: its name, with that of its folder where two
    files have the same name.
    """
    stems = Counter(PurePosixPath(file).stem for file in files)
    return {
        file: path.stem if stems[path.stem] == 1 else f"{path.parent.name}/{path.stem}"
        for file, path in ((file, PurePosixPath(file)) for file in files)
    }


def _metadata(config: RunConfig) -> dict[str, Row]:
    """Further columns by id, from data.metadata_file."""
    file = config.data.metadata_file
    if file is None:
        return {}
    columns = {_id(row, config): row for _, row in read_rows(file, cache_dir=config.cache_dir)}
    if None in columns:
        raise DataError(
            f"data.metadata_file={file}: a row without an id; set data.id_key to the column that"
            " holds it"
        )
    return {str(name): row for name, row in columns.items()}


def _id(row: Row, config: RunConfig) -> str | None:
    columns = _ID_COLUMNS if config.data.id_key is None else (config.data.id_key,)
    return next((str(row[column]) for column in columns if row.get(column) is not None), None)


def _draft(
    place: str,
    number: int,
    file_name: str,
    row: Row,
    config: RunConfig,
    tokenizer: Any,
    metadata: dict[str, Row],
) -> _Draft:
    name, prompt_key = _id(row, config), config.data.prompt_key
    if name is None and config.data.id_key is not None:
        raise DataError(
            f"{place}: no column {config.data.id_key!r}, only {sorted(row)}; set data.id_key to the"
            " one with the id"
        )
    if name is not None and len(name) > config.data.max_id_length:
        limit = config.data.max_id_length
        raise DataError(
            f"{place}: the id {name[:40]!r}... has {len(name)} characters, over"
            f" data.max_id_length={limit}; raise it"
        )
    if config.data.metadata_file is not None:
        if name not in metadata:
            raise DataError(
                f"{place}: data.metadata_file={config.data.metadata_file} has no row with the id"
                f" {name!r}; add it"
            )
        row = {**metadata[name], **row}
    if row.get(prompt_key) is None and row.get(_QUESTION) is not None:
        prompt_key = _QUESTION
    problem, shown = read_hidden(
        place, row, config.reward, has_rollout=config.rollout.fn is not None
    )
    messages = _messages(place, row, prompt_key, shown)
    source, first = row.get("data_source"), next(iter(problem.tests), None)
    return _Draft(
        place=place,
        prompt_id=f"{file_name}/{name if name is not None else number}",
        text=_render(place, messages, tokenizer, is_chat=isinstance(row[prompt_key], list)),
        has_template=bool(tokenizer.chat_template),
        data_source=(
            source
            if isinstance(source, str)
            else first.rule
            if isinstance(first, AnswerTest)
            else "code"
        ),
        problem=problem,
    )


def _messages(place: str, row: Row, prompt_key: str, shown: Sequence[str]) -> list[dict[str, str]]:
    """The chat of a row; a plain string is one user message. Assert statements that must be seen
    are added to the last message.
    """
    prompt = row.get(prompt_key)
    if prompt is None:
        raise DataError(
            f"{place}: no column {prompt_key!r}, only {sorted(row)}; set data.prompt_key to the one"
            " with the prompt"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    is_chat = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not is_chat or not messages:
        raise DataError(
            f"{place}: column {prompt_key!r} must be a string or a list of {{role, content}}, this"
            f" is {str(prompt)[:80]!r}"
        )
    last = messages[-1]["content"]
    if shown:
        last = f"{last}\nYour code should pass these tests:\n" + "\n".join(shown)
    return [
        *({"role": m["role"], "content": m["content"]} for m in messages[:-1]),
        {"role": messages[-1]["role"], "content": last},
    ]


def _render(place: str, messages: list[dict[str, str]], tokenizer: Any, *, is_chat: bool) -> str:
    """The text to be continued: chat template and generation prompt, or the plain text and a
    newline where there is no template.
    """
    if tokenizer.chat_template:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    if is_chat:
        raise DataError(
            f"{place}: the prompt is a chat and the tokenizer has no chat template; use a chat"
            " model, or plain strings as prompts"
        )
    return messages[0]["content"] + "\n"


def _with_template(draft: _Draft, tokenizer: Any) -> _Draft:
    text = _render(draft.place, [{"role": "user", "content": draft.text}], tokenizer, is_chat=False)
    return replace(draft, text=text, has_template=True)


def _encode(
    drafts: Sequence[_Draft], config: RunConfig, tokenizer: Any, examined: Examined
) -> None:
    """Tokenize all drafts at once."""
    rows = tokenizer(
        [draft.text for draft in drafts],
        add_special_tokens=not drafts[0].has_template,
        verbose=False,
    )["input_ids"]
    for draft, ids in zip(drafts, rows, strict=True):
        examined.lengths.append(len(ids))
        found = _encoded(draft, ids, config, tokenizer)
        if isinstance(found, Rejected):
            examined.rejected.append(found)
        else:
            examined.num_cut += len(ids) > config.data.max_prompt_tokens
            examined.prompts.append(found)


def _encoded(
    draft: _Draft, ids: Sequence[int], config: RunConfig, tokenizer: Any
) -> Prompt | Rejected:
    """The prompt of these tokens; what becomes of one over the limit is said by data.truncation."""
    data = config.data
    kept = fitted(ids, data.max_prompt_tokens, data.truncation)
    if kept is None:
        remedy = "raise it, or set data.truncation=drop"
        reason = (
            f"{draft.place}: {len(ids)} tokens are over"
            f" data.max_prompt_tokens={data.max_prompt_tokens}; {remedy}"
        )
        return Rejected(reason, is_over_long=True)
    if data.fill_to_max_tokens:
        kept = filled(kept, data.max_prompt_tokens)
    return Prompt(
        prompt_id=draft.prompt_id,
        text=draft.text if len(kept) == len(ids) else tokenizer.decode(kept),
        token_ids=np.array(kept, dtype=np.int32),
        data_source=draft.data_source,
        problem=draft.problem,
    )


def _is_refused(rejected: Rejected, config: RunConfig) -> bool:
    """Whether the configuration ends the run for such a row, rather than leave it out."""
    return (config.data.truncation if rejected.is_over_long else config.data.bad_rows) == "error"


def _checked(examined: Examined, config: RunConfig) -> list[Prompt]:
    """The prompts. Raises DataError with the first rejected row unless the configuration leaves
    such rows out, which is then logged.
    """
    data = config.data
    refused = [r for r in examined.rejected if _is_refused(r, config)]
    if refused:
        more = (
            f" (and {len(refused) - 1} more rows; async-rl data check lists them)"
            if len(refused) > 1
            else ""
        )
        raise DataError(refused[0].reason + more)
    total = len(examined.rejected) + len(examined.prompts)
    counts = Counter(rejected.is_over_long for rejected in examined.rejected)
    if counts[True]:
        _log.warning(
            "dropped %d of %d prompts over data.max_prompt_tokens=%d",
            counts[True],
            total,
            data.max_prompt_tokens,
        )
    if counts[False]:
        first = next(rejected.reason for rejected in examined.rejected if not rejected.is_over_long)
        _log.warning(
            "dropped %d of %d rows that cannot be used, the first: %s", counts[False], total, first
        )
    if examined.num_cut:
        _log.warning(
            "cut %d of %d prompts to data.max_prompt_tokens=%d",
            examined.num_cut,
            total,
            data.max_prompt_tokens,
        )
    if not examined.prompts:
        raise DataError(
            f"all {total} prompts are over data.max_prompt_tokens={data.max_prompt_tokens} or"
            " cannot be used; raise it"
        )
    return examined.prompts
