"""The embedded task and its models: the files are what their makers make, and the makers right."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
import torch
from data_support import make_config
from safetensors.torch import load_file

from async_rl.core.types import CallTest
from async_rl.data.files import read_rows
from async_rl.data.prepare import EMBEDDED
from async_rl.data.prompts import embedded_rows, held_out_prompts, train_prompts
from async_rl.examples.run_and_retry import second_prompt
from benchmarks.embedded import corpus, list_functions, tiny_coder
from benchmarks.embedded.list_functions import Spec, hidden_tests
from benchmarks.embedded.tiny_coder import TINY_CODER, TINY_CODER_WITH_RETRIES, TinyCoder
from benchmarks.embedded.vocabulary import END


def test_the_rows_are_those_of_the_specs_and_both_wordings_of_one_are_on_one_side() -> None:
    specs, texts = [], []
    for part, of_part in zip(("train", "held_out"), list_functions.split(), strict=True):
        rows = [row for _, row in read_rows(embedded_rows(part))]
        assert rows == list_functions.rows(of_part)
        assert len({row["id"] for row in rows}) == len(rows) == 2 * len(of_part)
        specs.append({row["id"].partition("/")[0] for row in rows})
        texts.append({row["prompt"] for row in rows})
    assert not specs[0] & specs[1]
    assert not texts[0] & texts[1]


def test_a_prompt_has_the_wording_and_the_tests_of_its_spec(tokenizer: Any) -> None:
    config = make_config("evaluation.num_prompts=0")
    train, held_out = train_prompts(config, tokenizer), held_out_prompts(config, tokenizer)
    for side, specs in zip((train, held_out), list_functions.split(), strict=True):
        by_name = {spec.name: spec for spec in specs}
        for prompt in itertools.islice(side, 100):
            _, name, which = prompt.prompt_id.split("/")
            assert prompt.text == list_functions.wording(by_name[name], int(which))
            assert prompt.text == tokenizer.decode(prompt.token_ids.tolist())
            assert prompt.problem == hidden_tests(by_name[name])
            assert prompt.data_source == "list_functions"
    # The first ones, which an evaluation uses, are of different specs and of both wordings.
    first = [prompt.prompt_id.split("/")[1:] for prompt in held_out[:100]]
    assert len({spec for spec, _ in first}) == 100
    assert {which for _, which in first} == {"0", "1"}


@pytest.mark.parametrize(
    ("name", "config"),
    [("tiny_coder", TINY_CODER), ("tiny_coder_retries", TINY_CODER_WITH_RETRIES)],
)
def test_a_model_has_the_sizes_and_the_tokenizer_of_its_maker(
    tokenizer: Any, name: str, config: TinyCoder
) -> None:
    made = tiny_coder.build_model(config, tokenizer)
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


def passes(source: str, spec: Spec) -> bool:
    """Run the hidden tests; values of another type are wrong."""
    names: dict[str, Any] = {}
    exec(source, names)
    for test in hidden_tests(spec).tests:
        assert isinstance(test, CallTest)
        try:
            value = names["f"](list(test.args[0]))
            if msgspec.json.encode(value) != msgspec.json.encode(test.expected):
                return False
        except (ValueError, IndexError, TypeError):
            return False
    return True


def test_reference_solutions_pass_their_hidden_tests_and_flaws_do_not() -> None:
    caught = []
    for spec in list_functions.split()[1][:150]:
        assert passes(spec.solution(), spec)
        codes = [concept.code for concept in spec.concepts]
        for slot, concept in enumerate(spec.concepts):
            for flaw in concept.flaws:
                flawed = [*codes[:slot], flaw, *codes[slot + 1 :]]
                caught.append(not passes(list_functions.program(*flawed), spec))
    assert sum(caught) / len(caught) > 0.9


def test_a_share_of_the_corpus_retries_a_failed_program_in_the_form_of_the_retry_example() -> None:
    specs, hidden = list_functions.split()
    rates = corpus.flaw_rates(0.4, 0.5)
    pairs = list(itertools.islice(corpus.corpus(specs, rates, 0, 0.5), 400))
    held_out = {list_functions.wording(spec, which) for spec in hidden for which in (0, 1)}
    assert not held_out & {prompt for prompt, _ in pairs}
    again = [prompt for prompt, _ in pairs if END in prompt]
    assert 150 < len(again) < 250
    for prompt in again:
        first, _, told = prompt.partition(END)
        asked = first.splitlines(keepends=True)[0]
        outcome, _, rest = told.removeprefix("# ").partition("\n")
        assert rest == asked
        assert told == second_prompt(outcome, asked)
