"""Conversion of the cumulative counters in heartbeats to metrics per step: shares of working and
waiting time, tokens per second, queue depths.

Rules
- Every process is measured against its own age between two heartbeats, so neither a late heartbeat
  nor a restart distorts a share.
- Numbers since the last step use the heartbeats that came since then; without any they repeat
  the newest ones.
- A restarted process counts from 0; the counts of its predecessor stay in the
  run's totals (`failures/<reason>`).
- A generator that only evaluates is idle between evaluations, unlike other generators: the
  shares of its role leave it out.
- A process that has exited no longer appears; gauges of several processes are added for `queue/`
  and the sessions of gateways, else the largest is taken.
- Memory and cores are the median and the maximum of each pool: a name per process would fill every
  row of a run with a thousand processes.
Pure state, without a clock: times come from the counters and the caller.
"""

import collections
import statistics
from collections.abc import Callable, Iterable, Mapping

from async_rl.config.pools import pool_of
from async_rl.observability.activity import GAUGE
from async_rl.observability.catalogue import describe
from async_rl.protocol.supervisor import Member

_CONDITIONS = {
    "busy_s": ("busy", "stage_s"),
    "wait_s": ("waiting", "wait_s"),
    "blocked_s": ("blocked", "blocked_s"),
}
"""Metric of a condition's share of time, and metric of the seconds of its stages."""
_AGE = (*_CONDITIONS, "idle_s")
_CPU = f"{GAUGE}cpu_s"  # cumulative, but not a metric under its own name
_MEMORY = f"{GAUGE}memory_mb"
_PER_SECOND = {
    "tokens_generated": "throughput/generated_tokens_per_s",
    "samples_scored": "throughput/samples_scored_per_s",
}
_ADDED = ("queue/", "sessions/open", "sessions/calling")
_FAILURES = "failures/"


def commonest_failure(numbers: Iterable[Mapping[str, float]]) -> str:
    """Return how often which failure stopped an attempt or a group, the commonest only; empty if
    none did. numbers: metrics of a run, or the counters of its processes.
    """
    failures: collections.Counter[str] = collections.Counter()
    for some in numbers:
        for name, count in some.items():
            if name.startswith(_FAILURES):
                failures[name.removeprefix(_FAILURES)] += round(count)
    total = failures.total()
    if not total:
        return ""
    reason, count = failures.most_common(1)[0]
    return f"{total} failed, {count} of them: {reason}"


def per_second(now: Member, before: Member | None) -> dict[str, float]:
    """Return the growth of each counter per second of the process's own time; empty if unknown."""
    past: Mapping[str, float] = {}
    # Another pid is another incarnation, whose counters started at 0.
    if before is not None and before.pid == now.pid:
        past = before.counters
    grown = {
        name: value - past.get(name, 0.0)
        for name, value in now.counters.items()
        if not name.startswith(GAUGE) or name == _CPU
    }
    age_s = sum(grown.get(name, 0.0) for name in _AGE)
    if age_s > 0:
        return {name: value / age_s for name, value in grown.items()}
    return {}


