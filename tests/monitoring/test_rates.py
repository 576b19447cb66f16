from __future__ import annotations

import pytest

from async_rl.core.types import Role
from async_rl.monitoring.rates import Rates
from async_rl.observability.catalogue import describe
from async_rl.protocol.membership import Member


def member(name: str, role: Role, counters: dict[str, float], pid: int = 1) -> Member:
    return Member(
        name=name,
        role=role,
        pid=pid,
        address="",
        state="",
        waits_for="",
        since_s=0.0,
        version=0,
        counters=counters,
    )


def ages(
    busy: float = 0.0, wait: float = 0.0, blocked: float = 0.0, idle: float = 0.0
) -> dict[str, float]:
    return {"busy_s": busy, "wait_s": wait, "blocked_s": blocked, "idle_s": idle}


def test_tokens_per_second_are_summed_over_generators_each_by_its_own_time() -> None:
    rates = Rates(start_s=0.0)
    rates.observe(
        [
            member("generator-0", "generator", {**ages(busy=2.0), "tokens_generated": 100.0}),
            member(
                "generator-1", "generator", {**ages(busy=1.0, idle=3.0), "tokens_generated": 200.0}
            ),
        ]
    )
    assert rates.step(10.0, {})["throughput/generated_tokens_per_s"] == 50.0 + 50.0


def test_shares_and_seconds_of_a_role_are_means_over_its_processes() -> None:
    rates = Rates(start_s=0.0)
    rates.observe(
        [
            member(
                "generator-0",
                "generator",
                {
                    **ages(busy=1.0, blocked=1.0),
                    "busy_s/loading weights": 1.0,
                    "blocked_s/admission": 1.0,
                },
            ),
            member("generator-1", "generator", {**ages(busy=2.0), "busy_s/loading weights": 2.0}),
            member("learner-0", "learner", {**ages(busy=1.0, wait=3.0), "wait_s/a batch": 3.0}),
        ]
    )
    numbers = rates.step(4.0, {})
    assert numbers["busy/generator"] == 0.75
    assert numbers["blocked/generator"] == 0.25
    assert numbers["stage_s/generator/loading_weights"] == 4.0 * 0.75
    assert numbers["blocked_s/generator/admission"] == 4.0 * 0.25
    assert numbers["wait_s/learner/a_batch"] == 3.0
    assert (numbers["busy/learner"], numbers["waiting/learner"]) == (0.25, 0.75)


def test_a_generator_that_only_evaluates_is_left_out_of_the_shares_of_its_role() -> None:
    for is_aside, blocked in ((lambda name: "judge" in name, 0.0), (lambda _: False, 0.5)):
        rates = Rates(start_s=0.0, is_aside=is_aside)
        members = [
            member("generator-0", "generator", ages(busy=2.0)),
            member("generator-judge-0", "generator", ages(blocked=2.0)),
        ]
        rates.observe(members)
        assert rates.step(4.0, {}).get("blocked/generator", 0.0) == blocked


def test_a_step_counts_only_what_came_since_the_last_one_and_repeats_it_if_nothing_came() -> None:
    rates = Rates(start_s=0.0)
    rates.observe(
        [member("generator-0", "generator", {**ages(busy=10.0), "tokens_generated": 10.0})]
    )
    rates.step(10.0, {})
    rates.observe(
        [
            member(
                "generator-0", "generator", {**ages(busy=11.0, wait=1.0), "tokens_generated": 110.0}
            )
        ]
    )
    second = rates.step(12.0, {"tokens/trained": 60.0})
    assert second["throughput/generated_tokens_per_s"] == 50.0
    assert second["busy/generator"] == 0.5
    assert second["throughput/trained_tokens_per_s"] == 30.0
    assert second["throughput/steps_per_s"] == 0.5
    third = rates.step(13.0, {})
    assert third["throughput/generated_tokens_per_s"] == 50.0


def test_a_restarted_process_counts_from_zero_and_failures_stay_in_the_total() -> None:
    rates = Rates(start_s=0.0)
    rates.observe(
        [
            member(
                "generator-0",
                "generator",
                {**ages(busy=9.0), "tokens_generated": 900.0, "failures/timeout": 2.0},
            )
        ]
    )
    rates.step(9.0, {})
    rates.restarted("generator-0")
    rates.observe(
        [
            member(
                "generator-0",
                "generator",
                {**ages(busy=2.0), "tokens_generated": 20.0, "failures/timeout": 1.0},
                pid=2,
            )
        ]
    )
    numbers = rates.step(11.0, {})
    assert numbers["throughput/generated_tokens_per_s"] == 10.0
    assert numbers["failures/timeout"] == 3.0
    assert numbers["restarts/generators"] == 1.0


