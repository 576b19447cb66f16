"""Metrics per step from the counters in heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from members import member

from async_rl.monitoring.rates import Rates
from async_rl.observability.catalogue import describe
from async_rl.protocol.membership import Member


def observed(*members: Member) -> Rates:
    rates = Rates(start_s=0.0)
    rates.observe(members)
    return rates


def generator(rank: int = 0, *, pid: int = 1, **counters: float) -> Member:
    named = {name.replace("__", "/"): value for name, value in counters.items()}
    return member(f"generator-{rank}", named, pid=pid)


def test_rates_are_summed_and_shares_and_seconds_of_a_role_are_means_over_its_processes() -> None:
    first = generator(0, busy_s=1.0, blocked_s=1.0, blocked_s__admission=1.0, tokens_generated=100)
    first.counters["busy_s/loading weights"] = 1.0
    second = generator(1, busy_s=2.0, tokens_generated=200)
    second.counters["busy_s/loading weights"] = 2.0
    learner = member(
        "learner-0", {"busy_s": 1.0, "wait_s": 3.0, "wait_s/a batch": 3.0, "gauge/cpu_s": 6.0}
    )
    learner.counters["gauge/weights/pause_s"] = 9.0
    # Numbers that the learner told itself are not overwritten.
    numbers = observed(first, second, learner).step(4.0, {"weights/pause_s": 0.02})
    assert "weights/pause_s" not in numbers
    expected = {
        "throughput/generated_tokens_per_s": 50.0 + 100.0,
        "busy/generator": 0.75,
        "blocked/generator": 0.25,
        "stage_s/generator/loading_weights": 4.0 * 0.75,
        "blocked_s/generator/admission": 4.0 * 0.25,
        "wait_s/learner/a_batch": 3.0,
        "busy/learner": 0.25,
        "waiting/learner": 0.75,
        "cpu/learner_max": 1.5,
    }
    assert {name: numbers[name] for name in expected} == expected


def test_a_generator_that_only_evaluates_is_left_out_of_the_shares_of_its_role() -> None:
    for is_aside, blocked in ((lambda name: "judge" in name, 0.0), (lambda _: False, 0.5)):
        rates = Rates(start_s=0.0, is_aside=is_aside)
        resting = member("generator-judge-0", {"blocked_s": 2.0})
        rates.observe([generator(busy_s=2.0), resting])
        assert rates.step(4.0, {}).get("blocked/generator", 0.0) == blocked


def test_a_step_counts_only_what_came_since_the_last_one_and_repeats_it_if_nothing_came() -> None:
    rates = observed(generator(busy_s=10.0, tokens_generated=10.0))
    rates.step(10.0, {})
    rates.observe([generator(busy_s=11.0, wait_s=1.0, tokens_generated=110.0)])
    second = rates.step(12.0, {"tokens/trained": 60.0})
    assert second["throughput/generated_tokens_per_s"] == 50.0
    assert second["busy/generator"] == 0.5
    assert second["throughput/trained_tokens_per_s"] == 30.0
    assert second["throughput/steps_per_s"] == 0.5
    assert rates.step(13.0, {})["throughput/generated_tokens_per_s"] == 50.0


def test_a_restarted_process_counts_from_zero_and_failures_stay_in_the_total() -> None:
    rates = observed(generator(busy_s=9.0, tokens_generated=900.0, failures__timeout=2.0))
    rates.step(9.0, {})
    rates.restarted("generator-0")
    again = generator(
        pid=2, busy_s=2.0, tokens_generated=20.0, failures__timeout=1.0, gauge__memory_mb=5.0
    )
    rates.observe([again])
    numbers = rates.step(11.0, {})
    assert numbers["throughput/generated_tokens_per_s"] == 10.0
    assert numbers["failures/timeout"] == 3.0
    assert numbers["restarts/generators"] == 1.0
    assert numbers["memory/generators_mb_max"] == 5.0
    # A process that ended disappears, but its failures do not.
    rates.observe([])
    numbers = rates.step(12.0, {})
    assert "memory/generators_mb_max" not in numbers
    assert numbers["failures/timeout"] == 3.0


SESSIONS = ("open", "calling", "open_in/guess", "turns")


@pytest.mark.parametrize(
    ("names", "gauges", "expected"),
    [
        (
            ("generator-a", "generator-b"),
            (
                {"queue/ready": 2.0, "verifier/latency_p99_s": 0.5, "memory_mb": 7.0, "odd": 1.0},
                {"queue/ready": 3.0, "verifier/latency_p99_s": 0.25},
            ),
            {
                "queue/ready": 5.0,
                "verifier/latency_p99_s": 0.5,
                "memory/generator_mb_median": 7.0,
                "memory/generator_mb_max": 7.0,
            },
        ),
        (
            ("gateway-0", "gateway-1"),
            [{f"sessions/{name}": n for name in SESSIONS} for n in (2.0, 3.0)],
            {f"sessions/{name}": 5.0 for name in SESSIONS} | {"sessions/turns": 3.0},
        ),
    ],
)
def test_queues_and_sessions_add_up_and_other_gauges_take_the_worst(
    names: Sequence[str], gauges: Sequence[Mapping[str, float]], expected: dict[str, float]
) -> None:
    members = [
        member(
            name if "gateway" in name else name[-1],
            {f"gauge/{key}": value for key, value in own.items()},
            role=name.partition("-")[0],
        )
        for name, own in zip(names, gauges, strict=True)
    ]
    assert observed(*members).now() == expected


def test_every_number_has_a_declared_name() -> None:
    counted = ["busy_s", "wait_s", "blocked_s", "idle_s", "tokens_generated", "samples_scored"]
    counted += ["gauge/cpu_s", "gauge/memory_mb", "failures/x"]
    for stage in ("a batch", "admission (the learner is behind)", "verifier-0/queue"):
        counted += [f"{condition}/{stage}" for condition in counted[:3]]
    rates = observed(member("generator-0", dict.fromkeys(counted, 1.0)))
    rates.restarted("generator-0")
    numbers = rates.step(1.0, {})
    assert len(numbers) > 10
    assert [name for name in numbers if describe(name) is None] == []
