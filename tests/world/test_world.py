"""The control plane of a run under faults that a seed draws: tests/world/README.md.

`python tests/world/explore.py SEEDS` tries other seeds; a seed that fails there belongs here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mutate import mutants
from scenarios import drawn
from service import differences

from benchmarks.planting import PRODUCT

FOUND = {
    66: "a configuration that a power loss took from a run with checkpoints",
    94: "the answer about prepared prompts that a cut connection lost",
    177: "tokens of a version above the one that trains them",
    2050: "a learner that the supervisor's answers did not reach ended the run",
    2064: "samples of two histories in one evaluation",
    2126: "a request that a broken connection lost ended the run",
    3117: "the number of a life that a power loss took was given to another life",
    3197: "an answer that nobody read was trained, because its sibling was refused",
    20251: "an evaluation by weights of an earlier life that had the same version",
    20832: "a generator with a dead engine that only gateways call",
    20552: "a gateway that kept the version of a generator that had left",
    20026: "a checkpoint that a lost learner completed while its successor loaded an older one",
    3396: "the late start of an earlier life deleted rows of metrics",
    50001: "a generator took weights of an earlier life of the learner",
    50002: "answers of a gateway that was lost, or of an attempt that failed",
    3291: "a generator that returned after its replacement, and each took the other's tickets",
}
"""Seeds that fail with this fault put back, and the fault."""
OTHERS = (
    *(1026, 1079, 2015),  # found faults in earlier forms of the worlds
    *(3001, 3002, 3006, 3007, 3011, 3012),  # replaced processes that run on, and agents
    *(60000, 60001, 60003, 60009),  # faults at messages, late lists, slow generators
)


@pytest.mark.parametrize("seed", sorted({*range(24), *FOUND, *OTHERS}))
def test_every_promise_holds_under_the_faults_of_a_seed(seed: int, tmp_path: Path) -> None:
    assert drawn(seed, tmp_path).play() == []


@pytest.mark.parametrize("seed", [2064, 3006, 3012])
def test_a_seed_repeats_its_world(seed: int, tmp_path: Path) -> None:
    worlds = [drawn(seed, tmp_path / name) for name in ("first", "second")]
    for world in worlds:
        assert world.play() == []
    first, second = worlds
    assert first.log == [line.replace("second", "first") for line in second.log]
    assert first.loop.num_callbacks == second.loop.num_callbacks


@pytest.mark.parametrize("table", ["mutants.yaml", "mutants_50.yaml"])
def test_each_mutant_is_a_line_of_today(table: str) -> None:
    texts = {mutant.what: (PRODUCT / mutant.file).read_text() for mutant in mutants(table)}
    moved = [m.what for m in mutants(table) if texts[m.what].count(m.old) != 1]
    assert moved == []


@pytest.mark.parametrize("seed", range(12))
def test_kills_of_a_service_change_neither_answers_nor_weights(seed: int, tmp_path: Path) -> None:
    assert differences(seed, tmp_path) == []
