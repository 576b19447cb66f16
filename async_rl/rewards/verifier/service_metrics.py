"""Metrics of a verifier for Prometheus: verdicts, refusals and latency as they happen, queue and
cells as they are at the request.

Every metric has its unit and meaning here. The registry is not the global one, so that several
verifiers can run in one process.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from async_rl.core.types import Verdict
from async_rl.rewards.verifier.protocol import Health

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_GAUGES: dict[str, tuple[str, Callable[[Health], float]]] = {
    "queued": ("programs that wait for a cell", lambda health: health.queued),
    "running": ("programs in a cell", lambda health: health.running),
    "cells": ("programs that may run side by side", lambda health: health.cells),
    "level": (
        "strength of the jail: 1 namespaces, 2 Landlock and seccomp, 3 nothing",
        lambda health: health.level,
    ),
    "draining": (
        "1 while the verifier finishes and refuses new work",
        lambda health: health.status == "draining",
    ),
    "cells_replaced": (
        "cells that broke and were replaced since the start",
        lambda health: health.cells_replaced,
    ),
}


class ServiceMetrics:
    """Counters of one verifier. health: returns its present state."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._registry = CollectorRegistry()
        verdicts = Counter(
            "verifier_verdicts", "programs judged, by verdict", ["verdict"], registry=self._registry
        )
        self._verdicts = {verdict: verdicts.labels(verdict.value) for verdict in Verdict}
        self._refused = Counter(
            "verifier_refused",
            "requests refused, by HTTP status",
            ["status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "verifier_seconds",
            "seconds from a program's admission to its verdict",
            buckets=_SECONDS,
            registry=self._registry,
        )
        for name, (meaning, read) in _GAUGES.items():
            Gauge(f"verifier_{name}", meaning, registry=self._registry).set_function(
                lambda read=read: float(read(health()))  # type: ignore[misc]
            )

    def count_verdict(self, verdict: Verdict) -> None:
        """Count one judged program."""
        self._verdicts[verdict].inc()

    def count_refused(self, status: int) -> None:
        """Count one refused request."""
        self._refused.labels(str(status)).inc()

    def observe_s(self, seconds: float) -> None:
        """Record the time of one program, its wait included."""
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return generate_latest(self._registry)
