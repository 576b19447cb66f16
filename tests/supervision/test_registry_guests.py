"""The supervisor waits for other runs that use its generators, and for no others."""

from __future__ import annotations

from async_rl.observability.activity import GAUGE
from async_rl.protocol.membership import GUESTS, Heartbeat, Register
from async_rl.supervision.registry import Registry


class Time:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def beat(registry: Registry, name: str, guests: float, pid: int = 1) -> None:
    registry.beat(
        Heartbeat(
            name=name,
            pid=pid,
            state="generating",
            waits_for="",
            since_s=0.0,
            version=0,
            counters={f"{GAUGE}{GUESTS}": guests},
        )
    )


def serve(registry: Registry, name: str, pid: int = 1) -> None:
    registry.register(
        Register(name=name, role="generator", pid=pid, address="tcp://127.0.0.1:1", devices=[])
    )


def test_guests_are_waited_for_until_they_leave_or_their_generator_stays_away() -> None:
    time = Time()
    registry = Registry(time)
    for name in ("generator-0", "generator-1"):
        serve(registry, name)
        beat(registry, name, 0)
    assert not registry.has_guests(60)
    beat(registry, "generator-0", 1)
    assert registry.has_guests(60)
    # Another generator without guests says nothing about those of the first.
    beat(registry, "generator-1", 0)
    assert registry.has_guests(60)
    registry.mark_ended("generator-0")
    time.now_s += 59
    serve(registry, "generator-0", 2)
    beat(registry, "generator-0", 0, 2)
    # It has just begun, and its guests have not come back yet.
    assert registry.has_guests(60)
    time.now_s += 2
    assert not registry.has_guests(60)
    beat(registry, "generator-0", 2, 2)
    beat(registry, "generator-1", 1)
    beat(registry, "generator-0", 0, 2)
    assert registry.has_guests(60)
    beat(registry, "generator-0", 1, 2)
    beat(registry, "generator-1", 0)
    assert registry.has_guests(60)
    beat(registry, "generator-0", 0, 2)
    assert not registry.has_guests(60)
