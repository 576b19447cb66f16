"""The output of `async-rl status` below the table: rates, the bottleneck, the flow, the rewards."""

from __future__ import annotations

import io
import re

import members
import msgspec
import pytest
from rich.console import Console
from tables import table

from async_rl.composition.schema import settings
from async_rl.monitoring.rates import per_second
from async_rl.monitoring.status import bottleneck, render
from async_rl.protocol.control import StatusReply
from async_rl.protocol.membership import Member, PoolCount


def member(name: str, *, pid: int = 7, state: str = "working", **counters: float) -> Member:
    return members.member(name, counters, pid=pid, state=state)


def learner(busy_s: float, wait_s: float) -> Member:
    return member("learner-0", busy_s=busy_s, wait_s=wait_s)


def generator(busy_s: float, wait_s: float, blocked_s: float) -> Member:
    return member("generator-0", busy_s=busy_s, wait_s=wait_s, blocked_s=blocked_s)


def reply(processes: list[Member], **metrics: float) -> StatusReply:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return members.reply(processes, metrics=named)


def shown(answer: StatusReply, before: StatusReply | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render(answer, now_s=60.0, before=before))
    return out.getvalue()


def test_a_rate_is_per_second_of_the_process_between_the_two_moments() -> None:
    before = member("generator-0", busy_s=10, idle_s=0, tokens_generated=1000)
    now = member("generator-0", busy_s=13, idle_s=1, tokens_generated=1800)
    assert per_second(now, before) == {"busy_s": 0.75, "idle_s": 0.25, "tokens_generated": 200.0}


def test_a_process_that_was_started_again_is_measured_from_its_start() -> None:
    before = member("generator-0", pid=6, busy_s=100, tokens_generated=9000)
    assert (
        per_second(member("generator-0", pid=7, busy_s=2, tokens_generated=50), before)[
            "tokens_generated"
        ]
        == 25.0
    )


def test_nothing_is_said_of_a_process_that_told_no_time() -> None:
    assert per_second(member("generator-0"), None) == {}
    assert bottleneck([member("learner-0"), generator(1, 0, 0)]) == ""


@pytest.mark.parametrize(("learner_s", "generator_s", "named"), table(__file__, "bottlenecks"))
def test_the_bottleneck_is_named_with_its_shares(
    learner_s: tuple[int, int], generator_s: tuple[int, int, int], named: str
) -> None:
    assert bottleneck([learner(*learner_s), generator(*generator_s)]).startswith(named)


def test_the_bottleneck_is_of_the_time_between_the_moments_and_not_of_the_whole_run() -> None:
    before = [learner(100, 0), generator(100, 0, 0)]
    assert bottleneck([learner(100, 0), generator(110, 0, 0)]).startswith("the learner")
    assert bottleneck([learner(101, 9), generator(110, 0, 0)], before).startswith("generation")


def gateway(shares: tuple[int, int, int], num_open: int, num_calling: int) -> Member:
    busy_s, wait_s, blocked_s = shares
    gauges = {"gauge/sessions/open": num_open, "gauge/sessions/calling": num_calling}
    counters: dict[str, float] = {"busy_s": busy_s, "wait_s": wait_s, "blocked_s": blocked_s}
    return member("gateway-0", **counters, **gauges)


@pytest.mark.parametrize(("shares", "sessions", "named"), table(__file__, "sessions"))
def test_sessions_that_wait_for_their_agents_hold_a_run_up_and_not_the_engine(
    shares: tuple[int, int, int], sessions: tuple[int, int], named: str
) -> None:
    # One of many sessions at a time is enough to keep a generator at work.
    processes = [learner(2, 8), generator(10, 0, 0), gateway(shares, *sessions)]
    assert bottleneck(processes).startswith(named)


def test_the_sessions_of_both_moments_and_of_all_gateways_count() -> None:
    first, second = gateway((10, 0, 0), 8, 0), gateway((20, 0, 0), 8, 8)
    other = msgspec.structs.replace(second, name="gateway-1")
    before = [learner(0, 10), generator(10, 0, 0), first]
    processes = [learner(0, 20), generator(20, 0, 0), second]
    assert bottleneck([*processes, other], before).startswith("generation")
    both = [*before, msgspec.structs.replace(first, name="gateway-1")]
    now = msgspec.structs.replace(second, counters={**second.counters, "gauge/sessions/calling": 6})
    assert bottleneck([learner(0, 20), now], both).startswith("agents")


def test_while_a_process_starts_no_bottleneck_is_guessed() -> None:
    starting = member("generator-1", state="starting")
    assert bottleneck([learner(1, 9), starting]) == "still starting: generator-1"


