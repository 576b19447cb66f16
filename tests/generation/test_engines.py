"""Both engines against a recomputation of every token by plain transformers, before, during and
after pushes; vLLM with its core in this process and the arguments of generation.vllm.extra that
`EXTRA` lists, and with its core in another process.

The engine runs in `engine_scenario.py`; each test looks at one part of what that wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from generation_support import (
    END_TOKENS,
    make_model,
    model_of,
    recomputed_difference,
    run_scenario,
    worst_difference,
)
from tables import table
from transformers import Qwen3ForCausalLM

LAST = 6
TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(
    scope="module",
    params=[("vllm", False), ("stock", True), ("hf", True)],
    ids=["vllm-untied", "stock-tied", "hf-tied"],
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Qwen3ForCausalLM, dict[str, Any]]:
    kind, is_tied = request.param
    path = tmp_path_factory.mktemp(kind) / "model"
    model = make_model(path, is_tied=is_tied)
    return model, run_scenario("engine_scenario.py", kind, path, out=path.with_name("said.json"))


@pytest.fixture
def said(case: tuple[Qwen3ForCausalLM, dict[str, Any]]) -> dict[str, Any]:
    return case[1]


@pytest.fixture
def model(case: tuple[Qwen3ForCausalLM, dict[str, Any]]) -> Qwen3ForCausalLM:
    return case[0]


@pytest.fixture
def from_vllm(said: dict[str, Any]) -> dict[str, Any]:
    if "death" not in said:
        pytest.skip("asks for vLLM's scheduler")
    return said


def test_nothing_is_generated_before_the_first_weights(said: dict[str, Any]) -> None:
    assert said["version_at_start"] == -1
    assert said["before_first_load"].startswith("WeightsError: the engine has no version")


def test_the_event_loop_runs_while_the_engine_opens(said: dict[str, Any]) -> None:
    assert said["longest_standstill_s"] < 1


@pytest.mark.covers("rollout.name")
def test_logprobs_are_those_of_the_tempered_distribution(
    model: Qwen3ForCausalLM, said: dict[str, Any]
) -> None:
    assert said["at_version_0"]["temperature"] == 0.7
    first, *others = said["at_version_0"]["samples"]
    assert any(sample["token_ids"] != first["token_ids"] for sample in others)
    assert worst_difference(model, said["at_version_0"]) < TOLERANCE


def test_each_token_of_a_request_that_spans_pushes_is_labelled_with_the_weights_that_drew_it(
    model: Qwen3ForCausalLM, said: dict[str, Any]
) -> None:
    versions = {
        version
        for group in said["spanning"]
        for sample in group["samples"]
        for version in sample["versions"]
    }
    assert len(versions) >= 4, "the pushes were to fall into the groups' life"
    for group in said["spanning"]:
        assert sorted(sample["index"] for sample in group["samples"]) == [0, 1, 2, 3]
        for sample in group["samples"]:
            assert sample["versions"] == sorted(sample["versions"])
            assert sample["versions"][-1] <= LAST
        assert worst_difference(model, group) < TOLERANCE


def test_a_prompt_asked_again_after_pushes_is_computed_by_the_new_weights(
    model: Qwen3ForCausalLM, said: dict[str, Any]
) -> None:
    for group in said["after_pushes"]:
        assert {version for sample in group["samples"] for version in sample["versions"]} == {LAST}
        assert group["prompt"] == said["spanning"][0]["prompt"]
        assert worst_difference(model, group) < TOLERANCE


def test_a_version_that_was_trained_again_reads_nothing_cached_by_its_namesake(
    model: Qwen3ForCausalLM, said: dict[str, Any]
) -> None:
    group = said["trained_again"]
    assert group["prompt"] == said["after_pushes"][0]["prompt"]
    for sample in group["samples"]:
        assert set(sample["versions"]) == {LAST}
        sample["versions"] = [LAST + 7] * len(sample["versions"])
    assert worst_difference(model, group) < TOLERANCE


def test_an_engine_at_rest_makes_no_step_and_loses_nothing(
    model: Qwen3ForCausalLM, said: dict[str, Any]
) -> None:
    if "rested" not in said:
        pytest.skip("the steps of the stock core are in another process")
    rested = said["rested"]
    assert rested["steps_at_rest"] == 0
    *begun, late = rested["groups"]
    assert {version for sample in late["samples"] for version in sample["versions"]} == {LAST - 1}
    versions = [
        version for group in begun for sample in group["samples"] for version in sample["versions"]
    ]
    assert set(versions) == {LAST - 2, LAST - 1}
    for group in rested["groups"]:
        assert [
            sample["index"] for sample in sorted(group["samples"], key=lambda s: s["index"])
        ] == list(range(len(group["samples"])))
        assert recomputed_difference(model, group) < TOLERANCE


@pytest.mark.covers("max_response_length")
def test_samples_end_with_an_end_token_or_are_truncated(said: dict[str, Any]) -> None:
    samples = [
        sample for group in (said["at_version_0"], *said["spanning"]) for sample in group["samples"]
    ]
    assert {sample["is_truncated"] for sample in samples} >= {False}
    for sample in samples:
        assert not set(sample["token_ids"][:-1]) & set(END_TOKENS)
        assert sample["is_truncated"] == (sample["token_ids"][-1] not in END_TOKENS)
        assert len(sample["token_ids"]) == 100 or not sample["is_truncated"]


@pytest.mark.covers("temperature 0, greedy")
@torch.no_grad()
def test_temperature_0_takes_the_likeliest_token(
    model: Qwen3ForCausalLM, said: dict[str, Any]
) -> None:
    [sample] = said["greedy"]["samples"]
    ids = torch.tensor([said["greedy"]["prompt"] + sample["token_ids"]])
    best = model_of(model, LAST)(ids).logits[0, len(said["greedy"]["prompt"]) - 1 : -1].argmax(-1)
    assert sample["token_ids"] == best.tolist()


@torch.no_grad()
def test_the_probe_scores_whole_rows_at_temperature_1(
    model: Qwen3ForCausalLM, said: dict[str, Any]
) -> None:
    newest = model_of(model, LAST)
    for row, scores in zip(said["probe_rows"], said["probe"], strict=True):
        ids = torch.tensor([row])
        expected = (
            newest(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        )
        assert scores[0] == 0
        assert np.abs(expected - np.array(scores[1:], np.float32)).max() < TOLERANCE
    assert said["warned_by_the_probe"] == []


@pytest.mark.parametrize(("block", "reason"), table(__file__, "a_bad_block_is_refused"))
def test_a_bad_block_is_refused_and_changes_nothing(
    model: Qwen3ForCausalLM, said: dict[str, Any], block: str, reason: str
) -> None:
    kinds = {"wrong_place": "BlockUnreachable", "broken_broadcast": "BroadcastBroken"}
    if block == "lacking_a_tensor" and block not in said:
        pytest.skip("without a spare copy, this load fails half-way")
    assert said[block].startswith(kinds.get(block, "WeightsError"))
    assert reason in said[block]
    assert said["version_at_end"] == LAST
    assert worst_difference(model, said["after_bad_blocks"]) < TOLERANCE


def test_a_load_that_fails_half_way_leaves_an_engine_that_refuses_work(
    said: dict[str, Any],
) -> None:
    if "lacking_in_place" not in said:
        pytest.skip("this engine stages weights in a spare copy")
    assert "got no weights" in said["lacking_in_place"]
    assert said["after_lacking"].startswith("WeightsError: loading version 10 failed half-way")


def test_a_closed_engine_says_so(said: dict[str, Any]) -> None:
    assert said["after_close"].startswith("Unavailable")


def test_a_group_shares_one_prefill_of_its_prompt(from_vllm: dict[str, Any]) -> None:
    # Blocks of 32: 32 of the 36 prompt tokens are computed once, the last 4 by each of 8 samples.
    assert from_vllm["first_step_of_8_samples_of_36_tokens"] == 36 + 7 * 4


def test_a_sample_is_given_while_others_generate_and_closing_the_iterator_frees_them(
    from_vllm: dict[str, Any],
) -> None:
    assert from_vllm["unfinished_at_first_yield"] > 0
    for kind in ("unfinished", "scheduled", "held"):
        assert from_vllm[f"{kind}_after_close"] == 0


def test_a_dead_engine_fails_what_is_in_flight_and_what_comes_later(
    from_vllm: dict[str, Any],
) -> None:
    assert from_vllm["death"].startswith(
        "Unavailable: the vLLM engine died under request dying: the model burns"
    )
    assert from_vllm["after_death"].startswith("Unavailable")
    assert from_vllm["load_after_death"].startswith("Unavailable")
