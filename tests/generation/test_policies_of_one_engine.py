"""Three policies on one vLLM against a recomputation of every token by plain transformers: their
adapters are pushed while all of them generate. Then the samples of a training service: adapters
from directories, a slot and the base model in one batch, log-probs of prompts, alternatives, stops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from adapter_support import merged_model
from generation_support import make_model, replay, run_scenario
from samples_scenario import PROMPT, SLOTS

TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Case = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module", params=["vllm", "stock"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param) / "model"
    model = make_model(path, is_tied=True)
    out = path.with_name("said.json")
    return model, run_scenario("adapters_scenario.py", request.param, path, out=out)


@pytest.fixture
def drawn(case: Case) -> Case:
    model, said = case
    if "samples" not in said:
        pytest.skip("drawn from the vLLM in one process")
    return model, said["samples"]


def worst(model: Any, policy: str, said: dict[str, Any]) -> float:
    """Largest difference in nats between what was said and a recomputation."""
    found = 0.0
    models: dict[int, Any] = {}
    for sample in said["samples"]:
        for version in set(sample["versions"]) - models.keys():
            models[version] = merged_model(model, policy, version)
        expected = replay(
            models, said["prompt"], sample["token_ids"], sample["versions"], said["temperature"]
        )
        found = max(found, float(np.abs(expected - np.array(sample["logprobs"])).max()))
    return found


def versions(groups: list[dict[str, Any]]) -> set[int]:
    return {v for said in groups for sample in said["samples"] for v in sample["versions"]}


def test_each_policy_samples_from_base_and_its_own_adapter(case: Case) -> None:
    model, said = case
    for policy, quiet in said["quiet"].items():
        assert worst(model, policy, quiet) < TOLERANCE
        others = {"own", "first", "second"} - {policy}
        at = min(versions([quiet]))
        assert at == {"own": 0, "first": 3, "second": 0}[policy]
        for other in others:
            assert worst(model, other, quiet) > 0.1


def test_a_push_to_one_policy_labels_its_own_tokens_only(case: Case) -> None:
    model, said = case
    for policy, groups in said["spanning"].items():
        assert max(worst(model, policy, g) for g in groups) < TOLERANCE
    assert len(versions(said["spanning"]["own"])) > 1
    assert len(versions(said["spanning"]["first"])) > 1
    assert min(versions(said["spanning"]["first"])) >= 3
    assert versions(said["spanning"]["second"]) == {0}
    assert said["versions"] == {"own": 4, "first": 7, "second": 0}


def test_a_probe_scores_with_the_adapter_of_the_policy(case: Case) -> None:
    model, said = case
    for policy, rows in said["probes"].items():
        merged = merged_model(model, policy, said["versions"][policy])
        for row, found in zip(said["probe_rows"], rows, strict=True):
            with torch.no_grad():
                table = merged(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
            expected = table.gather(-1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
            assert np.abs(expected - np.array(found[1:])).max() < TOLERANCE


def test_a_policy_without_an_adapter_generates_nothing(case: Case) -> None:
    _, said = case
    for name in ("before_first_load", "still_before_first_load"):
        assert "no version of the weights yet" in said[name]


def test_an_adapter_that_cannot_be_used_changes_nothing(case: Case) -> None:
    model, said = case
    refused = said["refused"]
    assert "the file was changed after it was written" in refused["damaged"]
    assert "cannot be read from file:///nowhere/x" in refused["gone"]
    assert "vLLM refuses the adapter of version 9" in refused["rank"]
    assert all(text.startswith("WeightsError") for text in refused.values())
    assert versions([said["after_refusals"]]) == {7}
    assert worst(model, "first", said["after_refusals"]) < TOLERANCE


def test_a_slot_serves_the_next_policy(case: Case) -> None:
    model, said = case
    assert worst(model, "third", said["third_at_0"]) < TOLERANCE
    assert worst(model, "own", said["own_at_end"]) < TOLERANCE


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


def test_adapters_of_directories_sample_one_after_another(drawn: Case) -> None:
    model, said = drawn
    assert len(said["in_turn"]) > SLOTS
    for name, sampled in said["in_turn"].items():
        check(merged_model_of(model, name), sampled)
        assert {v for one in sampled["sequences"] for v in one["versions"]} == {3}


def test_one_batch_has_the_base_model_directories_and_a_slot(drawn: Case) -> None:
    """vLLM's own code on a CPU gives rows without adapter the adapter of the last slot."""
    model, said = drawn
    for name, sampled in said["mixed"].items():
        check(model if name == "base" else merged_model_of(model, name), sampled)
    assert {v for one in said["mixed"]["a0"]["sequences"] for v in one["versions"]} == {7}


def merged_model_of(model: Any, name: str) -> Any:
    return merged_model(model, name, 0, rank=8 + 8 * (int(name[1:]) % 2))


def test_a_seed_repeats_the_samples(drawn: Case) -> None:
    first, second = drawn[1]["seeded"]
    assert first == second
    ids = [one["token_ids"] for one in first["sequences"]]
    assert ids[0] != ids[1]


def test_greedy_samples_are_equal(drawn: Case) -> None:
    model, said = drawn
    first, second, third = (one["token_ids"] for one in said["greedy"]["sequences"])
    assert first == second == third
    assert first[0] == int(scores(model, [*PROMPT.tolist(), first[0]])[-1].argmax())


def test_alternatives_are_the_most_likely_tokens(drawn: Case) -> None:
    model, said = drawn
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
            assert logprobs[2] == -np.inf


def test_chosen_and_drawn_tokens_of_a_prompt_have_the_log_probs_of_the_model(drawn: Case) -> None:
    model, said = drawn
    prompt = PROMPT.tolist()
    expected = scores(model, prompt)
    for sampled in (said["chosen"], *said["drawn"]):
        ids = np.array(sampled["prompt_ids"])[1:]
        table = np.array(sampled["prompt_logprobs"])[1:]
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


def test_a_stop_is_the_last_token(drawn: Case) -> None:
    first = drawn[1]["seeded"][0]["sequences"][0]["token_ids"]
    (by_text,) = drawn[1]["stop_text"]["sequences"]
    (by_id,) = drawn[1]["stop_id"]["sequences"]
    assert (by_text["token_ids"], by_text["is_stopped"]) == (first[:3], True)
    assert (by_id["token_ids"], by_id["is_stopped"]) == (first[:2], True)
    assert len(by_text["logprobs"]) == 3
    for one in drawn[1]["no_stop"]["sequences"]:
        assert (len(one["token_ids"]), one["is_stopped"]) == (40, False)


def test_a_request_that_cannot_be_served_is_refused(drawn: Case) -> None:
    too_long, no_token, top_p, nowhere = (one["refused"] for one in drawn[1]["refused"])
    assert "600" in too_long
    assert "5000" in no_token
    assert "top_p" in top_p
    assert "nowhere has no adapter" in nowhere
