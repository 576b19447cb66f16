"""The prompts of a run with their hidden tests: of the embedded task, or of data files.

Invariants
- Ids are unique among the prompts in memory; the same configuration loads the same prompts in the
  same order.
- Files of more than MAX_ROWS_IN_MEMORY rows are not kept in memory: streamed.py reads a row
  when it is requested.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import Prompt, Purpose
from async_rl.data import list_functions
from async_rl.data.drafts import Draft, Drafter, Rejected
from async_rl.data.files import Table, matching_files, open_table
from async_rl.data.list_functions import LIST_FUNCTIONS
from async_rl.data.order import PromptOrder
from async_rl.data.streamed import StreamedPrompts

_CHECKED_ROWS = 1000
"""Rows of large files that are checked before the run starts: a fraction of a second."""
MAX_ROWS_IN_MEMORY = 50_000
"""Training files with more rows are read row by row. The usual sets of problems have fewer, so that
every row of them is checked before the run starts.
"""
_log = logging.getLogger(__name__)


@frozen
class RunPrompts:
    """Training prompts with their order, and the prompts of one evaluation.

    vocabulary_size: of the model; no token id reaches it.
    """

    train: Sequence[Prompt]
    order: PromptOrder
    held_out: Sequence[Prompt]
    vocabulary_size: int

    @property
    def num_held_out(self) -> int:
        """Prompts of one evaluation."""
        return len(self.held_out)

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        """Return the index-th prompt of the purpose's order."""
        if purpose is Purpose.TRAIN:
            return self.train[self.order.index(index)]
        return self.held_out[index]


