"""From a seed to a world: its sizes and its faults.

KINDS says of which kinds a seed may be; its world stays as it was when it found its fault.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from world import Fault, World

NAMES = ("buffer", "learner-0", "generator-0", "generator-1", "supervisor")
CHILDREN = NAMES[:-1]
LONGEST_S = 40.0  # faults begin before this time of the run


def drawn(seed: int, path: Path, settings: Mapping[str, Any] = {}) -> World:
    """The world of a seed, with these settings too."""
    fields = _core(seed)
    fields["settings"] |= settings
    kinds = next(kinds for first, kinds in KINDS if seed >= first)
    kinds[seed % len(kinds)](fields, random.Random(f"kind {seed}"))
    fields["faults"].sort(key=lambda fault: fault.at_s)
    return World(seed=seed, path=path, **fields)


def _core(seed: int) -> dict[str, Any]:
    """Generators and a learner."""
    rng = random.Random(f"scenario {seed}")
    max_staleness = rng.choice((0, 1, 1, 2, 4))
    settings = {
        "buffer.max_staleness_versions": max_staleness,
        "buffer.groups_per_step": rng.choice((1, 2, 2, 4)),
        "generators.count": rng.choice((1, 2, 2, 3)),
        "generation.max_concurrent_groups": rng.choice((1, 3, 8)),
        "checkpoint.every_steps": rng.choice((1, 2, 3, 5)),
        "checkpoint.keep": rng.choice((1, 2)),
        "evaluation.every_steps": rng.choice((0, 1, 3)),
        # Less often, nothing could be generated within the bound.
        "weights.push_every_steps": rng.choice((1, 1, min(2, max_staleness + 1))),
        "buffer.age_rule": rng.choice(("drop", "drop", "mask")),
        "recording": rng.choice(("off", "full")),
    }
    faults = [_fault(rng) for _ in range(rng.choice((0, 1, 2, 4, 8)))]
    sizes: dict[str, float] = {
        "token_s": rng.choice((0.02, 0.2, 0.5)),
        "verdict_s": rng.choice((0.05, 0.3, 3.0)),
        "step_s": rng.choice((0.1, 0.5, 2.0)),
        "load_s": rng.choice((0.02, 0.1, 1.0)),
        "save_s": rng.choice((0.1, 0.5, 5.0)),
        "commit_s": rng.choice((0.001, 0.02, 0.2)),
        "bad_batches": rng.choice((0.0, 0.0, 0.1, 0.25)),
        "failed_verdicts": rng.choice((0.0, 0.0, 0.1)),
        "broken_loads": rng.choice((0.0, 0.0, 0.05)),
        "repeat": rng.choice((0.0, 0.0, 0.1)),
    }
    if rng.random() < 0.3:
        faults += _scaling(rng)
    # From a generator of its own, so that the worlds of known seeds stay the same.
    clocks = random.Random(f"clocks {seed}")
    if clocks.random() < 0.2:
        jump = (clocks.choice(NAMES), clocks.choice((-7200.0, -5.0, 5.0, 7200.0)))
        faults.append(Fault(clocks.uniform(0.0, LONGEST_S), "jump", jump))
    disk = random.Random(f"disk {seed}")
    has_disk = disk.random() < 0.2
    if has_disk:
        faults += _disk_faults(disk)
    orders = random.Random(f"order {seed}")
    if orders.random() < 0.3:
        settings["data.order"] = orders.choice(("pools", "priority"))
    if max_staleness > 1 and orders.random() < 0.5:
        settings["buffer.uses_per_group"] = orders.choice((2, max_staleness))
    return {"settings": settings, "faults": faults, "has_disk": has_disk, **sizes}


def _disk_faults(rng: random.Random) -> list[Fault]:
    faults = []
    for _ in range(rng.choice((1, 1, 2))):
        at_s = rng.uniform(0.0, rng.choice((2.0, LONGEST_S)))
        if rng.random() < 0.8:
            faults.append(Fault(at_s, "power_loss"))
        else:
            faults.append(Fault(at_s, "full_disk", (rng.choice((1.0, 30.0)),)))
    return faults


def _fault(rng: random.Random) -> Fault:
    at_s = rng.uniform(0.0, LONGEST_S)
    kind = rng.choice(
        ("kill", "kill", "kill", "stop", "stop", "cut", "slow", "slow_disk", "lose_all")
    )
    arguments: tuple[Any, ...] = ()
    match kind:
        case "kill":
            arguments = (rng.choice(CHILDREN),)
        case "stop":
            arguments = (rng.choice(CHILDREN), rng.choice((0.5, 5.0, 20.0, 60.0)))
        case "cut":
            one, other = rng.sample(NAMES, 2)
            arguments = (one, other, rng.choice((0.5, 5.0, 25.0, 60.0)))
        case "slow":
            arguments = (rng.choice(NAMES), rng.choice((0.05, 1.0)), rng.choice((5.0, 30.0)))
        case "slow_disk":
            arguments = (rng.choice((0.5, 5.0)), rng.choice((5.0, 30.0)))
    return Fault(at_s, kind, arguments)


def _scaling(rng: random.Random) -> list[Fault]:
    """A person who scales the run now and then, at last to what it needs."""
    times_s = sorted(rng.uniform(0.0, LONGEST_S) for _ in range(rng.choice((1, 2, 4))))
    counts = [rng.choice((0, 1, 2, 4)) for _ in times_s]
    last = {"generators": 1, "verifiers": 1}
    wanted = [{"generators": count, "verifiers": rng.choice((1, 2))} for count in counts]
    scaled = zip([*times_s, LONGEST_S + 1], [*wanted, last], strict=True)
    return [Fault(at_s, "scale", kinds=kinds) for at_s, kinds in scaled]


def _replaced(fields: dict[str, Any], rng: random.Random) -> None:
    """Processes that are replaced while they run on, behind a broken network."""
    # Long enough for the supervisor to find the silence, and for the old process to come back.
    fields["settings"] |= {"num_steps": rng.choice((20, 60)), "weights.push_every_steps": 1}
    fields["step_s"] = rng.choice((0.5, 2.0))
    # The cause of a failed run would not reach the supervisor.
    fields["bad_batches"] = 0.0
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(("learner-0", "learner-0", "generator-0"))
        seconds = rng.choice((10.0, 30.0, 55.0, 100.0))
        buffer_s = rng.choice((0.0, 0.0, 5.0, 25.0))
        fields["faults"].append(Fault(rng.uniform(2.0, 20.0), "isolate", (name, seconds, buffer_s)))


def _plain(fields: dict[str, Any], rng: random.Random) -> None:
    """Nothing more."""


def _agents(fields: dict[str, Any], rng: random.Random) -> None:
    """Groups of scripted agents, over one or two gateways that die, stand still or are cut off."""
    fields["settings"] |= {
        "rollout.fn": ["agent"],
        "data.max_response_tokens": rng.choice((60, 200)),
        "timeouts.group_s": rng.choice((30.0, 120.0)),
    }
    fields["token_s"] = rng.choice((0.02, 0.1))
    fields["agent_s"] = rng.choice((0.01, 0.5, 3.0))
    fields["dying_agents"] = rng.choice((0.0, 0.0, 0.05))
    faults = fields["faults"]
    names = ("gateway-0", "gateway-0", "gateway-1")
    for _ in range(rng.choice((0, 1, 2, 4))):
        at_s, name = rng.uniform(0.0, LONGEST_S), rng.choice(names)
        other = rng.choice(("buffer", "generator-0", "generator-1", "supervisor"))
        seconds = rng.choice((0.5, 5.0, 20.0, 60.0))
        faults += rng.choice(
            (
                [Fault(at_s, "kill", (name,))],
                [Fault(at_s, "stop", (name, seconds))],
                [Fault(at_s, "cut", rng.choice(((name, other, seconds), (other, name, seconds))))],
                [Fault(at_s, "scale", kinds={"gateways": rng.choice((1, 2))})],
            )
        )


def _lost_gateways(fields: dict[str, Any], rng: random.Random) -> None:
    """Agents with long scripts, whose gateways are killed again and again."""
    _agents(fields, rng)
    fields["settings"] |= {"data.max_response_tokens": 200, "timeouts.group_s": 120.0}
    fields |= {"agents_die_late": True, "dying_agents": rng.choice((0.0, 0.1, 0.3))}
    scale = Fault(1.0, "scale", kinds={"gateways": rng.choice((1, 2, 2))})
    fields["faults"] = [scale, *_kills(rng, ("gateway-0", "gateway-1"), (2, 4, 8))]


def _external(fields: dict[str, Any], rng: random.Random) -> None:
    """Programs outside the run, whose gateways and generators are killed."""
    _lost_gateways(fields, rng)
    fields["settings"] |= {"rollout.fn": "external"}
    fields |= {"dying_agents": 0.0, "num_programs": 8, "agent_s": rng.choice((0.01, 0.5))}
    names = ("gateway-0", "gateway-0", "generator-0", "buffer", "learner-0")
    fields["faults"] = _kills(rng, names, (1, 2, 4))


def _kills(rng: random.Random, names: Sequence[str], counts: Sequence[int]) -> list[Fault]:
    return [
        Fault(rng.uniform(3.0, LONGEST_S), "kill", (rng.choice(names),))
        for _ in range(rng.choice(counts))
    ]


def _scaled(fields: dict[str, Any], rng: random.Random) -> None:
    """A person who scales a long run, and nothing else; now and then everything is lost."""
    fields["settings"] |= {"num_steps": 40}
    fields |= {"bad_batches": 0.0, "failed_verdicts": 0.0, "broken_loads": 0.0}
    fields["faults"] = _scaling(rng)[:-1]
    if rng.random() < 0.3:
        fields["faults"].append(Fault(rng.uniform(0.0, LONGEST_S), "lose_all"))
    wanted = {"generators": rng.choice((1, 2, 3)), "verifiers": 1}
    fields["faults"].append(Fault(LONGEST_S + 1, "scale", kinds=wanted))


def _restarts(fields: dict[str, Any], rng: random.Random) -> None:
    """Buffer, learner and everything are killed, also soon after each other."""
    fields["faults"] = []
    for _ in range(rng.choice((1, 2, 4))):
        at_s = rng.uniform(1.0, LONGEST_S)
        name = rng.choice(("buffer", "buffer", "learner-0", ""))
        fault = Fault(at_s, "kill", (name,)) if name else Fault(at_s, "lose_all")
        fields["faults"].append(fault)
        if rng.random() < 0.3:
            other = rng.choice(("buffer", "learner-0"))
            fields["faults"].append(Fault(at_s + rng.uniform(0.0, 3.0), "kill", (other,)))
    if rng.random() < 0.2:
        fields["faults"].append(Fault(rng.uniform(10.0, LONGEST_S), "damage_checkpoint"))


def _struck(fields: dict[str, Any], rng: random.Random) -> None:
    """Faults at the moment of a message of a drawn kind."""
    fields["settings"] |= {"evaluation.every_steps": 1, "timeouts.group_s": 30.0}
    fields |= {"bad_batches": rng.choice((0.0, 0.0, 0.1)), "broken_loads": 0.0, "has_disk": True}
    fields["faults"] = []
    for _ in range(rng.choice((1, 2, 3))):
        message, moment = rng.choice(MESSAGES), rng.choice(MOMENTS)
        at_s, number = rng.uniform(0.0, 20.0), rng.choice((1, 1, 2, 5))
        end = rng.choice(("client", "server"))
        fault: tuple[Any, ...] = rng.choice(
            (
                ("kill", end),
                ("kill", end),
                ("stop", end, rng.choice((1.0, 20.0))),
                ("cut", end, rng.choice((5.0, 40.0))),
                ("isolate", "client", rng.choice((10.0, 55.0))),
                ("lose_all", ""),
                ("power_loss", ""),
            )
        )
        arguments = (message, moment, number, *fault)
        fields["faults"].append(Fault(at_s, "at_message", arguments))


def _slow_generators(fields: dict[str, Any], rng: random.Random) -> None:
    """The learner waits for groups, whose attempts fail and whose generators have old weights."""
    most = rng.choice((1, 2))
    fields["settings"] |= {
        "num_steps": 30,
        "generators.count": 3,
        "buffer.max_staleness_versions": most,
        "buffer.uses_per_group": min(most, fields["settings"].get("buffer.uses_per_group", 1)),
        "generation.max_concurrent_groups": rng.choice((1, 3)),
        "timeouts.group_s": 30.0,
    }
    fields |= {
        "step_s": 0.1,
        "load_s": rng.choice((0.1, 1.0, 3.0)),
        "failed_verdicts": rng.choice((0.1, 0.3)),
        "bad_batches": 0.0,
        "broken_loads": 0.0,
        "faults": [],
    }
    if rng.random() < 0.5:
        seconds = rng.choice((10.0, 30.0))
        fields["faults"].append(Fault(rng.uniform(2.0, 20.0), "isolate", ("learner-0", seconds)))


def _late_lists(fields: dict[str, Any], rng: random.Random) -> None:
    """Processes come and go while one of the others hears of it late."""
    fields["settings"] |= {"num_steps": 150, "timeouts.group_s": 30.0}
    fields |= {"bad_batches": 0.0, "failed_verdicts": 0.0, "broken_loads": 0.0, "repeat": 0.0}
    fields["faults"] = []
    # Two requests of one moment may arrive in either order.
    for at_s in (rng.uniform(first_s, first_s + 8.0) for first_s in (5.0, 15.0, 25.0)):
        wanted = {"generators": rng.choice((1, 2, 3)), "verifiers": rng.choice((1, 2))}
        fields["faults"].append(Fault(at_s, "scale", kinds=wanted))
        hears_late = rng.choice(("buffer", "buffer", "learner-0"))
        cut = Fault(at_s - 0.5, "cut", ("supervisor", hears_late, 5.0))
        fields["faults"].append(cut)
    if rng.random() < 0.3:
        fields["faults"].append(Fault(LONGEST_S + 1, "lose_all"))


KINDS = (
    (
        60_000,
        (
            *(_struck, _late_lists, _struck, _slow_generators, _struck),
            *(_replaced, _lost_gateways, _scaled, _restarts, _external),
        ),
    ),
    (50_000, (_plain, _replaced, _lost_gateways, _scaled, _restarts)),
    (3000, (_plain, _replaced, _agents, _plain, _plain)),
    (0, (_plain,)),
)
"""From each first seed on, the kinds by the remainder of the seed."""
MOMENTS = ("sent", "arrived", "answered", "returned")
MESSAGES = (
    *("RequestWork", "PutGroup", "FailGroup", "GetHistory", "SyncVersion", "StartFrom"),
    *("TakeBatch", "CommitStep", "DropBatch", "SecureStore", "StartEvaluation", "ForgetBefore"),
    *("GetEvaluationScores", "LoadWeights", "Register", "WatchMembers", "Heartbeat"),
    *("ReportMetrics", "ReportMetrics"),
)
