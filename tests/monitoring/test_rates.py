"""Metrics per step from the counters in heartbeats."""

from members import member

from async_rl.monitoring.rates import Rates
from async_rl.observability.catalogue import METRICS, describe
from async_rl.protocol.supervisor import Member


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
    counters = {"busy_s": 1.0, "wait_s": 3.0, "wait_s/a batch": 3.0, "gauge/cpu_s": 6.0}
    learner = member("learner-0", counters | {"gauge/weights/pause_s": 9.0})
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
    counters = {"busy_s": 2.0, "tokens_generated": 20.0, "failures__timeout": 1.0}
    rates.observe([generator(pid=2, gauge__memory_mb=5.0, **counters)])
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


def test_queues_and_sessions_add_up_and_other_gauges_take_the_worst() -> None:
    queued = {"gauge/queue/ready": 2.0, "gauge/verifier/latency_p99_s": 0.5, "gauge/odd": 1.0}
    open_now = {"gauge/sessions/open": 2.0, "gauge/sessions/turns": 2.0}
    members = [
        member("generator-0", queued | {"gauge/memory_mb": 7.0}),
        member("generator-1", {name: value + 1 for name, value in queued.items()}),
        member("gateway-0", open_now),
        member("gateway-1", {name: value + 1 for name, value in open_now.items()}),
    ]
    assert observed(*members).now() == {
        "queue/ready": 5.0,
        "verifier/latency_p99_s": 1.5,
        "memory/generators_mb_median": 7.0,
        "memory/generators_mb_max": 7.0,
        "sessions/open": 5.0,
        "sessions/turns": 3.0,
    }


def test_a_placeholder_of_a_name_stands_for_exactly_one_path_element() -> None:
    assert describe("failures/over_age") is METRICS["failures/<reason>"]
    assert describe("memory/generators_mb_max") is METRICS["memory/<pool>_mb_max"]
    for name in ("failures/over/age", "failures/", "nothing/like_this", "failures/<reason>"):
        assert describe(name) is None