@dataclass(slots=True)
class Examined:
    """The content of files. lengths: tokens of each readable prompt, before truncation."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_cut: int = 0


def _raise(error: DataError) -> None:
    raise error


def load_prompts(
    config: RunConfig,
    tokenizer: Any,
    refused: Callable[[DataError], None],
    *,
    vocabulary_size: int,
) -> RunPrompts:
    """Return the prompts of the run. refused: as in `load_train_prompts`. Raises DataError."""
    train = load_train_prompts(config, tokenizer, refused)
    if not train:
        raise DataError(
            f"data.train_files={config.data.train_files} contains no usable prompt; the log names"
            " the rows that were left out"
        )
    held_out = load_eval_prompts(config, tokenizer)
    return RunPrompts(
        train=train,
        order=PromptOrder(config.seed, len(train), shuffle=config.data.shuffle),
        # The first ones in every evaluation, so that its numbers can be compared over the run.
        held_out=held_out[: config.evaluation.num_prompts or len(held_out)],
        vocabulary_size=vocabulary_size,
    )


def load_train_prompts(
    config: RunConfig, tokenizer: Any, refused: Callable[[DataError], None] = _raise
) -> Sequence[Prompt]:
    """Return the training prompts. Raises DataError if a file or a row cannot be used; `refused`
    receives the error of a row that is read later.
    """
    if not config.data.train_files:
        specs, _ = list_functions.split(LIST_FUNCTIONS)
        return _embedded(specs, config, tokenizer)
    files = matching_files(config.data.train_files)
    tables = [open_table(file) for file in files]
    drafter = Drafter(files, config, tokenizer)
    # Counting rows is cheap in both formats: line offsets, or the footer of Parquet.
    if sum(map(len, tables)) > MAX_ROWS_IN_MEMORY:
        return _streamed(files, tables, drafter, config, refused)
    return _checked(_examined(files, tables, drafter, config), config)


def load_eval_prompts(config: RunConfig, tokenizer: Any) -> Sequence[Prompt]:
    """Return the held-out prompts, none if train_files come without val_files. Any first n prompts
    of the embedded task are a fair sample.
    """
    if config.data.val_files:
        return _checked(examine(config.data.val_files, config, tokenizer), config)
    # Held-out prompts of the embedded task would measure something the run does not train.
    if config.data.train_files:
        return []
    _, specs = list_functions.split(LIST_FUNCTIONS)
    return _embedded(specs, config, tokenizer)


def steps_of_epochs(config: RunConfig) -> int:
    """Return the steps after which every training row was issued data.epochs times, the last step
    filled up. Raises ConfigError.

    Rows that will be left out count too, because files are not checked here.
    """
    if config.data.epochs is None:
        raise ConfigError(
            "num_steps=null and data.epochs=null: nothing says how long the run is; set num_steps,"
            " or data.epochs=1"
        )
    num_rows = list_functions.NUM_WORDINGS * len(list_functions.split(LIST_FUNCTIONS)[0])
    if config.data.train_files:
        try:
            files = matching_files(config.data.train_files)
            num_rows = sum(len(open_table(file)) for file in files)
        except DataError as error:
            raise ConfigError(f"num_steps=null: the rows cannot be counted: {error}") from error
    return max(math.ceil(config.data.epochs * num_rows / config.buffer.groups_per_step), 1)


def _embedded(
    specs: Sequence[list_functions.Spec], config: RunConfig, tokenizer: Any
) -> Sequence[Prompt]:
    """Return each spec once with one of its wordings, in turn, then each with the other."""
    drafter = Drafter([], config, tokenizer)
    hidden_tests = list_functions.HiddenTests(LIST_FUNCTIONS)
    num_rows = list_functions.NUM_WORDINGS * len(specs)

    def draft(index: int) -> Draft:
        turn, number = divmod(index, len(specs))
        which = (number + turn) % list_functions.NUM_WORDINGS
        spec = specs[number]
        name = f"{list_functions.DATA_SOURCE}/{spec.name}/{which}"
        text = list_functions.wording(spec, which)
        if tokenizer.chat_template:
            text = drafter.render(name, [{"role": "user", "content": text}])
        return Draft(
            origin=name,
            prompt_id=name,
            text=text,
            data_source=list_functions.DATA_SOURCE,
            problem=hidden_tests(spec),
        )

    if config.model.path is None and config.data.max_prompt_tokens >= list_functions.LONGEST_TOKENS:
        return StreamedPrompts(num_rows, lambda i: drafter.prompt(draft(i)), lambda _: False)
    # With another tokenizer a prompt may be over the limit, so all are made now.
    examined = Examined()
    _encode(drafter, [draft(index) for index in range(num_rows)], config, examined)
    return _checked(examined, config)


def _streamed(
    files: Sequence[str],
    tables: Sequence[Table],
    drafter: Drafter,
    config: RunConfig,
    refused: Callable[[DataError], None],
) -> StreamedPrompts:
    """Return prompts that are read when they are requested; the first rows are checked now."""
    ends = list(itertools.accumulate(map(len, tables)))

    def read(index: int) -> Prompt | Rejected:
        table = bisect.bisect_right(ends, index)
        number = index - (ends[table - 1] if table else 0)
        draft = drafter.draft(files[table], number + 1, tables[table][number])
        return draft if isinstance(draft, Rejected) else drafter.prompt(draft)

    def report(rejected: Rejected) -> bool:
        is_refused = _is_refused(rejected, config)
        if is_refused:
            refused(DataError(rejected.reason))
        return is_refused

    checked = map(read, range(_CHECKED_ROWS))
    rejected = [prompt for prompt in checked if isinstance(prompt, Rejected)]
    # As for small files, the first bad row fails the run before anything expensive starts.
    for prompt in rejected:
        if _is_refused(prompt, config):
            raise DataError(prompt.reason)
    _log.info(
        "%d rows are read when they are requested; of the first %d, %d cannot be used",
        ends[-1],
        _CHECKED_ROWS,
        len(rejected),
    )
    return StreamedPrompts(ends[-1], read, report)


def examine(patterns: Sequence[str], config: RunConfig, tokenizer: Any) -> Examined:
    """Return every row of the files, as a prompt or as rejected. Raises DataError if a file cannot
    be read, or if there are no rows.
    """
    files = matching_files(patterns)
    tables = (open_table(file) for file in files)
    return _examined(files, tables, Drafter(files, config, tokenizer), config)


def _examined(
    files: Sequence[str], tables: Iterable[Table], drafter: Drafter, config: RunConfig
) -> Examined:
    examined = Examined()
    drafts: dict[str, Draft] = {}
    for file, table in zip(files, tables, strict=True):
        for number, placed in enumerate(table, start=1):
            draft = drafter.draft(file, number, placed)
            # The ledger identifies prompts by id: two with the same one would share a history.
            if isinstance(draft, Draft) and draft.prompt_id in drafts:
                reason = (
                    f"{draft.origin}: id {draft.prompt_id} is also the id of"
                    f" {drafts[draft.prompt_id].origin}; give each row its own id"
                )
                draft = Rejected(reason=reason, is_over_long=False)
            if isinstance(draft, Rejected):
                examined.rejected.append(draft)
            else:
                drafts[draft.prompt_id] = draft
    if not drafts and not examined.rejected:
        raise DataError(f"{', '.join(files)}: no rows; give files with at least one prompt")
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
    """Return the prompts. Raises DataError with the first rejected row unless the configuration
    leaves such rows out, which is then logged.
    """
    limit = config.data.max_prompt_tokens
    refused = [rejected for rejected in examined.rejected if _is_refused(rejected, config)]
    if refused:
        reason = refused[0].reason
        # One line of error: the command lists them all, with their reasons.
        if len(refused) > 1:
            reason += f" (and {len(refused) - 1} more rows; async-rl data check lists them)"
        raise DataError(reason)
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
