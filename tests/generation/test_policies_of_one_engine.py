"""Three policies on one vLLM against a recomputation of every token by plain transformers: their
adapters are pushed while all of them generate. The engine runs in a process of its own
(`adapters_scenario.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from adapter_support import merged_model
from generation_support import make_model, replay, run_scenario

TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Case = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module", params=["vllm", "stock"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param) / "model"
    model = make_model(path, is_tied=True)
    out = path.with_name("said.json")
    return model, run_scenario("adapters_scenario.py", request.param, path, out=out)


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
    for name in ("before_first_load", "still_before_first_load", "third_before_load"):
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
