"""The samples of a training service against plain transformers: adapters from directories, a slot
and the base model in one batch, log-probs of prompts, alternatives, stops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from adapter_support import merged_model
from generation_support import make_model, run_scenario
from samples_scenario import PROMPT, SLOTS

TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Case = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("samples") / "model"
    model = make_model(path, is_tied=True)
    return model, run_scenario("samples_scenario.py", path, out=path.with_name("said.json"))


def scores(model: Any, row: list[int]) -> np.ndarray:
    """The log-probs of all tokens after each one: float32 [N - 1, V]."""
    with torch.no_grad():
        return model(torch.tensor([row])).logits[0, :-1].log_softmax(-1).numpy()


def check(model: Any, said: dict[str, Any]) -> None:
    """Every log-prob is the model's."""
    prompt = PROMPT.tolist()
    expected = [float(x[t]) for x, t in zip(scores(model, prompt), prompt[1:], strict=True)]
    table = np.array(said["prompt_logprobs"])
    assert np.isnan(table[0]).all()
    assert np.abs(table[1:, 0] - expected).max() < TOLERANCE
    for sequence in said["sequences"]:
        ids = sequence["token_ids"]
        table = scores(model, prompt + ids)[len(prompt) - 1 :]
        own = [float(x[t]) for x, t in zip(table, ids, strict=True)]
        assert np.abs(np.array(sequence["logprobs"]) - own).max() < TOLERANCE


def test_adapters_of_directories_sample_one_after_another(case: Case) -> None:
    model, said = case
    assert len(said["in_turn"]) > SLOTS
    for name, drawn in said["in_turn"].items():
        check(merged_model_of(model, name), drawn)
        assert {v for one in drawn["sequences"] for v in one["versions"]} == {3}


def test_one_batch_has_the_base_model_directories_and_a_slot(case: Case) -> None:
    """vLLM's own code on a CPU gives rows without adapter the adapter of the last slot."""
    model, said = case
    for name, drawn in said["mixed"].items():
        check(model if name == "base" else merged_model_of(model, name), drawn)
    assert {v for one in said["mixed"]["a0"]["sequences"] for v in one["versions"]} == {7}


def merged_model_of(model: Any, name: str) -> Any:
    return merged_model(model, name, 0, rank=8 + 8 * (int(name[1:]) % 2))


def test_a_seed_repeats_the_samples(case: Case) -> None:
    first, second = case[1]["seeded"]
    assert first == second
    ids = [one["token_ids"] for one in first["sequences"]]
    assert ids[0] != ids[1]


def test_greedy_samples_are_equal(case: Case) -> None:
    model, said = case
    first, second, third = (one["token_ids"] for one in said["greedy"]["sequences"])
    assert first == second == third
    assert first[0] == int(scores(model, [*PROMPT.tolist(), first[0]])[-1].argmax())


def test_alternatives_are_the_most_likely_tokens(case: Case) -> None:
    model, said = case
    prompt = PROMPT.tolist()
    table = scores(model, prompt)
    best = np.sort(table, axis=1)[:, :-3:-1]
    assert np.abs(np.array(said["top"]["prompt_logprobs"])[1:, 1:] - best).max() < TOLERANCE
    for sequence in said["top"]["sequences"]:
        for token, alternatives, logprobs in zip(
            sequence["token_ids"], sequence["top_ids"], sequence["top_logprobs"], strict=True
        ):
            # top_k=2 leaves two; the third has no probability.
            assert token in alternatives[:2]
            assert np.exp(logprobs[:2]).sum() == pytest.approx(1, abs=1e-5)
            assert logprobs[2] == -99999


def test_chosen_and_drawn_tokens_of_a_prompt_have_the_log_probs_of_the_model(case: Case) -> None:
    model, said = case
    prompt = PROMPT.tolist()
    expected = scores(model, prompt)
    for drawn in (said["chosen"], *said["drawn"]):
        ids, table = np.array(drawn["prompt_ids"])[1:], np.array(drawn["prompt_logprobs"])[1:]
        of_ids = np.take_along_axis(expected, np.maximum(ids, 0), axis=1)
        assert np.abs(of_ids - table)[ids >= 0].max() < TOLERANCE
        assert ids[:, 0].tolist() == prompt[1:]
    chosen = np.array(said["chosen"]["prompt_ids"])[1:]
    assert chosen[:2, 2:4].tolist() == [[5, -1], [-1, 6]]
    check(model, said["plain"])
    # The draws are independent, with replacement, at the temperature 1.5.
    drawn_ids = np.hstack([np.array(one["prompt_ids"])[1:, 1:] for one in said["drawn"]])
    shares = np.exp(expected / 1.5)
    shares /= shares.sum(axis=1, keepdims=True)
    counts = np.array([np.bincount(row, minlength=shares.shape[1]) for row in drawn_ids])
    size = drawn_ids.shape[1]
    squares = ((counts - size * shares) ** 2 / (size * shares)).sum(axis=1)
    # Chi-square with V - 1 degrees of freedom: mean V - 1, standard deviation sqrt(2 (V - 1)).
    assert np.abs(squares - (counts.shape[1] - 1)).max() < 5 * np.sqrt(2 * counts.shape[1])


def test_a_stop_is_the_last_token(case: Case) -> None:
    first = case[1]["seeded"][0]["sequences"][0]["token_ids"]
    (by_text,) = case[1]["stop_text"]["sequences"]
    (by_id,) = case[1]["stop_id"]["sequences"]
    assert (by_text["token_ids"], by_text["is_stopped"]) == (first[:3], True)
    assert (by_id["token_ids"], by_id["is_stopped"]) == (first[:2], True)
    assert len(by_text["logprobs"]) == 3
    for one in case[1]["no_stop"]["sequences"]:
        assert (len(one["token_ids"]), one["is_stopped"]) == (40, False)


def test_a_request_that_cannot_be_served_is_refused(case: Case) -> None:
    too_long, no_token, top_p, nowhere = (one["refused"] for one in case[1]["refused"])
    assert "600" in too_long
    assert "5000" in no_token
    assert "top_p" in top_p
    assert "nowhere has no adapter" in nowhere
