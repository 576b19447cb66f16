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


def generator(busy_s: float, wait_s: float, blocked_s: float) -> Member:
    return member("generator-0", busy_s=busy_s, wait_s=wait_s, blocked_s=blocked_s)


def shares(role: str, busy: float, waiting: float, blocked: float = 0) -> dict[str, float]:
    """The metrics of a step in which a role was in the three conditions for these tenths."""
    return {
        f"busy/{role}": busy / 10,
        f"waiting/{role}": waiting / 10,
        f"blocked/{role}": blocked / 10,
    }


def delayed_by(*processes: Member, **metrics: float) -> str:
    return bottleneck(members.reply(list(processes), metrics=metrics))


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
    assert delayed_by(**shares("generator", 1, 0)) == ""
    assert delayed_by(**shares("learner", 1, 0)) == ""


@pytest.mark.parametrize(("trains", "makes", "named"), table(__file__, "bottlenecks"))
def test_the_bottleneck_is_named_with_its_shares(
    trains: tuple[int, int], makes: tuple[int, int, int], named: str
) -> None:
    metrics = shares("learner", *trains) | shares("generator", *makes)
    assert delayed_by(**metrics).startswith(named)


def agents(makes: tuple[int, int, int], num_open: int, num_calling: int) -> dict[str, float]:
    """A step in which the learner waits, and one of many sessions keeps the generators at work."""
    sessions = {"sessions/open": num_open, "sessions/calling": num_calling}
    both = shares("learner", 2, 8) | shares("generator", 10, 0)
    return both | shares("gateway", *makes) | sessions


@pytest.mark.parametrize(("makes", "sessions", "named"), table(__file__, "sessions"))
def test_sessions_that_wait_for_their_agents_hold_a_run_up_and_not_the_engine(
    makes: tuple[int, int, int], sessions: tuple[int, int], named: str
) -> None:
    assert delayed_by(**agents(makes, *sessions)).startswith(named)


def test_while_a_process_starts_no_bottleneck_is_guessed() -> None:
    starting = member("generator-1", state="starting")
    assert delayed_by(starting, **shares("learner", 1, 9)) == "still starting: generator-1"


def test_a_silent_process_is_named_before_any_bottleneck() -> None:
    silent = [member("generator-0", state="silent")]
    metrics = shares("learner", 1, 9) | shares("generator", 9, 0)
    text = shown(members.reply(silent, metrics=metrics))
    assert "no heartbeat from: generator-0" in text
    assert "bottleneck" not in text


def test_every_relief_names_settings_that_exist() -> None:
    waits = shares("learner", 1, 9)
    runs = [
        shares("learner", 9, 1) | shares("generator", 1, 0),
        *(waits | shares("generator", *makes) for makes in ((9, 0), (0, 0, 9), (0, 9))),
        agents((9, 0, 0), 9, 1),
    ]
    for run in runs:
        named = re.findall(r"\w+\.\w+", delayed_by(**run))
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
        members.reply([], metrics=shares("learner", 9, 1) | shares("generator", 1, 0)),
        stalled="no learner step for 70 s",
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


def test_status_shows_the_processes_that_leave_a_pool() -> None:
    leaving = msgspec.structs.replace(pool("generators", 0, "both"), draining=2)
    text = shown(msgspec.structs.replace(reply([]), pools=[leaving]))
    assert "generators: 0 wanted, 2 draining (async-rl scale generators=1 continues)" in text


def test_the_sessions_of_agents_are_shown_by_what_they_wait_for() -> None:
    text = shown(reply([member("gateway-0")], sessions__open=9.0, sessions__calling=7.0))
    assert "sessions of agents 9  of them waiting for the engine 7" in text
    assert "sessions" not in shown(reply([member("generator-0")]))
