"""Conversion of the cumulative counters in heartbeats to metrics per step: shares of working and
waiting time, tokens per second, queue depths.

Rules
- Every process is measured against its own age between two heartbeats, so neither a late heartbeat
  nor a restart distorts a share.
- Numbers since the last step use the heartbeats that came since then; without any they repeat
  the newest ones.
- A restarted process counts from 0; the counts of its predecessor stay in the
  run's totals (`failures/<reason>`).
- A generator that only evaluates is idle between evaluations, unlike the others: the
  shares of its role leave it out.
- A process that has ended no longer appears; gauges of several processes are added for `queue/`,
  else the largest is taken.
Pure state, without a clock: times come from the counters and the caller.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping

from async_rl.observability.activity import GAUGE
from async_rl.observability.catalogue import MetricKind, describe
from async_rl.protocol.membership import Member

_CONDITIONS = {"busy_s": "busy", "wait_s": "waiting", "blocked_s": "blocked"}
_STAGES = {"busy_s/": "stage_s", "wait_s/": "wait_s", "blocked_s/": "blocked_s"}
_AGE = (*_CONDITIONS, "idle_s")
_PER_SECOND = {
    "tokens_generated": "throughput/generated_tokens_per_s",
    "samples_scored": "throughput/samples_scored_per_s",
}
_FAILURES = "failures/"


class _Process:
    """The counters of one incarnation: the newest, and those at the start of the measured
    interval.
    """

    def __init__(self, member: Member) -> None:
        self.role = member.role
        self.pid = member.pid
        self.before: Mapping[str, float] = {}
        self.newest: Mapping[str, float] = {}
        self.last: dict[str, float] = {}  # per second of the process's own time

    def measure(self) -> None:
        """Compute the rates since the last measurement; keep the old rates if no heartbeat came."""
        grown = {
            k: v - self.before.get(k, 0.0)
            for k, v in self.newest.items()
            if not k.startswith(GAUGE)
        }
        age_s = sum(grown.get(k, 0.0) for k in _AGE)
        if age_s <= 0:
            return
        self.last = {k: v / age_s for k, v in grown.items()}
        cpu = GAUGE + "cpu_s"
        if cpu in self.newest:
            self.last[cpu] = (self.newest[cpu] - self.before.get(cpu, 0.0)) / age_s
        self.before = self.newest


class Rates:
    """The supervisor's view of all processes' counters. is_aside: returns whether a process is left
    out of the shares of its role.
    """

    def __init__(
        self, start_s: float, *, is_aside: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._is_aside = is_aside
        self._processes: dict[str, _Process] = {}
        self._failures: collections.Counter[str] = collections.Counter()
        self._restarts: collections.Counter[str] = collections.Counter()
        self._step_s = start_s

    def observe(self, members: Iterable[Member]) -> None:
        """Update the processes from the current members; missing ones have ended."""
        seen = set()
        for member in members:
            seen.add(member.name)
            process = self._processes.get(member.name)
            if process is None or process.pid != member.pid:
                self._processes[member.name] = process = _Process(member)
            if member.counters:
                self._count_failures(process.newest, member.counters)
                process.newest = member.counters
        for name in self._processes.keys() - seen:
            del self._processes[name]

    def restarted(self, name: str) -> None:
        """Count a restart of the process."""
        self._restarts[name] += 1

    def step(self, now_s: float, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a learner step that was just reported, given the learner's own
        `scalars` of it.
        """
        interval_s, self._step_s = now_s - self._step_s, now_s
        numbers: dict[str, float] = {}
        if interval_s > 0:
            numbers["throughput/steps_per_s"] = 1 / interval_s
            numbers["throughput/trained_tokens_per_s"] = (
                scalars.get("tokens/trained", 0.0) / interval_s
            )
        for process in self._processes.values():
            process.measure()
        numbers |= self._of_roles(interval_s)
        numbers |= self.now()
        return {name: value for name, value in numbers.items() if name not in scalars}

    def now(self) -> dict[str, float]:
        """Return the metrics that need no step: throughput by the newest heartbeats, queues,
        latencies, memory, failures.
        """
        numbers: dict[str, float] = {}
        for counter, metric in _PER_SECOND.items():
            rates = [p.last[counter] for p in self._processes.values() if counter in p.last]
            if rates:
                numbers[metric] = sum(rates)
        for name, process in self._processes.items():
            for key, value in process.newest.items():
                if key.startswith(GAUGE):
                    _add_gauge(numbers, name, key.removeprefix(GAUGE), value)
            if GAUGE + "cpu_s" in process.last:
                numbers[f"cpu/{name}"] = process.last[GAUGE + "cpu_s"]
        numbers |= {name: float(n) for name, n in self._failures.items()}
        numbers |= {f"restarts/{name}": float(n) for name, n in self._restarts.items()}
        return numbers

    def _of_roles(self, interval_s: float) -> dict[str, float]:
        """Means over the processes of a role: shares of the three conditions, and seconds per step
        of every stage.
        """
        numbers: collections.defaultdict[str, float] = collections.defaultdict(float)
        found = [
            process
            for name, process in self._processes.items()
            if process.last and not self._is_aside(name)
        ]
        size = collections.Counter(process.role for process in found)
        for process in found:
            for key, rate in process.last.items():
                if key in _CONDITIONS:
                    numbers[f"{_CONDITIONS[key]}/{process.role}"] += rate / size[process.role]
                for prefix, metric in _STAGES.items():
                    if key.startswith(prefix):
                        stage = key.removeprefix(prefix).replace(" ", "_").replace("/", "_")
                        numbers[f"{metric}/{process.role}/{stage}"] += (
                            rate * interval_s / size[process.role]
                        )
        return dict(numbers)

    def _count_failures(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        for name, value in after.items():
            if name.startswith(_FAILURES):
                self._failures[name] += round(value - before.get(name, 0.0))


def _add_gauge(numbers: dict[str, float], process: str, gauge: str, value: float) -> None:
    """Gauges under a catalogue name are metrics as they stand; `memory_mb` becomes one per process;
    others are for `status` only.
    """
    if gauge == "memory_mb":
        numbers[f"memory/{process}_mb"] = value
        return
    spec = describe(gauge)
    if spec is None or spec.kind is not MetricKind.SCALAR:
        return
    if gauge.startswith("queue/"):
        numbers[gauge] = numbers.get(gauge, 0.0) + value
    else:
        numbers[gauge] = max(numbers.get(gauge, value), value)
