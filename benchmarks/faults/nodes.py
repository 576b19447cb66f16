"""What a run on several machines does when one of them is cut off, slow, lost or given notice.

The machines are network namespaces of this one with addresses of their own, joined by a bridge, in
one Ray cluster (ray_cluster.py; needs root). Node 1 has supervisor, buffer and learner, every other
node a generator; weights are broadcast. The faults follow one another in one run, each on the last
node; with two nodes its generator is the only one:

partition  its link is down for --partition-s
slow       it receives --mbit megabits per second
death      everything on it is killed; it comes back with the same address after 20 s
notice     SIGTERM to all of it, as a spot machine gets it, and 30 s later its death

For each fault: the steps per minute before, during and after it, the seconds until the status shows
that the generator is lost, and until it has weights again. The end is the audit of the store from
SQL alone (chaos_audit.py).

Run: `python -m benchmarks.faults.nodes [--nodes 2] [--only FAULT ...] [--window-s 40]`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from async_rl.runs.control import ask_status
from benchmarks.faults.chaos_audit import audit, reading
from benchmarks.faults.ray_cluster import RayCluster, missing
from benchmarks.figures import figure

COMMAND = str(Path(sys.executable).with_name("async-rl"))
GROUPS, STALENESS, BACK_S, NOTICE_S, LIMIT_S = 2, 2, 20.0, 30.0, 300.0
SETTINGS = (
    "conf=grpo_code",
    "launcher=ray",
    "launcher.node_kind=generator",
    "launcher.learner_cpus=2",  # so that it fits the first node only
    "verifiers.cells=1",
    "num_steps=100000",
    "generation.engine=hf",
    f"buffer.groups_per_step={GROUPS}",
    f"buffer.max_staleness_versions={STALENESS}",
    "generation.group_size=4",
    "evaluation.every_steps=0",
    "checkpoint.every_minutes=0",
    "monitoring.tensorboard_port=null",
    "timeouts.call_s=6",
    "timeouts.start_s=60",
    "supervisor.max_restarts=50",
    "weights.transfer=collective",
)


class Watched:
    """The run, and what a person can see of it."""

    def __init__(self, cluster: RayCluster, directory: Path, *, num_generators: int) -> None:
        self.run_dir = directory / "run"
        self.terminal = directory / "terminal"
        own = [f"launcher.address={cluster.head}", f"output_dir={directory}", "run_name=run"]
        own.append(f"generators.count={num_generators}")
        with self.terminal.open("wb") as sink:
            self.process = subprocess.Popen(
                [*cluster.inside(1), COMMAND, "launch", *SETTINGS, *own],
                env={**os.environ, **cluster.env},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def num_steps(self) -> int:
        """Return the committed steps."""
        # Before its first seconds the run has no store.
        with contextlib.suppress(sqlite3.Error), reading(self.run_dir) as store:
            return int(store.execute("SELECT count(*) FROM steps").fetchone()[0])
        return 0

    def generators(self) -> dict[str, dict[str, Any]]:
        """Return the status of each generator by its name."""
        with contextlib.suppress(OSError):
            reply = ask_status(self.run_dir)
            members = msgspec.to_builtins(reply)["members"] if reply else []
            return {m["name"]: m for m in members if m["role"] == "generator"}
        return {}

    def on(self, address: str) -> str:
        """Return the name of the generator at the address that has weights; empty without one."""
        for name, found in self.generators().items():
            if f"//{address}:" in found["address"] and found.get("version", -1) >= 0:
                return name
        return ""

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait; returns the seconds. Raises AssertionError if the run ends or takes too long."""
        started_s = time.monotonic()
        while not condition():
            told = self.terminal.read_text(errors="replace")[-2000:]
            assert self.process.poll() is None, f"the run ended before {what}:\n{told}"
            assert time.monotonic() - started_s < LIMIT_S, f"{what} did not come:\n{told}"
            time.sleep(0.2)
        return time.monotonic() - started_s

    @contextlib.contextmanager
    def rate(self, name: str) -> Iterator[None]:
        """Print the steps per minute of what runs inside."""
        before, started_s = self.num_steps(), time.monotonic()
        yield
        steps, seconds = self.num_steps() - before, time.monotonic() - started_s
        figure(name, 60 * steps / seconds, "steps/min")


