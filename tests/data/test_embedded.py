"""The files of the embedded task and its models are what their makers make."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from data_support import make_config
from safetensors.torch import load_file

from async_rl.core.types import Purpose
from async_rl.data.files import read_rows
from async_rl.data.prepare import EMBEDDED
from async_rl.data.prompts import embedded_rows, held_out_prompts, train_prompts
from benchmarks.embedded import list_functions
from benchmarks.embedded.tiny_coder import (
    TINY_CODER,
    TINY_CODER_WITH_RETRIES,
    TinyCoder,
    build_model,
)


@pytest.mark.parametrize(("part", "side"), [("train", 0), ("held_out", 1)])
def test_the_rows_are_those_of_the_specs(part: str, side: int) -> None:
    rows = [row for _, row in read_rows(embedded_rows(part))]
    assert rows == list_functions.rows(list_functions.split()[side])


@pytest.mark.parametrize(("purpose", "side"), [(Purpose.TRAIN, 0), (Purpose.EVAL, 1)])
def test_a_prompt_has_the_wording_the_tests_and_the_name_of_its_spec(
    tokenizer: Any, purpose: Purpose, side: int
) -> None:
    config = make_config("evaluation.num_prompts=0")
    make = train_prompts if purpose is Purpose.TRAIN else held_out_prompts
    prompts = {prompt.prompt_id: prompt for prompt in make(config, tokenizer)}
    specs = list_functions.split()[side]
    assert len(prompts) == 2 * len(specs)
    for number, spec in enumerate(specs[::50]):
        which = number % 2
        prompt = prompts[f"list_functions/{spec.name}/{which}"]
        assert prompt.text == list_functions.wording(spec, which)
        assert prompt.problem == list_functions.hidden_tests(spec)
        assert prompt.data_source == "list_functions"


@pytest.mark.parametrize(
    ("name", "config"),
    [("tiny_coder", TINY_CODER), ("tiny_coder_retries", TINY_CODER_WITH_RETRIES)],
)
def test_a_model_has_the_sizes_and_the_tokenizer_of_its_maker(
    tokenizer: Any, name: str, config: TinyCoder
) -> None:
    made = build_model(config, tokenizer)
    written = json.loads((EMBEDDED / name / "config.json").read_text())
    wanted = made.config.to_dict()
    # Written by `save_pretrained`: the version of transformers and the name of the class.
    sizes = {name: value for name, value in written.items() if name in wanted}
    sizes |= {"transformers_version": wanted["transformers_version"], "architectures": None}
    assert sizes == {name: wanted[name] for name in sizes}
    assert len(sizes) > 20
    weights = load_file(EMBEDDED / name / "model.safetensors")
    fresh = {key: value.shape for key, value in made.state_dict().items() if key in weights}
    assert {key: value.shape for key, value in weights.items()} == fresh
    assert all(
        value.dtype == torch.float32 and value.isfinite().all() for value in weights.values()
    )
    vocabulary = json.loads((EMBEDDED / name / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary.items() <= tokenizer.get_vocab().items()
    assert len(vocabulary) >= len(tokenizer) - 2
