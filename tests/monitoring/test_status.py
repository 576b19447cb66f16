"""The output of `async-rl status` below the table: rates, the bottleneck, the flow, the rewards."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from async_rl.composition.schema import settings
from async_rl.core.types import Role
from async_rl.monitoring.bottleneck import advice, bottleneck
from async_rl.monitoring.rates import per_second
from async_rl.monitoring.status import render, sparkline
from async_rl.protocol.control import StatusReply
from async_rl.protocol.membership import Member, PoolCount


def member(
    name: str, role: Role, *, pid: int = 7, state: str = "working", **counters: float
) -> Member:
    return Member(
        name=name,
        role=role,
        pid=pid,
        address="",
        state=state,
        waits_for="",
        since_s=0.0,
        version=1,
        counters=counters,
    )


def learner(busy_s: float, wait_s: float) -> Member:
    return member("learner-0", "learner", busy_s=busy_s, wait_s=wait_s)


def generator(busy_s: float, wait_s: float, blocked_s: float) -> Member:
    return member("generator-0", "generator", busy_s=busy_s, wait_s=wait_s, blocked_s=blocked_s)


def reply(members: list[Member], **metrics: float) -> StatusReply:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StatusReply(
        run_name="r",
        run_dir="/r",
        step=3,
        num_steps=9,
        started_s=0,
        tensorboard_url="",
        members=members,
        metrics=named,
    )


def shown(
    answer: StatusReply, before: StatusReply | None = None, rewards: tuple[float, ...] = ()
) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render(answer, now_s=60.0, before=before, rewards=rewards))
    return out.getvalue()


def test_a_rate_is_per_second_of_the_process_between_the_two_moments() -> None:
    before = member("g", "generator", busy_s=10, idle_s=0, tokens_generated=1000)
    now = member("g", "generator", busy_s=13, idle_s=1, tokens_generated=1800)
    assert per_second(now, before) == {"busy_s": 0.75, "idle_s": 0.25, "tokens_generated": 200.0}


def test_a_process_that_was_started_again_is_measured_from_its_start() -> None:
    before = member("g", "generator", pid=6, busy_s=100, tokens_generated=9000)
    assert (
        per_second(member("g", "generator", pid=7, busy_s=2, tokens_generated=50), before)[
            "tokens_generated"
        ]
        == 25.0
    )


def test_nothing_is_said_of_a_process_that_told_no_time() -> None:
    assert per_second(member("g", "generator"), None) == {}
    assert bottleneck([member("learner-0", "learner"), generator(1, 0, 0)]) == ""


@pytest.mark.parametrize(
    ("learner_s", "generator_s", "named"),
    [
        (
            (9, 1),
            (4, 0, 6),
            "the learner: at work 90% of the time, generators held back by admission 60%",
        ),
        (
            (2, 8),
            (10, 0, 0),
            "generation: the learner waits 80% of the time, generators write 100%",
        ),
        (
            (4, 6),
            (3, 0, 7),
            "admission: the learner waits 60% of the time, generators are held back 70%",
        ),
        (
            (4, 6),
            (3, 7, 0),
            (
                "scoring: the learner waits 60% of the time, generators wait for verdicts alone"
                " for 70%"
            ),
        ),
    ],
)
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
    return member("gateway-0", "gateway", **counters, **gauges)


@pytest.mark.parametrize(
    ("shares", "sessions", "named"),
    [
        ((10, 0, 0), (20, 2), "agents: the learner waits 80% of the time, sessions wait 90%"),
        ((10, 0, 0), (20, 18), "generation: the learner waits 80% of the time, generators write"),
        ((2, 0, 8), (20, 2), "admission: the learner waits 80%"),
        ((2, 8, 0), (20, 2), "scoring: the learner waits 80%"),
        ((10, 0, 0), (0, 0), "generation: the learner waits 80%"),
    ],
)
def test_sessions_that_wait_for_their_agents_hold_a_run_up_and_not_the_engine(
    shares: tuple[int, int, int], sessions: tuple[int, int], named: str
) -> None:
    # One of many sessions at a time is enough to keep a generator at work.
    members = [learner(2, 8), generator(10, 0, 0), gateway(shares, *sessions)]
    sentence = bottleneck(members)
    assert sentence.startswith(named)
    told = advice(members, sentence=sentence)
    assert ("more would balance" in told) is sentence.startswith("generation")


def test_the_sessions_of_both_moments_and_of_all_gateways_count() -> None:
    first, second = gateway((10, 0, 0), 8, 0), gateway((20, 0, 0), 8, 8)
    other = msgspec.structs.replace(second, name="gateway-1")
    before = [learner(0, 10), generator(10, 0, 0), first]
    members = [learner(0, 20), generator(20, 0, 0), second]
    assert bottleneck([*members, other], before).startswith("generation")
    both = [*before, msgspec.structs.replace(first, name="gateway-1")]
    now = msgspec.structs.replace(second, counters={**second.counters, "gauge/sessions/calling": 6})
    assert bottleneck([learner(0, 20), now], both).startswith("agents")


def test_while_a_process_starts_no_bottleneck_is_guessed() -> None:
    assert (
        bottleneck([learner(1, 9), member("generator-1", "generator", state="starting")])
        == "still starting: generator-1"
    )


def test_a_silent_process_is_named_before_any_bottleneck() -> None:
    text = shown(
        reply([learner(1, 9), member("generator-0", "generator", state="silent", busy_s=9)])
    )
    assert "no heartbeat from: generator-0" in text
    assert "bottleneck" not in text


@pytest.mark.parametrize(
    ("learner_s", "generator_s"),
    [((9, 1), (1, 0, 0)), ((1, 9), (9, 0, 0)), ((1, 9), (0, 0, 9)), ((1, 9), (0, 9, 0))],
)
def test_every_relief_names_settings_that_exist(
    learner_s: tuple[int, int], generator_s: tuple[int, int, int]
) -> None:
    words = (
        bottleneck([learner(*learner_s), generator(*generator_s)])
        .replace("(", " ")
        .replace(")", " ")
        .replace(",", " ")
        .split()
    )
    named = [word for word in words if "." in word]
    assert named
    assert set(named) <= set(settings())


def test_the_relief_for_slow_agents_names_a_setting_that_exists() -> None:
    sentence = bottleneck([learner(1, 9), generator(9, 0, 0), gateway((9, 0, 0), 9, 1)])
    assert "(generation.max_concurrent_groups)" in sentence
    assert "generation.max_concurrent_groups" in settings()


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
    before = reply([member("generator-0", "generator", busy_s=10, tokens_generated=1000)])
    now = reply([member("generator-0", "generator", busy_s=12, tokens_generated=6000)])
    assert "2,500 tokens/s" in shown(now, before)
    assert "500 tokens/s" in shown(now)


def test_a_stalled_run_says_why_instead_of_a_bottleneck() -> None:
    stalled = msgspec.structs.replace(
        reply([learner(9, 1), generator(1, 0, 0)]), stalled="no learner step for 70 s"
    )
    assert "no learner step for 70 s" in shown(stalled)
    assert "bottleneck" not in shown(stalled)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_bar() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.25, 0.25]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)])) == 60
    assert "reward ▁█ 0.20 to 0.80" in shown(reply([]), rewards=(0.2, 0.8))


def test_a_run_in_balance_keeps_the_name_of_its_bottleneck() -> None:
    """Half the learner's time each way: what was named stays until something else is worse by a
    tenth.
    """
    a_little_work, a_little_wait = (
        [learner(52, 48), generator(60, 0, 40)],
        [learner(48, 52), generator(60, 0, 40)],
    )
    assert bottleneck(a_little_wait).startswith("generation")
    assert bottleneck(a_little_wait, last="the learner: at work").startswith("the learner")
    assert bottleneck(a_little_work, last="generation: the learner waits").startswith("generation")
    assert bottleneck(
        [learner(40, 60), generator(60, 0, 40)], last="the learner: at work"
    ).startswith("generation")
    assert bottleneck(
        [learner(20, 80), generator(45, 0, 50)], last="generation: the learner waits"
    ).startswith("generation")


def test_status_advises_how_many_generators_would_balance() -> None:
    assert (
        advice([learner(66, 34), generator(100, 0, 0)])
        == "learner waits 34% of the time: about 0.5 generators more would balance"
    )
    second = member("generator-1", "generator", busy_s=25, wait_s=0, blocked_s=75)
    held = [learner(100, 0), generator(25, 0, 75), second]
    assert (
        advice(held)
        == "generators are held back 75% of the time: about 1.5 generators fewer would balance"
    )


def test_no_advice_is_given_in_balance_or_while_verdicts_are_what_is_missing() -> None:
    assert advice([learner(95, 5), generator(95, 0, 5)]) == ""
    assert advice([learner(50, 50), generator(20, 80, 0)]) == ""
    assert (
        advice(
            [
                learner(50, 50),
                generator(100, 0, 0),
                member("generator-1", "generator", state="draining"),
            ]
        )
        == ""
    )


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


def test_generators_that_only_evaluate_are_no_bottleneck_and_the_advice_names_training_pools() -> (
    None
):
    resting = member("generator-judge-0", "generator", busy_s=0.0, wait_s=100.0, blocked_s=0.0)
    members = [learner(40, 60), generator(100, 0, 0), resting]
    pools = [
        pool("generators", 1, "train"),
        pool("generators.big", 0, "train"),
        pool("generators.judge", 1, "evaluation"),
    ]
    text = shown(msgspec.structs.replace(reply(members), pools=pools))
    assert "generators write 100%" in text
    assert "about 1.5 generators more would balance (generators or generators.big)" in text


def test_status_shows_each_pool_and_what_brings_generators_back() -> None:
    counts = {"verifiers": (1, 0, 1, 0), "generators": (0, 0, 0, 2)}
    pools = [
        PoolCount(
            pool=p,
            wanted=w,
            starting=s,
            live=n,
            draining=d,
            work="both" if p == "generators" else "",
        )
        for p, (w, s, n, d) in counts.items()
    ]
    text = shown(msgspec.structs.replace(reply([]), pools=pools))
    assert (
        "verifiers: 1 wanted, 1 live; generators: 0 wanted, 2 draining (async-rl scale generators=1"
        " continues)" in text
    )


def test_the_advice_does_not_contradict_the_bottleneck() -> None:
    # The learner works more than it waits, but one side waits so much that numbers would balance.
    members = [learner(66, 34), generator(100, 0, 0)]
    sentence = bottleneck(members)
    assert sentence.startswith("the learner")
    assert "more generators do not" in sentence
    assert advice(members, sentence=sentence) == ""
    assert advice(members, sentence="generation: the learner waits") != ""


def test_the_sessions_of_agents_are_shown_by_what_they_wait_for() -> None:
    gauges = {"gauge/sessions/open": 9.0, "gauge/sessions/calling": 7.0}
    assert "sessions: 9 open, 7 wait for the engine, 2 for their agents" in shown(
        reply([member("gateway-0", "gateway", **gauges)])
    )
    assert "sessions" not in shown(reply([member("generator-0", "generator")]))


def test_several_environments_are_shown_over_all_gateways() -> None:
    counts = {"open": 3.0, "calling": 1.0, "open_in/guess": 2.0, "calling_in/guess": 1.0}
    one = {f"gauge/sessions/{n}": v for n, v in {**counts, "open_in/maze": 1.0}.items()}
    text = shown(reply([member(f"gateway-{i}", "gateway", **one) for i in range(2)]))
    assert "sessions: 6 open, 2 wait for the engine, 4 for their agents" in text
    assert "sessions/guess: 4 open, 2 wait for the engine, 2 for their agents" in text
    assert "sessions/maze: 2 open, 0 wait for the engine, 2 for their agents" in text
    alone = {f"gauge/sessions/{n}": v for n, v in counts.items()}
    assert "sessions/guess" not in shown(reply([member("gateway-0", "gateway", **alone)]))
