"""The prompts of a run with their hidden tests: of the embedded task, or of data files.

Invariants
- Ids are unique among the loaded prompts; the same configuration loads the same prompts in the same
  order.
- Files of more than MAX_ROWS_IN_MEMORY rows are not kept in memory: streamed.py reads a row
  when it is requested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.core.types import Prompt
from async_rl.data import list_functions
from async_rl.data.drafts import Draft, Drafter
from async_rl.data.embedded import LIST_FUNCTIONS
from async_rl.data.embedded_prompts import LONGEST_TOKENS, EmbeddedPrompts
from async_rl.data.files import Placed, Rejected, matching_files, read_placed
from async_rl.data.streamed import StreamedPrompts
from async_rl.data.tables import Table, open_table

_CHECKED_ROWS = 1000
"""Rows of large files that are checked before the run starts."""
MAX_ROWS_IN_MEMORY = 50_000
"""Training files with more rows are read row by row. The usual sets of problems have fewer, so that
every row of them is checked before the run starts.
"""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Examined:
    """The content of files. lengths: tokens of each readable prompt, before truncation."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_cut: int = 0


class PromptList(Protocol):
    """Prompts by number: a list, or rows that are read when they are requested."""

    def __len__(self) -> int:
        """Return their number."""

    def __getitem__(self, index: int, /) -> Prompt:
        """Return the index-th, counted from 0."""


def _raise(error: DataError) -> None:
    raise error


def load_train_prompts(
    config: RunConfig, tokenizer: Any, refused: Callable[[DataError], None] = _raise
) -> PromptList:
    """The training prompts. Raises DataError if a file or a row cannot be used; `refused` receives
    the error of a row that is read later.
    """
    if not config.data.train_files:
        specs, _ = list_functions.split(LIST_FUNCTIONS)
        return _embedded(specs, config, tokenizer)
    files = matching_files(config.data.train_files)
    tables = [open_table(file, config.cache_dir) for file in files]
    # Counting rows is cheap in both formats: line offsets, or the footer of Parquet.
    if sum(map(len, tables)) > MAX_ROWS_IN_MEMORY:
        return _streamed(files, tables, config, tokenizer, refused)
    return _checked(examine(config.data.train_files, config, tokenizer), config)


def load_eval_prompts(config: RunConfig, tokenizer: Any) -> Sequence[Prompt]:
    """The held-out prompts, none if train_files come without val_files. Any first n of the embedded
    task are a fair sample.
    """
    if config.data.val_files:
        return _checked(examine(config.data.val_files, config, tokenizer), config)
    if config.data.train_files:
        return []
    _, specs = list_functions.split(LIST_FUNCTIONS)
    return _embedded(specs, config, tokenizer)


def _embedded(
    specs: Sequence[list_functions.Spec], config: RunConfig, tokenizer: Any
) -> Sequence[Prompt]:
    """The prompts of these specs; all are made now if one may be over the limit of tokens."""
    prompts = EmbeddedPrompts(specs, config, tokenizer)
    if config.model.path is None and config.data.max_prompt_tokens >= LONGEST_TOKENS:
        return prompts
    examined = Examined()
    _encode(prompts.drafter, list(map(prompts.draft, range(len(prompts)))), config, examined)
    return _checked(examined, config)


def _streamed(
    files: Sequence[str],
    tables: Sequence[Table],
    config: RunConfig,
    tokenizer: Any,
    refused: Callable[[DataError], None],
) -> StreamedPrompts:
    """Prompts that are read when they are requested; the first ones are checked now."""
    drafter = Drafter(files, config, tokenizer)

    def read(table: int, number: int, placed: Placed) -> Prompt | Rejected:
        draft = drafter.draft(files[table], number, placed)
        if isinstance(draft, Rejected):
            return draft
        [(_, prompt)] = drafter.encode([draft])
        return prompt

    prompts = StreamedPrompts(
        tables, read, is_refused=lambda rejected: _is_refused(rejected, config), refused=refused
    )
    num_rejected = 0
    for prompt in map(prompts.read, range(_CHECKED_ROWS)):
        if isinstance(prompt, Rejected):
            num_rejected += 1
            if _is_refused(prompt, config):
                raise DataError(prompt.reason)
    _log.info(
        "%d rows are read when they are requested; of the first %d, %d cannot be used",
        len(prompts),
        _CHECKED_ROWS,
        num_rejected,
    )
    return prompts


