"""Settings of the data: files and columns, length limits, rows that cannot be used, and the filter
by score.

Part of the schema in `run.py`, whose invariants hold here.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from async_rl.config.base import (
    LocalPath,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    Text,
    absolute,
    is_function,
)
from async_rl.config.plugins import DATA_SOURCE, is_plugin


def is_source(name: str) -> bool:
    """Return whether this names a function that yields rows, and not a file."""
    return is_function(name) or (not Path(name).suffix and is_plugin(name, DATA_SOURCE))


def _file_or_source(name: str) -> str:
    """A file of prompts as an absolute path; a data source keeps its name."""
    return name if is_source(name) else absolute(name)


Files = Annotated[list[Annotated[str, AfterValidator(_file_or_source)]], OneOrMore]


class ScoreFilterConfig(Section):
    """Removal of prompts at the start of an epoch, by the mean scaled reward of their newest
    group.
    """

    above: float | None
    """remove prompts whose mean reward is above this value; null = none"""
    below: float | None
    """remove prompts whose mean reward is below this value; null = none"""
    max_share: Share
    """largest share of the active prompts removed at one time, those farthest beyond their bound
    first"""

    @property
    def is_on(self) -> bool:
        """Return whether prompts are removed at all."""
        return self.above is not None or self.below is not None


class DataConfig(Section):
    """The prompts: the embedded task if `train_files` is empty, else the files."""

    train_files: Files
    """jsonl, json or parquet files, globs (*.parquet) or fsspec URLs; empty = the embedded task"""
    val_files: Files
    """files of the held-out evaluation; empty with train_files set = no evaluation"""
    metadata_file: LocalPath | None
    """file with further columns of the rows, joined by id (AReaL's code metadata); null = none"""
    epochs: PositiveFloat | None
    """passes over the training rows; num_steps=null is computed from it"""
    tokenizer: LocalPath | None
    """directory of the tokenizer; null = the model's tokenizer"""
    prompt_key: Text
    """column with the prompt, a string or a chat list; with `prompt` also `question`, `problem` or
    the like, by the layout of the row"""
    id_key: Text | None
    """column with a row's id; null = the first existing one of prompt_id, id, query_id, task_id,
    problem_id, question_id, else the row's number"""
    max_prompt_tokens: PositiveInt
    """tokens of a prompt, chat template included"""
    max_response_tokens: PositiveInt
    """tokens generated per sample at most"""
    # The source systems dropped long prompts without a word, so that a run trained on fewer rows
    # than its files have. Here it is an error unless a person chooses otherwise.
    truncation: Literal["error", "drop", "left", "right", "middle"]
    """a prompt longer than max_prompt_tokens: fail, drop its row, or cut it on the named side"""
    bad_rows: Literal["error", "drop"]
    """a row that cannot be used: fail, or drop the row"""
    longest: Literal["none", "prompts", "responses", "both"]
    """for stress tests: repeat each prompt up to max_prompt_tokens, continue each response up to
    max_response_tokens, or both"""
    order: Text
    """order of the training prompts: shuffled (in each epoch), sequential, pools (half of each
    batch from prompts that the policy solves in part), priority (those with the largest expected
    gradient), or a plug-in"""
    weights: dict[str, PositiveFloat]
    """share of each data source among the prompts of an epoch, relative to other sources; empty =
    every prompt once"""
    filter: ScoreFilterConfig

    @property
    def selects(self) -> bool:
        """Return whether prompts are selected by the results of earlier ones."""
        return self.order not in ("shuffled", "sequential")

    @property
    def fills_prompts(self) -> bool:
        """Return whether each prompt is repeated up to max_prompt_tokens."""
        return self.longest in ("prompts", "both")

    @property
    def ignores_end(self) -> bool:
        """Return whether responses continue after an end token."""
        return self.longest in ("responses", "both")
