"""The part of the configuration's schema about data: what is asked, where it is read from, what
becomes of rows that do not fit.

As in config.py: no default here, every field with its unit, range and meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from async_rl.config.base import Section


class ScoreFilterConfig(Section):
    """Which prompts leave the training data at the start of an epoch, by the mean scaled reward of
    their newest group.
    """

    above: Annotated[
        float | None, Meta(description="prompts whose mean reward is above it leave; null = none")
    ]
    below: Annotated[
        float | None, Meta(description="prompts whose mean reward is below it leave; null = none")
    ]
    max_share: Annotated[
        float,
        Meta(
            gt=0,
            lt=1,
            description=(
                "share of the active prompts that leave at most at one time, farthest beyond their"
                " bound first"
            ),
        ),
    ]


class DataConfig(Section):
    """What is asked: the embedded task when `train_files` is empty, else the files."""

    train_files: Annotated[
        list[str],
        Meta(
            description=(
                "jsonl, json or parquet files, globs (*.parquet) or fsspec URLs; empty = the"
                " embedded task"
            )
        ),
    ]
    val_files: Annotated[
        list[str],
        Meta(
            description=(
                "files for the held-out evaluation; empty with train_files set = no evaluation"
            )
        ),
    ]
    metadata_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description=(
                "file with further columns of the rows, found by id (AReaL's code metadata); null ="
                " the rows hold everything"
            )
        ),
    ]
    epochs: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="passes over the training rows, from which num_steps=null is counted"),
    ]
    tokenizer: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="directory of a tokenizer to use; null = the model's own"),
    ]
    prompt_key: Annotated[
        str,
        Meta(
            min_length=1,
            description="column with the prompt, a string or a chat list; without it `question`",
        ),
    ]
    id_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description=(
                "column with a row's id; null = the first of prompt_id, id, query_id, task_id, else"
                " the row's number"
            )
        ),
    ]
    max_id_length: Annotated[
        int, Meta(ge=1, description="characters; a row with a longer id is a bad row")
    ]
    max_rows_in_memory: Annotated[
        int,
        Meta(
            ge=1000,
            description=(
                "rows; training files with more are read and checked row by row as they are"
                " asked for"
            ),
        ),
    ]
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="tokens, chat template included")]
    max_response_tokens: Annotated[
        int, Meta(ge=1, description="tokens generated at most per sample")
    ]
    truncation: Annotated[
        Literal["error", "drop", "left", "right", "middle"],
        Meta(
            description=(
                "a prompt over max_prompt_tokens: refuse it, leave it out, or cut it on the named"
                " side"
            )
        ),
    ]
    bad_rows: Annotated[
        Literal["error", "drop"],
        Meta(description="a row that cannot be used: refuse the file, or leave the row out"),
    ]
    fill_to_max_tokens: Annotated[
        bool, Meta(description="repeat each prompt up to max_prompt_tokens, for stress tests")
    ]
    shuffle: Annotated[
        bool, Meta(description="shuffle the prompts anew in each epoch, by run.seed")
    ]
    filter: ScoreFilterConfig
