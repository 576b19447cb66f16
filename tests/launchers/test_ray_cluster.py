"""A run on a Ray cluster of two nodes with addresses of their own, which loses one."""

import shutil
import tempfile
from pathlib import Path

import pytest
from e2e_support import SMALL, LiveRun, async_rl

from benchmarks.faults.ray_cluster import RayCluster, missing

SETTINGS = (
    *(*SMALL, "launcher=ray", "launcher.node_kind=generator", "generators.count=2"),
    # The learner fits the first node only.
    *("launcher.learner_cpus=2", "verifiers.cells=1", "num_steps=100000", "timeouts.call_s=6"),
    *("buffer.groups_per_step=2", "checkpoint.every_minutes=0", "supervisor.max_restarts=20"),
    *("weights.transfer=collective", "timeouts.start_s=60"),
)


@pytest.mark.slow
@pytest.mark.timeout(390)
@pytest.mark.skipif(
    bool(missing()), reason=f"no network namespaces here; lacks {', '.join(missing())}"
)
def test_a_run_survives_the_loss_of_a_node_and_uses_one_that_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayCluster() as cluster:
        for name, value in cluster.env.items():
            if name != "TMPDIR":
                monkeypatch.setenv(name, value)
        cluster.add_node(1, cpus=4, generators=1)
        cluster.add_node(2, cpus=1, generators=1)
        head = f"launcher.address={cluster.head}"
        run = LiveRun(tmp_path, *SETTINGS, head, prefix=cluster.inside(1))
        try:
            follow(run, cluster)
        finally:
            run.end()


def follow(run: LiveRun, cluster: RayCluster) -> None:
    node = {cluster.address_of(number): number for number in range(1, 4)}
    run.until(
        lambda: run.step >= 1 and sorted(places(run, node, "generator").values()) == [1, 2],
        "training with both generators",
    )
    assert {*places(run, node, "buffer").values(), *places(run, node, "learner").values()} == {1}
    assert any((run.run_dir / "logs").glob("generator-1.*"))

    (lost,) = (name for name, where in places(run, node, "generator").items() if where == 2)
    cluster.kill_node(2)
    run.until(
        lambda: run.member(lost).get("waits_for") == "room on the cluster: 1 CPU, generator 1",
        f"{lost} to wait for a place",
    )
    at_loss = run.step
    run.until(lambda: run.step >= at_loss + 2, "two steps with one generator left")
    assert run.member(lost).get("state") == "starting"

    assert async_rl("scale", str(run.run_dir), "generators=3").returncode == 0
    cluster.add_node(3, cpus=2, generators=2)
    run.until(
        lambda: sorted(places(run, node, "generator").values()) == [1, 3, 3],
        f"{lost} and a third generator on the new node",
    )
    at_join = run.step
    run.until(lambda: run.step >= at_join + 1, "a step with all three")

    assert async_rl("stop", str(run.run_dir)).returncode == 0
    assert run.wait(timeout_s=120) == 0, run.terminal
    assert run.audit()["problems"] == []
    assert "finished" in (run.run_dir / "logs" / "generator-1.log").read_text()
    log = (run.run_dir / "logs" / "supervisor.log").read_text()
    assert f"{lost} was lost on its node {cluster.address_of(2)}" in log
    assert run.processes() == []


def places(run: LiveRun, node: dict[str, int], role: str) -> dict[str, int]:
    """The node of each process of the role that serves."""
    return {
        found["name"]: node[found["address"].rpartition("//")[2].rpartition(":")[0]]
        for found in run.now()["members"]
        if found["role"] == role and found["address"]
    }


def hosts(run: LiveRun) -> list[str]:
    """The hosts of the processes that serve."""
    addresses = [found["address"] for found in run.now()["members"]]
    return [address.split(":")[1] for address in addresses if address]


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_run_even_by_kill_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short: Ray puts paths of sockets below it.
    scratch = Path(tempfile.mkdtemp(prefix="arl-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(scratch))
    run = LiveRun(
        tmp_path,
        *SETTINGS,
        "launcher.address=local",
        "launcher.node_kind=null",
        "generators.count=1",
    )
    try:
        run.until(lambda: len(hosts(run)) == 4, "four processes that serve")
        assert set(hosts(run)) == {"//127.0.0.1"}
        run.kill_all()
        assert run.processes() == []
    finally:
        run.end()
        shutil.rmtree(scratch, ignore_errors=True)