def test_the_rate_of_a_failure_is_that_since_the_last_step() -> None:
    def observed(busy_s: float, failed: float) -> dict[str, float]:
        counters = {**ages(busy=busy_s), "failures/timeout": failed}
        rates.observe([member("generator-0", "generator", counters)])
        return rates.now()

    rates = Rates(start_s=0.0)
    assert observed(30.0, 3.0)["failure_rate/timeout"] == 6.0, "before the first step too"
    rates.step(30.0, {})
    assert observed(30.0, 3.0)["failure_rate/timeout"] == 6.0, "no heartbeat since"
    assert observed(60.0, 3.0)["failure_rate/timeout"] == 0.0
    assert observed(90.0, 8.0)["failure_rate/timeout"] == 5.0


def test_a_process_that_ended_disappears_but_its_failures_do_not() -> None:
    rates = Rates(start_s=0.0)
    rates.observe(
        [
            member(
                "generator-0",
                "generator",
                {**ages(busy=1.0), "gauge/memory_mb": 5.0, "failures/timeout": 1.0},
            )
        ]
    )
    rates.observe([])
    numbers = rates.step(1.0, {})
    assert "memory/generators_mb_max" not in numbers
    assert numbers["failures/timeout"] == 1.0


def test_queue_gauges_add_up_and_latencies_take_the_worst() -> None:
    rates = Rates(start_s=0.0)
    rates.observe(
        [
            member(
                "a",
                "generator",
                {
                    "gauge/queue/ready": 2.0,
                    "gauge/verifier/latency_p99_s": 0.5,
                    "gauge/memory_mb": 7.0,
                    "gauge/odd": 1.0,
                },
            ),
            member(
                "b", "generator", {"gauge/queue/ready": 3.0, "gauge/verifier/latency_p99_s": 0.25}
            ),
        ]
    )
    assert rates.now() == {
        "queue/ready": 5.0,
        "verifier/latency_p99_s": 0.5,
        "memory/generator_mb_median": 7.0,
        "memory/generator_mb_max": 7.0,
    }


def test_the_sessions_of_several_gateways_add_up() -> None:
    rates = Rates(start_s=0.0)
    names = ("open", "calling", "open_in/guess", "turns")
    rates.observe(
        [
            member(f"gateway-{rank}", "gateway", {f"gauge/sessions/{n}": 2.0 + rank for n in names})
            for rank in range(2)
        ]
    )
    found = rates.now()
    assert [found[f"sessions/{name}"] for name in names] == [5.0, 5.0, 5.0, 3.0]


def test_cores_in_use_come_from_cumulative_cpu_seconds() -> None:
    rates = Rates(start_s=0.0)
    rates.observe([member("a", "learner", {**ages(busy=4.0), "gauge/cpu_s": 6.0})])
    assert rates.step(4.0, {})["cpu/learner_max"] == 1.5


def test_numbers_that_the_learner_told_itself_are_not_overwritten() -> None:
    rates = Rates(start_s=0.0)
    rates.observe([member("a", "learner", {"gauge/weights/pause_s": 9.0})])
    assert "weights/pause_s" not in rates.step(1.0, {"weights/pause_s": 0.02})


@pytest.mark.parametrize(
    "what", ["a batch", "admission (the learner is behind)", "verifier-0/queue"]
)
def test_every_number_has_a_declared_name(what: str) -> None:
    rates = Rates(start_s=0.0)
    counters = {
        **ages(busy=1.0, wait=1.0, blocked=1.0),
        f"wait_s/{what}": 1.0,
        f"busy_s/{what}": 1.0,
        f"blocked_s/{what}": 1.0,
    }
    counters |= {
        "tokens_generated": 1.0,
        "samples_scored": 1.0,
        "gauge/cpu_s": 1.0,
        "gauge/memory_mb": 1.0,
        "failures/x": 1.0,
    }
    rates.observe([member("generator-0", "generator", counters)])
    rates.restarted("generator-0")
    numbers = rates.step(1.0, {})
    assert len(numbers) > 10
    assert [name for name in numbers if describe(name) is None] == []
