"""Measure the supervisor under 16 to 2,048 simulated members.

The control socket, the member list, the metrics and the live line are the product's; the members
are clients that register, send heartbeats with the counters of a real generator, and follow the
member list. The supervisor runs in a separate process, whose CPU time is measured while nothing
changes and while processes leave and come back.

Run: `python -m benchmarks.control.supervisor [--members N ...]`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import random
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from async_rl.composition.compose import compose
from async_rl.core.codec import encode
from async_rl.core.types import Role
from async_rl.monitoring.console import Console
from async_rl.monitoring.terminal import Terminal
from async_rl.observability.activity import Activity
from async_rl.protocol.supervisor import FOLLOWED, Heartbeat, Member, Register, WatchMembers
from async_rl.runtime.directory import Directory
from async_rl.supervision.control import GATHER_S, StopRequest, handlers, refresh
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry
from async_rl.wire.rpc import RpcClient
from benchmarks.control import simulated
from benchmarks.figures import figure

SECONDS = 15.0
START_S = 20.0  # and longer for many members, whose handshakes take milliseconds each
CHANGES_PER_S = 0.5
NUM_WATCHERS = 4  # they follow generators, as learner and buffer do; their bytes are counted

_CONFIG = compose("grpo_code", ["monitoring.tensorboard_port=null"])


async def serve(directory: Path, num_members: int) -> None:
    """Run the supervisor's control socket until SIGTERM. SIGUSR1: a member leaves and returns."""
    registry = Registry()
    registry.wanted = {"generators": num_members}
    liveness = Liveness(registry, _CONFIG.timeouts, is_local=True)
    terminal = Terminal(file=io.StringIO(), force_terminal=True)
    unused: Any = SimpleNamespace(note_fatal=None, expel=None)
    with Monitor(
        _CONFIG,
        directory,
        step=0,
        registry=registry,
        liveness=liveness,
        console=Console(_CONFIG, directory, terminal=terminal),
    ) as monitor:
        answers = handlers(
            registry=registry,
            liveness=liveness,
            monitor=monitor,
            fleet=unused,
            scaler=unused,
            stop=StopRequest(),
        )
        registry.add("learner-0", "learner", 1)
        for index in range(num_members):
            registry.add(name_of(index), "generator", pid_of(index))

        def replace_one() -> None:
            index = random.randrange(num_members)
            registry.mark_ended(name_of(index))
            registry.add(name_of(index), "generator", pid_of(index))
            registry.register(registration(index))

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, replace_one)
        await simulated.serve_until_terminated(
            directory, answers, refresh(monitor), gather_s=GATHER_S
        )


def name_of(index: int) -> str:
    """Return the name of a simulated generator."""
    return f"generator-{index}"


def pid_of(index: int) -> int:
    """Return its made-up process id."""
    return 1_000_000 + index


def registration(index: int) -> Register:
    """Return its registration."""
    return Register(
        name=name_of(index),
        role="generator",
        pid=pid_of(index),
        address=f"tcp://10.0.{index // 250}.{index % 250}:40000",
        devices=[f"GPU-7a3c1f52-5d4e-4a51-9c1b-{index:012x}"],
    )


