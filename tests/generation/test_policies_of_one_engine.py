"""Three policies on one vLLM, whose core is in another process, against a recomputation of every
token by plain transformers: their adapters are pushed while all of them generate. Then the samples
of a training service: adapters from directories, a slot and the base model in one batch, log-probs
of prompts, stops.
"""

import functools
from typing import Any

import numpy as np
import pytest
from generation_support import (
    PROMPT,
    SLOTS,
    make_model,
    merged_model,
    replay,
    replayed,
    run_scenario,
    versions_in,
    worst_difference,
)

TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Case = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("policies") / "model"
    model = make_model(path)
    return model, run_scenario("adapters_scenario:main", path)


def worst(model: Any, policy: str, said: dict[str, Any]) -> float:
    return worst_difference(functools.partial(merged_model, model, policy), said)


def test_each_policy_samples_from_base_and_its_own_adapter(case: Case) -> None:
    model, said = case
    assert "no version of the weights yet" in said["before_first_load"]
    for policy, quiet in said["quiet"].items():
        assert worst(model, policy, quiet) < TOLERANCE
        assert versions_in([quiet]) == {{"own": 0, "first": 3, "second": 0}[policy]}
        for other in {"own", "first", "second"} - {policy}:
            assert worst(model, other, quiet) > 0.1


def test_a_push_to_one_policy_labels_its_own_tokens_only(case: Case) -> None:
    model, said = case
    for policy, groups in said["spanning"].items():
        assert max(worst(model, policy, group) for group in groups) < TOLERANCE
    found = {policy: versions_in(groups) for policy, groups in said["spanning"].items()}
    assert len(found["own"]) > 1
    assert len(found["first"]) > 1
    assert min(found["first"]) >= 3
    assert found["second"] == {0}
    assert said["versions"] == {"own": 4, "first": 7, "second": 0}


def test_an_adapter_that_cannot_be_used_changes_nothing(case: Case) -> None:
    model, said = case
    refused = said["refused"]
    assert "the file was changed after it was written" in refused["damaged"]
    assert "vLLM refuses the adapter of version 9" in refused["rank"]
    assert all(text.startswith("WeightsError") for text in refused.values())
    assert versions_in([said["after_refusals"]]) == {7}
    assert worst(model, "first", said["after_refusals"]) < TOLERANCE
    assert worst(model, "third", said["third_at_0"]) < TOLERANCE


def check(model: Any, said: Any) -> None:
    first, *rest = PROMPT.tolist()
    expected = replay({0: model}, [first], rest, [0] * len(rest), 1.0)
    assert np.isnan(said.prompt.logprobs[0]).all()
    assert np.abs(said.prompt.logprobs[1:, 0] - expected).max() < TOLERANCE
    for sequence in said.sequences:
        ids = sequence.token_ids.tolist()
        own = replay({0: model}, [first, *rest], ids, [0] * len(ids), 1.0)
        assert np.abs(sequence.logprobs - own).max() < TOLERANCE


def merged_model_of(model: Any, name: str) -> Any:
    return merged_model(model, name, 0, rank=8 + 8 * (int(name[1:]) % 2))


def test_adapters_of_directories_a_slot_and_the_base_model_sample(case: Case) -> None:
    """In turn, more than the slots; in one batch, where vLLM's own code on a CPU gives rows without
    adapter the adapter of the last slot.
    """
    model, said = case
    assert len(said["in_turn"]) > SLOTS
    for name, sampled in said["in_turn"].items():
        check(merged_model_of(model, name), sampled)
        assert {v for one in sampled.sequences for v in one.versions} == {3}
    for name, sampled in said["mixed"].items():
        check(model if name == "base" else merged_model_of(model, name), sampled)
    assert {v for one in said["mixed"]["a0"].sequences for v in one.versions} == {7}


def test_a_seed_repeats_the_samples_and_greedy_ones_are_equal(case: Case) -> None:
    model, said = case
    first, second = (
        [one.token_ids.tolist() for one in sampled.sequences] for sampled in said["seeded"]
    )
    assert first == second
    assert first[0] != first[1]
    greedy, *others = (one.token_ids.tolist() for one in said["greedy"].sequences)
    assert others == [greedy, greedy]
    assert greedy[0] == replayed({0: model}, PROMPT.tolist(), greedy[:1], [0], 1.0).argmax()


def test_a_stop_is_the_last_token_and_bad_requests_are_refused(case: Case) -> None:
    said = case[1]
    first = said["seeded"][0].sequences[0].token_ids.tolist()
    (by_text,), (by_id,) = said["stop_text"].sequences, said["stop_id"].sequences
    assert (by_text.token_ids.tolist(), by_text.is_truncated) == (first[:3], False)
    assert (by_id.token_ids.tolist(), by_id.is_truncated) == (first[:2], False)
    assert len(by_text.logprobs) == 3
    for one in said["no_stop"].sequences:
        assert (len(one.token_ids), one.is_truncated) == (40, True)
    reasons = ("600", "5000", "top_p", "nowhere has no adapter")
    for text, reason in zip(said["refused_samples"], reasons, strict=True):
        assert reason in text
