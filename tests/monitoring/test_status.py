"""The output of `async-rl status`: processes, rates, the bottleneck, the flow, the rewards."""

import io
from typing import Any

import members
import pytest
from rich.console import Console
from tables import table

from async_rl.monitoring.rates import per_second
from async_rl.monitoring.status import bottleneck, render
from async_rl.protocol.supervisor import Member, PoolCount, StatusReply
from async_rl.supervision.liveness import sentence


def member(name: str, *, pid: int = 7, state: str = "working", **counters: float) -> Member:
    return members.member(name, counters, pid=pid, state=state)


def shares(role: str, busy: float, waiting: float, blocked: float = 0) -> dict[str, float]:
    """The metrics of a step in which a role was in the three conditions for these tenths."""
    return {
        f"busy/{role}": busy / 10,
        f"waiting/{role}": waiting / 10,
        f"blocked/{role}": blocked / 10,
    }


def delayed_by(*processes: Member, **metrics: float) -> str:
    return bottleneck(members.reply(list(processes), metrics=metrics))


def reply(*processes: Member, **facts: Any) -> StatusReply:
    return members.reply(list(processes), **facts)


def shown(answer: StatusReply, before: StatusReply | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render(answer, now_s=60.0, before=before))
    return out.getvalue()


def test_status_lists_every_process_with_what_it_waits_for() -> None:
    held = {"state": "blocked", "waits_for": "admission: 48 of 48", "since_s": 58}
    processes = [
        members.member("verifier-0", state="serving", since_s=60),
        members.member("generator-0", version=11, **held),
        members.member("learner-0", state="training", since_s=59, version=12),
    ]
    metrics = {"reward/mean": 0.5, "throughput/generated_tokens_per_s": 9841.2}
    facts = {"started_s": -35, "tensorboard_url": "http://127.0.0.1:6006/", "metrics": metrics}
    lines = [line.rstrip() for line in shown(reply(*processes, **facts)).splitlines()]
    assert lines == [
        "r  step 3 of 9, running for 1 min 35 s",
        "/r",
        "TensorBoard http://127.0.0.1:6006/",
        "reward 0.500  generated tokens/s 9,841",
        "process      pid  state     version  since  at work  rate  waits for",
        "learner-0    7    training  12       1 s",
        "generator-0  7    blocked   11       2 s                   admission: 48 of 48",
        "verifier-0   7    serving            0 s",
    ]


def test_a_rate_is_per_second_of_the_process_between_two_answers_or_since_its_start() -> None:
    before = member("generator-0", busy_s=10, idle_s=0, tokens_generated=1000)
    now = member("generator-0", busy_s=13, idle_s=1, tokens_generated=1800)
    assert per_second(now, before) == {"busy_s": 0.75, "idle_s": 0.25, "tokens_generated": 200.0}
    again = member("generator-0", pid=8, busy_s=2, tokens_generated=50)
    assert per_second(again, before)["tokens_generated"] == 25.0
    assert per_second(member("generator-0"), None) == {}
    assert "200 tokens/s" in shown(reply(now), reply(before))
    assert "129 tokens/s" in shown(reply(now))


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


def test_no_bottleneck_is_guessed_while_a_process_starts_is_silent_or_stalls() -> None:
    starting = member("generator-1", state="starting")
    assert delayed_by(starting, **shares("learner", 1, 9)) == "still starting: generator-1"
    for role in ("generator", "learner"):
        assert delayed_by(**shares(role, 1, 0)) == "", "the other role told no time"
    metrics = shares("learner", 1, 9) | shares("generator", 9, 0)
    silent = shown(reply(member("generator-0", state="silent"), metrics=metrics))
    assert "no heartbeat from: generator-0" in silent
    stalled = shown(reply(metrics=metrics, stalled="no learner step for 70 s"))
    assert "no learner step for 70 s" in stalled
    assert "bottleneck" not in silent + stalled
    assert "bottleneck" in shown(reply(metrics=metrics))


def test_the_flow_counts_groups_failures_restarts_and_sessions() -> None:
    queue = {"issued": 1.0, "generating": 12.0, "ready": 3.0, "leased": 16.0}
    metrics = {f"queue/{state}": number for state, number in queue.items()}
    metrics |= {"failures/over_age": 2.0, "failures/x": 1.0}
    metrics |= {"sessions/open": 9.0, "sessions/calling": 7.0, "reward/failed_share": 1.0}
    because = {"generator-0": "generator-0 was ended by SIGKILL\nmore"}
    facts = {"metrics": metrics, "restarts": {"generator-0": 2}, "restarted_because": because}
    text = shown(reply(member("generator-0"), member("gateway-0"), **facts))
    flow = "prompt → issued 1 → generating 12 → ready 3 → leased 16 → trained in step 3"
    assert f"groups: {flow}   3 failed, 2 of them: over_age" in text
    assert "(restarts: 2; generator-0 was ended by SIGKILL)" in text
    assert "sessions of agents 9  of them waiting for the engine 7" in text
    alarm = "last step: no sample has a reward above reward.fail_reward"
    assert alarm in text
    other = shown(reply(member("generator-0"), metrics={"reward/failed_share": 0.99}))
    assert "sessions" not in other
    assert alarm not in other


def pool(name: str, wanted: int, work: str, draining: int = 0) -> PoolCount:
    facts = {"starting": 0, "live": wanted, "draining": draining}
    return PoolCount(pool=name, wanted=wanted, work=work, **facts)


def test_status_says_which_pool_is_missing_for_what_and_which_processes_leave() -> None:
    def told(plain: int, big: int, judge: int) -> str:
        pools = [pool("generators", plain, "train"), pool("generators.big", big, "train")]
        return shown(reply(pools=[*pools, pool("generators.judge", judge, "evaluation")]))

    assert "continues)" not in told(0, 1, 1)
    assert (
        "generators.judge: 0 wanted, 0 live (evaluations wait; async-rl scale generators.judge=1"
        " continues)" in told(1, 0, 0)
    )
    assert "(async-rl scale generators.big=1 continues); generators.judge: 1" in told(0, 0, 1)
    text = shown(reply(pools=[pool("generators", 0, "both", draining=2)]))
    assert "generators: 0 wanted, 2 draining (async-rl scale generators=1 continues)" in text


@pytest.mark.parametrize("case", table(__file__, "chains"))
def test_the_sentence_of_a_stall_follows_the_chain_from_the_learner_to_the_cause(
    case: dict[str, Any],
) -> None:
    usual = {"since_s": 40.0}
    stalled = [members.member(name, **usual | facts) for name, facts in case["members"].items()]
    told = sentence(stalled, stalled_s=61, now_s=100, unheard_s=case.get("unheard_s", {}))
    assert told == f"no learner step after version 7 for 1 min 1 s: {case['told']}"