class Members:
    """Simulated members of one run."""

    def __init__(self, directory: Path, num_members: int, start_s: float) -> None:
        self._clients = simulated.Clients(directory)
        self._num_members = num_members
        self._start_s = start_s
        self._num_whole = 0
        self._everyone_knows = asyncio.Event()
        self.beats_s: list[float] = []
        self.gaps_s: list[float] = []
        self.list_bytes = 0

    async def run(self, process: psutil.Process) -> dict[str, float]:
        """Return the figures of a quiet time and of one with changes."""
        tasks = [asyncio.create_task(self._live(index)) for index in range(self._num_members)]
        started_s = time.monotonic()
        everyone = asyncio.create_task(self._everyone_knows.wait())
        await asyncio.wait([everyone, *tasks], return_when=asyncio.FIRST_COMPLETED)
        start_s, start_cpu_s = time.monotonic() - started_s, simulated.cpu_s(process)
        await asyncio.sleep(max(0, started_s + self._start_s - time.monotonic()))
        longest_s = max(self.gaps_s)
        quiet = await self._measured(process, changes=0)
        changing = await self._measured(process, changes=round(CHANGES_PER_S * SECONDS))
        await self._clients.end(tasks)
        return {
            "start": start_s,
            "start_cpu": start_cpu_s,
            "longest": longest_s,
            "quiet": quiet[0],
            "beats": quiet[1],
            "p99": quiet[2],
            "changing": changing[0],
            "bytes": changing[3] / NUM_WATCHERS,
        }

    async def _measured(
        self, process: psutil.Process, *, changes: int
    ) -> tuple[float, float, float, float]:
        """Return (cores, beats per second, 99th percentile of their latency, bytes per change)."""
        self.beats_s.clear()
        self.list_bytes = 0
        cpu_s, started_s = simulated.cpu_s(process), time.monotonic()
        for number in range(changes):
            process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(max(0, started_s + (number + 1) / CHANGES_PER_S - time.monotonic()))
        await asyncio.sleep(max(0, started_s + SECONDS - time.monotonic()))
        took_s = time.monotonic() - started_s
        latencies = sorted(self.beats_s) or [float("nan")]
        return (
            (simulated.cpu_s(process) - cpu_s) / took_s,
            len(self.beats_s) / took_s,
            latencies[int(0.99 * (len(latencies) - 1))],
            self.list_bytes / max(1, changes),
        )

    async def _live(self, index: int) -> None:
        await asyncio.sleep(self._start_s / 2 * index / self._num_members)
        async with self._clients.connect() as client:
            await client.call(registration(index), timeout_s=60)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(client, index))
                group.create_task(self._beat(client, index))

    async def _beat(self, client: RpcClient, index: int) -> None:
        activity, answered_s = Activity(), time.monotonic()
        while True:
            with activity("generating"):
                for number in range(12):
                    activity.count(f"tokens_generated/{number}", 1000.5)
                for number in range(8):
                    activity.gauge(f"queue/{number}", 0.25)
                activity.gauge("memory_mb", 9000.5 + index)
                activity.gauge("cpu_s", time.monotonic())
                activity.count("tokens_generated", 1000)
                snapshot = activity.snapshot()
            beat = Heartbeat(
                name=name_of(index),
                pid=pid_of(index),
                state=snapshot.state,
                waits_for=snapshot.waits_for,
                since_s=snapshot.since_s,
                version=7,
                counters=snapshot.counters,
            )
            sent_s = time.monotonic()
            reply = await client.call(beat, timeout_s=60)
            now_s = time.monotonic()
            self.beats_s.append(now_s - sent_s)
            # From one answer to the next, as the supervisor sees the process.
            self.gaps_s.append(now_s - answered_s)
            answered_s = now_s
            await asyncio.sleep(reply.after_s)

    async def _follow(self, client: RpcClient, index: int) -> None:
        directory = Directory()
        while True:
            role: Role = "learner" if index < NUM_WATCHERS else "generator"
            request = WatchMembers(
                known_revision=directory.revision, roles=sorted(FOLLOWED[role]), wait_s=20.0
            )
            reply = await client.call(request, timeout_s=60)
            if index < NUM_WATCHERS and any(isinstance(m, Member) for m in reply.members):
                self.list_bytes += len(encode(reply))
            was_whole = len(directory.members) == self._num_members
            directory.update(reply)
            if not was_whole and len(directory.members) == self._num_members:
                self._num_whole += 1
                if self._num_whole == min(NUM_WATCHERS, self._num_members):
                    self._everyone_knows.set()


def measure(num_members: int, start_s: float) -> None:
    """Print the figures of one number of members."""
    with tempfile.TemporaryDirectory(prefix="bench-supervisor-") as name:
        directory = Path(name)
        words = ("--members", str(num_members))
        with simulated.service("benchmarks.control.supervisor", directory, *words) as process:
            found = asyncio.run(Members(directory, num_members, start_s).run(process))
    who = f"{num_members} members"
    figure(f"{who}: until learner and buffer know all", found["start"], "s")
    figure(f"{who}: supervisor's CPU time until then", found["start_cpu"], "s")
    goal = f"< {_CONFIG.timeouts.silence_s:g}"
    figure(f"{who}: longest silence of one until then", found["longest"], "s", goal=goal)
    figure(f"{who}: heartbeats", found["beats"], "1/s")
    goal = "< 0.2" if num_members >= 2048 else ""
    figure(f"{who}: supervisor, nothing changes", found["quiet"], "cores", goal=goal)
    figure(f"{who}: supervisor, a change every 2 s", found["changing"], "cores")
    figure(f"{who}: latency of a heartbeat p99", 1e3 * found["p99"], "ms", goal="< 1000")
    figure(f"{who}: bytes of a change for a member", found["bytes"], "B", goal="< 10,000")


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=[16, 128, 512, 2048])
    parser.add_argument(
        "--start-s", type=float, help="duration of the start of all members; default: derived"
    )
    parser.add_argument("--serve", type=Path)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.members[0]))
        return
    for number in arguments.members:
        measure(number, arguments.start_s or max(START_S, number / 20))


if __name__ == "__main__":
    main()
