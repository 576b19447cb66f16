"""The engines against a recomputation of every token by plain transformers, before, during and
after pushes: transformers; vLLM with its core in this process, experts, and the arguments of
generation.vllm.extra that `EXTRA` lists; vLLM with its core in another process, which loads in
place; and vLLM with two workers.

The engine runs in `engine_scenario.py`; each test looks at one part of what that returned.
"""

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from generation_support import (
    END_TOKENS,
    make_model,
    model_of,
    replay,
    run_scenario,
    versions_in,
    worst_difference,
)

LAST = 6
TOLERANCE = 1e-4
KINDS: dict[str, dict[str, bool]] = {
    "vllm": {"is_tied": False, "has_experts": True},
    "stock": {"has_experts": True},
    "hf": {},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Case(NamedTuple):
    kind: str
    at: Callable[[int], Any]
    said: dict[str, Any]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param) / "model"
    at = functools.partial(model_of, make_model(path, **KINDS[request.param]))
    return Case(request.param, at, run_scenario("engine_scenario:main", request.param, path))


def test_an_engine_needs_weights_and_is_unavailable_once_closed(case: Case) -> None:
    assert case.said["version_at_start"] == -1
    assert case.said["before_first_load"].startswith("WeightsError: the engine has no version")
    assert case.said["after_close"].startswith("Unavailable")


@pytest.mark.covers("rollout.name")
def test_logprobs_are_those_of_the_tempered_distribution(case: Case) -> None:
    assert case.said["at_version_0"]["temperature"] == 0.7
    first, *others = case.said["at_version_0"]["samples"]
    assert any(sample.token_ids.tolist() != first.token_ids.tolist() for sample in others)
    assert worst_difference(case.at, case.said["at_version_0"]) < TOLERANCE


def test_each_token_is_labelled_with_the_weights_that_drew_it(case: Case) -> None:
    groups = case.said["spanning"]
    assert len(versions_in(groups)) >= 4, "the pushes were to fall into the groups' life"
    for group in groups:
        assert sorted(sample.index for sample in group["samples"]) == [0, 1, 2, 3]
        for sample in group["samples"]:
            assert (np.diff(sample.versions) >= 0).all()
            assert sample.versions[-1] <= LAST
        assert worst_difference(case.at, group) < TOLERANCE


def test_weights_that_replaced_others_read_nothing_that_those_have_cached(case: Case) -> None:
    """The learner may also train a version once more, from a checkpoint, to other weights."""
    again = case.said["trained_again"]
    assert again["prompt"] == case.said["spanning"][0]["prompt"]
    for group, version in ((case.said["after_pushes"], LAST), (again, LAST + 7)):
        assert versions_in([group]) == {LAST}
        assert worst_difference(lambda _, v=version: case.at(v), group) < TOLERANCE


def test_an_engine_at_rest_makes_no_step_and_loses_nothing(case: Case) -> None:
    if "rested" not in case.said:
        pytest.skip("the steps of the stock core are in another process")
    rested = case.said["rested"]
    assert rested["steps"] == 0
    assert versions_in([rested["late"]]) == {LAST - 1}
    assert versions_in([rested["begun"]]) == {LAST - 2, LAST - 1}
    assert [len(rested[name]["samples"]) for name in ("begun", "late")] == [4, 2]
    for name in ("begun", "late"):
        assert worst_difference(case.at, rested[name], keeps_cache=False) < TOLERANCE


@pytest.mark.covers("max_response_length")
def test_samples_end_with_an_end_token_or_are_truncated(case: Case) -> None:
    groups = (case.said["at_version_0"], *case.said["spanning"])
    samples = [sample for group in groups for sample in group["samples"]]
    assert not all(sample.is_truncated for sample in samples)
    for sample in samples:
        *inner, last = sample.token_ids.tolist()
        assert not {*inner} & {*END_TOKENS}
        assert sample.is_truncated == (last not in END_TOKENS)
        assert len(inner) == 99 or not sample.is_truncated


@pytest.mark.covers("temperature 0, greedy")
@torch.no_grad()
def test_temperature_0_takes_the_likeliest_token(case: Case) -> None:
    [sample] = case.said["greedy"]["samples"]
    prompt = case.said["greedy"]["prompt"]
    ids = torch.tensor([prompt + sample.token_ids.tolist()])
    best = case.at(LAST)(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert sample.token_ids.tolist() == best.tolist()


def test_the_probe_scores_whole_rows_at_temperature_1(case: Case) -> None:
    for row, scores in zip(case.said["probe_rows"], case.said["probe"], strict=True):
        first, *rest = row.tolist()
        expected = replay({LAST: case.at(LAST)}, [first], rest, [LAST] * len(rest), 1.0)
        assert scores[0] == 0
        assert np.abs(expected - scores[1:]).max() < TOLERANCE


BAD = {
    "wrong_checksum": "WeightsError: checksum of version 7",
    "broken_broadcast": "BroadcastBroken: rank 1 of 3 in communicator of two who do not come",
    "lacking_a_tensor": "WeightsError: .*got no weights",
}


def test_a_bad_block_is_refused_and_changes_nothing(case: Case) -> None:
    for block, reason in BAD.items():
        # Without a spare copy, the load that lacks a tensor fails half-way.
        if (block, case.kind) != ("lacking_a_tensor", "stock"):
            assert re.match(reason, case.said[block]), (block, case.said[block])
    assert case.said["version_at_end"] == LAST
    assert worst_difference(case.at, case.said["after_bad_blocks"]) < TOLERANCE
    if case.kind == "stock":
        assert "got no weights" in case.said["lacking_in_place"]
        half_way = "WeightsError: loading version 10 failed half-way"
        assert case.said["after_lacking"].startswith(half_way)


def test_vllm_shares_a_prefill_frees_what_is_left_and_says_that_it_died(case: Case) -> None:
    if case.kind != "vllm":
        pytest.skip("asks for the scheduler of vLLM in this process")
    # Blocks of 32: 32 of the 36 prompt tokens are computed once, the last 4 by each of 8 samples.
    assert case.said["first_step_of_8_samples_of_36_tokens"] == 36 + 7 * 4
    assert case.said["unfinished_at_first_yield"] > 0
    for where in ("unfinished", "scheduled", "held"):
        assert case.said[f"{where}_after_close"] == 0
    died = "Unavailable: the vLLM engine died under request dying: the model burns"
    assert case.said["death"].startswith(died)
    assert case.said["after_death"].startswith("Unavailable")
    assert case.said["load_after_death"].startswith("Unavailable")


def test_two_workers_get_each_version_and_end_with_a_killed_generator(tmp_path: Path) -> None:
    path = tmp_path / "model"
    at = functools.partial(model_of, make_model(path))
    said = run_scenario("engine_scenario:main", "parallel", path, is_killed=True)
    assert said["devices"] == ["cpu", "cpu"]
    assert len(versions_in(said["spanning"])) >= 3, "the pushes were to fall into the groups' life"
    assert max(worst_difference(at, group) for group in said["spanning"]) < TOLERANCE
    assert len(said["processes"]) > 2
    deadline_s = time.monotonic() + 20
    while alive := [pid for pid in said["processes"] if is_alive(pid)]:
        assert time.monotonic() < deadline_s, f"{alive} outlive a generator that was killed"


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