class Rates:
    """The supervisor's view of all processes' counters. is_aside: returns whether a process is left
    out of the shares of its role.
    """

    def __init__(
        self, start_s: float, *, is_aside: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._is_aside = is_aside
        # Newest heartbeat of each process, at the last step, and the rates between the two.
        self._newest: dict[str, Member] = {}
        self._measured: dict[str, Member] = {}
        self._rates: dict[str, dict[str, float]] = {}
        # By incarnation: a restarted process counts from 0 again, the run's totals do not.
        self._failures: dict[tuple[str, int], dict[str, float]] = {}
        self._restarts: collections.Counter[str] = collections.Counter()
        self._step_s = start_s

    def observe(self, members: Iterable[Member]) -> None:
        """Update the processes from the current members; missing ones have exited."""
        present = {}
        for member in members:
            before = self._newest.get(member.name)
            if before is None or before.pid != member.pid:
                # The rates of its predecessor say nothing about it.
                self._rates.pop(member.name, None)
                before = member
            # A member that has just joined has not sent a heartbeat yet.
            present[member.name] = member if member.counters else before
            if member.counters:
                self._failures[member.name, member.pid] = {
                    name: count
                    for name, count in member.counters.items()
                    if name.startswith(_FAILURES)
                }
        self._newest = present

    def restarted(self, name: str) -> None:
        """Count a restart of a process of its pool; the learner and the buffer are their own."""
        self._restarts[pool_of(name) or name.partition("-")[0]] += 1

    def step(self, now_s: float, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a learner step that was just reported, given the learner's own
        `scalars` of it.
        """
        interval_s = now_s - self._step_s
        self._step_s = now_s
        numbers: dict[str, float] = {}
        # Two steps in one tick of the clock have no rate.
        if interval_s > 0:
            trained = scalars.get("tokens/trained", 0.0)
            numbers["throughput/steps_per_s"] = 1 / interval_s
            numbers["throughput/trained_tokens_per_s"] = trained / interval_s
        # The older rates if no heartbeat came since the last step.
        self._rates = {
            name: per_second(member, self._measured.get(name)) or self._rates.get(name, {})
            for name, member in self._newest.items()
        }
        self._measured = self._newest
        numbers |= self._of_roles(interval_s)
        numbers |= self.now()
        # The learner's own numbers win: it measured them itself.
        return {name: value for name, value in numbers.items() if name not in scalars}

    def now(self) -> dict[str, float]:
        """Return the metrics that need no step: throughput by the newest heartbeats, queues,
        latencies, memory, failures.
        """
        numbers: collections.defaultdict[str, float] = collections.defaultdict(float)
        used: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        for name, member in self._newest.items():
            pool = pool_of(name) or member.role
            rates = self._rates.get(name, {})
            for counter, metric in _PER_SECOND.items():
                if counter in rates:
                    numbers[metric] += rates[counter]
            for key, value in member.counters.items():
                if key == _MEMORY:
                    used[f"memory/{pool}_mb"].append(value)
                gauge = key.removeprefix(GAUGE)
                # Gauges under a catalogue name are metrics as they are; others are for `status`.
                if gauge == key or describe(gauge) is None:
                    continue
                # Only counts add up; a latency of two processes is that of the slower process.
                if gauge.startswith(_ADDED):
                    numbers[gauge] += value
                else:
                    numbers[gauge] = max(numbers.get(gauge, value), value)
            if _CPU in rates:
                used[f"cpu/{pool}"].append(rates[_CPU])
        for name, values in used.items():
            numbers[f"{name}_median"] = statistics.median(values)
            numbers[f"{name}_max"] = max(values)
        for failures in self._failures.values():
            for name, count in failures.items():
                numbers[name] += count
        for pool, count in self._restarts.items():
            numbers[f"restarts/{pool}"] = float(count)
        return numbers

    def _of_roles(self, interval_s: float) -> dict[str, float]:
        """Return means over the processes of a role: shares of the three conditions, and seconds
        per step of every stage.
        """
        numbers: collections.defaultdict[str, float] = collections.defaultdict(float)
        measured = [
            (self._newest[name].role, rates)
            for name, rates in self._rates.items()
            if rates and not self._is_aside(name)
        ]
        size = collections.Counter(role for role, _ in measured)
        for role, rates in measured:
            for key, rate in rates.items():
                condition, _, stage = key.partition("/")
                if condition not in _CONDITIONS:
                    continue
                share, seconds = _CONDITIONS[condition]
                mean = rate / size[role]
                if stage:
                    # A name of the catalogue has one element per placeholder and no spaces.
                    element = stage.replace(" ", "_").replace("/", "_")
                    numbers[f"{seconds}/{role}/{element}"] += mean * interval_s
                else:
                    numbers[f"{share}/{role}"] += mean
        return numbers