def examine(patterns: Sequence[str], config: RunConfig, tokenizer: Any) -> Examined:
    """Every row of the files, as a prompt or as rejected. Raises DataError if a file cannot be
    read, or without rows.
    """
    files = matching_files(patterns)
    drafter = Drafter(files, config, tokenizer)
    examined = Examined()
    drafts: dict[str, Draft] = {}
    for file in files:
        rows = read_placed(file, cache_dir=config.cache_dir)
        for number, placed in enumerate(rows, start=1):
            draft = drafter.draft(file, number, placed)
            # The ledger identifies prompts by id: two with the same one would share a history.
            if isinstance(draft, Draft) and draft.prompt_id in drafts:
                other = drafts[draft.prompt_id].origin
                reason = (
                    f"{draft.origin}: id {draft.prompt_id} is also the id of {other}; give each row"
                    " its own id"
                )
                draft = Rejected(reason, is_over_long=False)
            if isinstance(draft, Rejected):
                examined.rejected.append(draft)
            else:
                drafts[draft.prompt_id] = draft
    if not drafts and not examined.rejected:
        raise DataError(f"{', '.join(patterns)}: no rows; give files with at least one prompt")
    if drafts:
        # Together: the tokenizer encodes a batch on several cores.
        _encode(drafter, list(drafts.values()), config, examined)
    return examined


def _encode(
    drafter: Drafter, drafts: Sequence[Draft], config: RunConfig, examined: Examined
) -> None:
    for num_tokens, prompt in drafter.encode(drafts):
        examined.lengths.append(num_tokens)
        if isinstance(prompt, Rejected):
            examined.rejected.append(prompt)
            continue
        examined.prompts.append(prompt)
        if num_tokens > config.data.max_prompt_tokens:
            examined.num_cut += 1


def _is_refused(rejected: Rejected, config: RunConfig) -> bool:
    """Return whether the configuration fails the run for such a row instead of leaving it out."""
    choice = config.data.truncation if rejected.is_over_long else config.data.bad_rows
    return choice == "error"


def _checked(examined: Examined, config: RunConfig) -> list[Prompt]:
    """The prompts. Raises DataError with the first rejected row unless the configuration leaves
    such rows out, which is then logged.
    """
    limit = config.data.max_prompt_tokens
    refused = [rejected for rejected in examined.rejected if _is_refused(rejected, config)]
    # One line of error: the command lists them all, with their reasons.
    if len(refused) > 1:
        more = f" (and {len(refused) - 1} more rows; async-rl data check lists them)"
        raise DataError(refused[0].reason + more)
    if refused:
        raise DataError(refused[0].reason)
    total = len(examined.rejected) + len(examined.prompts)
    unusable = [rejected for rejected in examined.rejected if not rejected.is_over_long]
    num_over_long = len(examined.rejected) - len(unusable)
    if num_over_long:
        _log.warning(
            "dropped %d of %d prompts over data.max_prompt_tokens=%d", num_over_long, total, limit
        )
    if unusable:
        _log.warning(
            "dropped %d of %d rows that cannot be used, the first: %s",
            len(unusable),
            total,
            unusable[0].reason,
        )
    if examined.num_cut:
        _log.warning(
            "cut %d of %d prompts to data.max_prompt_tokens=%d", examined.num_cut, total, limit
        )
    if not examined.prompts:
        raise DataError(
            f"all {total} prompts are over data.max_prompt_tokens={limit} or cannot be used; raise"
            " data.max_prompt_tokens, or correct the rows that the log names"
        )
    return examined.prompts
