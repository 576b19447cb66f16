"""Configurations and files for the tests of data."""

import json
from pathlib import Path
from typing import Any

from composing import compose_unchecked

from async_rl.config.run import RunConfig
from async_rl.core.types import Prompt
from async_rl.data.prompts import train_prompts
from benchmarks.embedded import corpus
from benchmarks.embedded.vocabulary import build_tokenizer

TESTS = [{"kind": "stdin", "input": "1", "output": "2"}]


def make_config(*overrides: str) -> RunConfig:
    return compose_unchecked("grpo_code", overrides)


def make_tokenizer() -> Any:
    return build_tokenizer(corpus.vocabulary_text(), 512)


def write_jsonl(path: Path, *rows: Any) -> Path:
    """Write rows; a string is a line as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def load(pattern: object, tokenizer: Any, *overrides: str) -> list[Prompt]:
    """Return the training prompts of the files, at most 500 tokens long."""
    files = [f"data.train_files=['{pattern}']", "data.max_prompt_tokens=500"]
    return list(train_prompts(make_config(*files, *overrides), tokenizer))


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text.strip() for prompt in prompts]