def test_a_silent_process_is_named_before_any_bottleneck() -> None:
    text = shown(reply([learner(1, 9), member("generator-0", state="silent", busy_s=9)]))
    assert "no heartbeat from: generator-0" in text
    assert "bottleneck" not in text


def test_every_relief_names_settings_that_exist() -> None:
    runs = [
        [learner(9, 1), generator(1, 0, 0)],
        [learner(1, 9), generator(9, 0, 0)],
        [learner(1, 9), generator(0, 0, 9)],
        [learner(1, 9), generator(0, 9, 0)],
        [learner(1, 9), generator(9, 0, 0), gateway((9, 0, 0), 9, 1)],
    ]
    for run in runs:
        named = re.findall(r"\w+\.\w+", bottleneck(run))
        assert named
        assert set(named) <= set(settings())


def test_the_flow_counts_groups_in_each_state_and_failures() -> None:
    text = shown(
        reply(
            [],
            queue__issued=1,
            queue__generating=12,
            queue__ready=3,
            queue__leased=16,
            failures__over_age=2,
            failures__x=1,
        )
    )
    assert (
        "groups: prompt → issued 1 → generating 12 → ready 3 → leased 16 → trained in step 3  "
        " 3 failed, 2 of them: over_age" in text
    )


def test_a_restart_stands_beside_the_process_with_the_first_line_of_its_cause() -> None:
    answer = reply([generator(1, 0, 0)])
    answer = msgspec.structs.replace(
        answer,
        restarts={"generator-0": 2},
        restarted_because={"generator-0": "generator-0 was ended by SIGKILL\nmore"},
    )
    assert "(restarts: 2; generator-0 was ended by SIGKILL)" in shown(answer)


def test_the_rate_column_has_tokens_of_generators_since_the_earlier_answer() -> None:
    before = reply([member("generator-0", busy_s=10, tokens_generated=1000)])
    now = reply([member("generator-0", busy_s=12, tokens_generated=6000)])
    assert "2,500 tokens/s" in shown(now, before)
    assert "500 tokens/s" in shown(now)


def test_a_stalled_run_says_why_instead_of_a_bottleneck() -> None:
    stalled = msgspec.structs.replace(
        reply([learner(9, 1), generator(1, 0, 0)]), stalled="no learner step for 70 s"
    )
    assert "no learner step for 70 s" in shown(stalled)
    assert "bottleneck" not in shown(stalled)


def pool(name: str, wanted: int, work: str) -> PoolCount:
    return PoolCount(pool=name, wanted=wanted, starting=0, live=wanted, draining=0, work=work)


def test_status_says_which_pool_is_missing_for_what() -> None:
    def told(plain: int, big: int, judge: int) -> str:
        pools = [
            pool("generators", plain, "train"),
            pool("generators.big", big, "train"),
            pool("generators.judge", judge, "evaluation"),
        ]
        return shown(msgspec.structs.replace(reply([]), pools=pools))

    assert "continues)" not in told(0, 1, 1)
    assert (
        "generators.judge: 0 wanted, 0 live (evaluations wait; async-rl scale generators.judge=1"
        " continues)" in told(1, 0, 0)
    )
    assert (
        "generators.big: 0 wanted, 0 live (async-rl scale generators.big=1 continues);"
        " generators.judge: 1 wanted, 1 live\n" in told(0, 0, 1)
    )


def test_generators_that_only_evaluate_are_no_bottleneck() -> None:
    resting = member("generator-judge-0", busy_s=0.0, wait_s=100.0, blocked_s=0.0)
    pools = [pool("generators", 1, "train"), pool("generators.judge", 1, "evaluation")]
    running = reply([learner(40, 60), generator(100, 0, 0), resting])
    assert "generators write 100%" in shown(msgspec.structs.replace(running, pools=pools))


def test_status_shows_the_processes_that_leave_a_pool() -> None:
    leaving = msgspec.structs.replace(pool("generators", 0, "both"), draining=2)
    text = shown(msgspec.structs.replace(reply([]), pools=[leaving]))
    assert "generators: 0 wanted, 2 draining (async-rl scale generators=1 continues)" in text


def test_the_sessions_of_agents_are_shown_by_what_they_wait_for() -> None:
    text = shown(reply([member("gateway-0")], sessions__open=9.0, sessions__calling=7.0))
    assert "sessions of agents 9  of them waiting for the engine 7" in text
    assert "sessions" not in shown(reply([member("generator-0")]))