def strike(fault: str, run: Watched, cluster: RayCluster, arguments: argparse.Namespace) -> None:
    """Let one fault happen to the last node and end."""
    last = arguments.nodes
    address = cluster.address_of(last)
    run.until(lambda: bool(run.on(address)), f"a generator on node {last}")
    name = run.on(address)
    pid = run.generators()[name]["pid"]

    def is_lost() -> bool:
        found = run.generators().get(name, {"pid": pid})
        return bool(found["pid"] != pid or not found["address"])

    with run.rate(f"{fault}: before"):
        time.sleep(arguments.window_s)
    with run.rate(f"{fault}: during"):
        if fault == "partition":
            cluster.cut(last, is_cut=True)
            begun_s = time.monotonic()
            while not is_lost() and time.monotonic() - begun_s < arguments.partition_s:
                time.sleep(0.2)
            figure(f"{fault}: noticed", time.monotonic() - begun_s, "s")
            time.sleep(max(0.0, begun_s + arguments.partition_s - time.monotonic()))
            cluster.cut(last, is_cut=False)
        elif fault == "slow":
            cluster.slow(last, arguments.mbit)
            time.sleep(arguments.window_s)
            figure(f"{fault}: generators that stayed", float(not is_lost()), "")
            cluster.slow(last, 0)
        elif fault == "death":
            cluster.kill_node(last)
            figure(f"{fault}: noticed", run.until(is_lost, "the loss"), "s")
            time.sleep(BACK_S)
            cluster.add_node(last, cpus=1, generators=1)
        else:
            cluster.signal(last, signal.SIGTERM)
            figure(f"{fault}: noticed", run.until(is_lost, "the loss"), "s")
            time.sleep(NOTICE_S)
            cluster.kill_node(last)
            cluster.add_node(last, cpus=1, generators=1)
    if fault == "partition" and is_lost() and not cluster.has_joined(last):
        # Ray ends a node that it has given up; a person, or a service, starts it again.
        cluster.kill_node(last)
        cluster.add_node(last, cpus=1, generators=1)
        figure(f"{fault}: nodes that Ray had given up", 1, "")
    figure(f"{fault}: back", run.until(lambda: bool(run.on(address)), "its return"), "s")
    with run.rate(f"{fault}: after"):
        time.sleep(arguments.window_s)


def main() -> int:
    """Run the faults; exit code 1 if a promise of the store is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ("partition", "slow", "death", "notice")
    parser.add_argument("--nodes", type=int, choices=(2, 3), default=3)
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--window-s", type=float, default=40.0)
    parser.add_argument("--partition-s", type=float, default=30.0)
    parser.add_argument("--mbit", type=float, default=2.0)
    arguments = parser.parse_args()
    if lacks := missing():
        print(f"no network namespaces here; lacks {', '.join(lacks)}: nothing was measured")
        return 0
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch, RayCluster() as cluster:
        cluster.add_node(1, cpus=4, generators=0)
        for node in range(2, arguments.nodes + 1):
            cluster.add_node(node, cpus=1, generators=1)
        run = Watched(cluster, Path(scratch), num_generators=arguments.nodes - 1)
        try:
            run.until(lambda: run.num_steps() >= 2, "two steps")
            for fault in arguments.only:
                strike(fault, run, cluster, arguments)
        finally:
            subprocess.run([COMMAND, "stop", str(run.run_dir)], check=False, capture_output=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(120)
            run.process.kill()
        problems = list(audit(run.run_dir, groups_per_step=GROUPS, max_staleness=STALENESS))
        with reading(run.run_dir) as store:
            states = dict(store.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    figure("groups trained", states.get("trained", 0), "")
    figure("groups dropped", states.get("dropped", 0), "", goal="0")
    figure("broken promises", len(problems), "", goal="0")
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
