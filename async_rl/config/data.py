"""The part of the configuration's schema about data: what is asked, where it is read from, what
becomes of rows that do not fit.

As in config.py: no default here, every field with its unit, range and meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.base import Section


class ScoreFilterConfig(Section):
    """Which prompts leave the training data at the start of an epoch, by the mean scaled reward of
    their newest group.
    """

    above: float | None
    """prompts whose mean reward is above it leave; null = none"""
    below: float | None
    """prompts whose mean reward is below it leave; null = none"""
    max_share: Annotated[float, Field(gt=0, lt=1)]
    """share of the active prompts that leave at most at one time, farthest beyond their bound
    first"""


class DataConfig(Section):
    """What is asked: the embedded task when `train_files` is empty, else the files."""

    train_files: list[str]
    """jsonl, json or parquet files, globs (*.parquet) or fsspec URLs; empty = the embedded task"""
    val_files: list[str]
    """files for the held-out evaluation; empty with train_files set = no evaluation"""
    metadata_file: Annotated[str, Field(min_length=1)] | None
    """file with further columns of the rows, found by id (AReaL's code metadata); null = the rows
    hold everything"""
    epochs: Annotated[float, Field(gt=0)] | None
    """passes over the training rows, from which num_steps=null is counted"""
    tokenizer: Annotated[str, Field(min_length=1)] | None
    """directory of a tokenizer to use; null = the model's own"""
    prompt_key: Annotated[str, Field(min_length=1)]
    """column with the prompt, a string or a chat list; without it `question`"""
    id_key: Annotated[str, Field(min_length=1)] | None
    """column with a row's id; null = the first of prompt_id, id, query_id, task_id, else the row's
    number"""
    max_id_length: Annotated[int, Field(ge=1)]
    """characters; a row with a longer id is a bad row"""
    max_rows_in_memory: Annotated[int, Field(ge=1000)]
    """rows; training files with more are read and checked row by row as they are asked for"""
    max_prompt_tokens: Annotated[int, Field(ge=1)]
    """tokens, chat template included"""
    max_response_tokens: Annotated[int, Field(ge=1)]
    """tokens generated at most per sample"""
    truncation: Literal["error", "drop", "left", "right", "middle"]
    """a prompt over max_prompt_tokens: refuse it, leave it out, or cut it on the named side"""
    bad_rows: Literal["error", "drop"]
    """a row that cannot be used: refuse the file, or leave the row out"""
    fill_to_max_tokens: bool
    """repeat each prompt up to max_prompt_tokens, for stress tests"""
    shuffle: bool
    """shuffle the prompts anew in each epoch, by run.seed"""
    filter: ScoreFilterConfig
