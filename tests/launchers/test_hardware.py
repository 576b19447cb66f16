"""Facts about the presets of conf/hardware: which one a machine gets, and what is planned on it."""

import re
from functools import partial

import pytest
from command_line import Command, command_of

from async_rl.composition.compose import compose_for
from async_rl.composition.hardware import (
    generating,
    learning,
    pretended_machine,
)
from async_rl.composition.schema import CONF_DIR
from async_rl.config.checks.run import machine_problems
from async_rl.core.errors import ConfigError
from async_rl.planning.topology import processes

CPU = pretended_machine("cores=8,gpus=0,memory_gb=64")
ONE = pretended_machine("cores=16,gpus=1,memory_gb=64")
EIGHT = pretended_machine("cores=64,gpus=8,memory_gb=512")


def test_a_machine_gets_the_preset_that_fits_it() -> None:
    files = {path.stem for path in (CONF_DIR / "hardware").glob("*.yaml")}
    for machine, launcher, preset in (
        (CPU, "local", "cpu"),
        (ONE, "local", "gpu"),
        (EIGHT, "local", "gpus"),
        (CPU, "ray", "cluster"),
        (EIGHT, "slurm", "cluster"),
    ):
        config, chosen = compose_for(machine, "ppo_code", [f"launcher={launcher}"])
        assert chosen == preset
        assert list(machine_problems(config, machine)) == []
        files.discard(preset)
    assert files == set()


def test_a_preset_that_is_given_wins_and_that_of_clusters_needs_one() -> None:
    config, chosen = compose_for(EIGHT, "ppo_code", ["hardware=cpu"])
    assert (chosen, config.learner.gpus_each) == ("cpu", 0)
    said = r"hardware=cluster with launcher=local.*set launcher=ray"
    with pytest.raises(ConfigError, match=said):
        compose_for(CPU, "ppo_code", ["hardware=cluster"])


def test_without_gpus_both_sides_have_half_of_the_cores_or_all_of_them_in_turn() -> None:
    for placement, generators, learner in (
        ("disaggregated", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("colocated", list(range(8)), list(range(8))),
    ):
        config = compose_for(CPU, "grpo_code", [f"placement={placement}"])[0]
        assert (config.generators.cores, config.learner.cores) == (generators, learner)


@pytest.mark.parametrize(("placement", "share"), [("disaggregated", 0.4), ("colocated", 0.85)])
def test_one_gpu_is_shared_in_halves_and_an_engine_has_nearly_all_of_it_in_its_turn(
    placement: str, share: float
) -> None:
    config, chosen = compose_for(ONE, "ppo_code", [f"placement={placement}"])
    assert (chosen, config.generation.vllm.gpu_memory_utilization) == ("gpu", share)
    gpus = {s.name: (s.gpus, s.env["CUDA_VISIBLE_DEVICES"]) for s in processes(config, ONE)}
    halves = dict.fromkeys(("learner-0", "generator-0"), (0.5, "0"))
    assert gpus == {"buffer": (0, ""), "verifier-0": (0, ""), **halves}


@pytest.mark.parametrize(
    ("nodes", "gpus", "learners", "generators"),
    [(1, 0, 1, 1), (3, 0, 1, 2), (1, 4, 1, 3), (1, 8, 2, 6), (8, 8, 8, 56)],
)
def test_a_cluster_learns_on_one_node_and_generates_on_what_is_left(
    nodes: int, gpus: int, learners: int, generators: int
) -> None:
    assert (learning(nodes, gpus), generating(nodes, gpus)) == (learners, generators)
    given = ["launcher=ray", f"launcher.nodes={nodes}", f"launcher.gpus_per_node={gpus}"]
    config, _ = compose_for(CPU, "ppo_code", given)
    assert (config.learner.ranks, config.generators.count) == (learners, generators)
    assert config.learner.gpus_each == config.generators.gpus_each == bool(gpus)
    assert config.generators.cores == config.learner.cores == config.verifiers.cores == []
    assert config.generation.vllm.enforce_eager == (gpus == 0)


NODES = ("launcher=ray", "launcher.nodes=2", "launcher.gpus_per_node=8")
NODE = ("--machine", "cores=64,gpus=8,gpu_gb=80,memory_gb=512")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`async-rl launch conf=ppo_code` with more words, on a machine without GPUs."""
    monkeypatch.setattr("async_rl.launchers.commands.launch.this_machine", lambda: CPU)
    monkeypatch.setenv("COLUMNS", "180")
    return partial(command_of(monkeypatch, capsys), "launch", "conf=ppo_code")


def test_a_dry_run_plans_for_a_described_machine_or_node(launched: Command) -> None:
    said = launched("--dry-run", "--machine", "cores=64,gpus=8,memory_gb=512").out
    assert re.search(r"hardware +gpus \(64 cores, 8 GPUs, 512 GB\)", said)
    assert "GPU 7 (1)" in said
    assert "generator-5" in said
    assert "generator-6" not in said
    said = launched("--dry-run", *NODES).out
    assert re.search(r"hardware +cluster \(8 cores, no GPUs, 64 GB\)", said)
    assert re.search(r"memory of the nodes +not known here.*--machine", said)
    assert "of 80.0 GB each" not in said
    said = launched("--dry-run", *NODES, *NODE).out
    assert re.search(r"learner's GPUs +4 x 1: .* of 80.0 GB each", said)
    assert "memory of the nodes" not in said


def test_pretending_goes_with_a_dry_run_only(launched: Command) -> None:
    with pytest.raises(ConfigError, match="write it as cores=64,gpus=8,gpu_gb=80,memory_gb=512"):
        pretended_machine("8 GPUs")
    code, _, err = launched("--machine", "cores=4,gpus=0,memory_gb=16")
    assert (code, "it requires --dry-run" in err) == (2, True)
