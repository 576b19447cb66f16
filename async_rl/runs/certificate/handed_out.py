"""Statements about what was handed out. Prompts: each position of the data order was issued once,
for its prompt, and has an end. Calls of agents: each answer that the policy gave is trained, or
left out for a reason. Weights: each version reached each generator, by the generator's own answers.

Evidence of prompts: the ledger and, for the order itself, the run's prompts.sqlite. A gap is a
position that no group has although later ones were issued; the start before it shows when it was
skipped. Of calls: a session counts its answers apart from its record, of which the row of tokens
and the trained calls are made. Of weights: versions.jsonl (what was published) and pushes.jsonl
(each answer, with the version that the generator reports and its probe). A probe compares changes,
so a generator that keeps old weights is detected although both versions are within the tolerance.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.buffer.store.connection import Connection
from async_rl.config.run import RunConfig
from async_rl.core import records
from async_rl.core.text import ranges
from async_rl.core.types import Purpose
from async_rl.data.prompt_file import PROMPTS_FILE, RunPrompts
from async_rl.monitoring.events import Event
from async_rl.runs.certificate.statements import Statement, at, listed, statement
from async_rl.runs.samples import issued_prompts
from async_rl.training.checkpoints import (
    PUSHES_FILE,
    VERSIONS_FILE,
    Published,
    Pushed,
)

# Each position that does not follow its predecessor, which is itself if it was issued twice.
_MISSING = (
    "SELECT previous, position, admitted_s FROM (SELECT position, admitted_s, lag(position, 1,"
    " (SELECT coalesce(max(last_position), -1) FROM compacted)) OVER (ORDER BY position) AS"
    " previous FROM groups WHERE purpose='train') WHERE position > previous + 1 OR position ="
    " previous"
)
_ISSUED = "SELECT position, prompt_id FROM groups WHERE purpose='train' ORDER BY position"
_ENDS = (
    "SELECT state, iif(state='dropped', reason, ''), sum(number) FROM counts WHERE purpose='train'"
    " GROUP BY 1, 2 ORDER BY 3 DESC"
)
_COMPACTED = "SELECT sum(number) FROM compacted_groups WHERE purpose='train' HAVING sum(number) > 0"
_NEVER_TRAINED = (
    "SELECT prompt_id FROM groups WHERE purpose='train' GROUP BY prompt_id HAVING min(state) ="
    " 'dropped' AND max(state) = 'dropped'"
)
CALLS = (
    "SELECT group_id, state, reason, num_trained_tokens, calls AS 'calls [stored_json]' FROM groups"
    " WHERE purpose='train' AND calls != '[]'"
)
"""The groups of agents that were complete."""
_SURE = 3.0
"""Standard errors between the share that a generator followed and 1/2: with the new weights it is
1, with the old ones 0.
"""
Version = tuple[int, int]
"""The learner's life, and a version that it published."""


def prompts(
    run_dir: Path, config: RunConfig, store: Connection, starts: Sequence[Event]
) -> Iterator[Statement]:
    """Yield the statements about the order and the ends of prompts."""
    order = issued_prompts(run_dir, config, store)
    issued = store.execute(_ISSUED).fetchall()
    yield statement(
        "prompts",
        "each position of the data order was issued exactly once",
        broken=[_gap(row, order, starts) for row in store.execute(_MISSING)],
        unknown=[
            f"of {number} compacted groups only the number is known"
            for (number,) in store.execute(_COMPACTED)
        ],
        evidence=[f"{len(issued)} positions were checked"],
    )
    wrong = [
        f"position {position} was issued for {prompt_id}, not for {expected}"
        for position, prompt_id in issued
        if order and prompt_id != (expected := order.prompt(Purpose.TRAIN, position).prompt_id)
    ]
    yield statement(
        "prompts",
        "each position was issued for the prompt of data.order",
        broken=wrong,
        unknown=[] if order else [f"the run has no {PROMPTS_FILE}"],
        evidence=[f"{len(issued)} positions were compared with the order"] if order else (),
    )
    yield _ends(store)


def _gap(row: tuple[int, int, float], order: RunPrompts | None, starts: Sequence[Event]) -> str:
    previous, position, admitted_s = row
    skipped = range(previous + 1, position)
    if not skipped:
        return f"position {position} was issued twice"
    ids = [order.prompt(Purpose.TRAIN, each).prompt_id for each in skipped[:5]] if order else []
    before = [at(start.at_s) for start in starts if start.at_s <= admitted_s]
    return (
        f"position {ranges(skipped)} ({', '.join(ids)}) was skipped after the start of"
        f" {before[-1] if before else 'an unknown time'}"
    )


def _ends(store: Connection) -> Statement:
    counts = store.execute(_ENDS).fetchall()
    total = sum(number for *_, number in counts)
    lost = [prompt_id for (prompt_id,) in store.execute(_NEVER_TRAINED)]
    (num_left,) = store.execute("SELECT count(*) FROM left_prompts").fetchone()
    return statement(
        "prompts",
        "each issued prompt was trained, was dropped for a reason, or is open",
        broken=[
            f"{number} groups were dropped without a reason"
            for state, reason, number in counts
            if state == "dropped" and not reason
        ],
        evidence=[
            *(f"{s} {why}".strip() + f": {n} of {total} ({n / total:.1%})" for s, why, n in counts),
            f"{num_left} prompts left the data (data.filter); {len(lost)} were issued and always"
            f" dropped {listed(lost) or ''}",
        ],
    )


def agent_calls(groups: Iterable[tuple[int, str, str, int, list[Any]]]) -> Statement:
    """Return the statement. groups: as CALLS selects them."""
    broken = []
    num_unknown = 0
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    for group_id, state, reason, num_trained, samples in groups:
        # Groups of earlier versions have no numbers.
        if not all(call["of"] for calls in samples for call in calls) or not all(samples):
            num_unknown += 1
            continue
        place = f"group {group_id}"
        num_tokens = 0
        for number, calls in enumerate(samples):
            missing = {at: "" for at in range(1, calls[0]["of"] + 1)}
            for call in calls:
                del missing[call["number"]]
                why = call["left_out"]
                if call["end_tokens"]:
                    num_tokens += call["num_tokens"]
                    why = "" if state == "trained" else reason or "open"
                elif not why:
                    missing[call["number"]] = f" (role {call['role']!r})"
                    why = "lost"
                ends[call["role"]][why] += 1
            broken += [
                f"{place}, sample {number}: call {at} of {calls[0]['of']}{role} is neither trained"
                " nor left out"
                for at, role in sorted(missing.items())
            ]
        if num_tokens != num_trained:
            broken.append(
                f"{place}: {num_trained} tokens are trained, of which its calls wrote {num_tokens}"
            )
    evidence = []
    for role, found in sorted(ends.items()):
        trained = found.pop("", 0)
        left = ", ".join(f"{why}: {number}" for why, number in sorted(found.items()))
        total = found.total()
        evidence.append(
            f"role {role!r}: {total + trained} served, {trained} trained, {total} left out ({left})"
        )
    return statement(
        "calls",
        "each answer to an agent is trained, or left out for a reason",
        broken=broken,
        unknown=[f"{num_unknown} groups have no numbers of calls"] if num_unknown else (),
        evidence=evidence,
    )


def weights(run_dir: Path) -> Iterator[Statement]:
    """Yield the statements about pushes."""
    published = {
        (each.life, each.version): number
        for number, each in enumerate(records.read(run_dir / VERSIONS_FILE, Published))
    }
    lives: dict[str, list[Pushed]] = defaultdict(list)
    for push in records.read(run_dir / PUSHES_FILE, Pushed):
        lives[f"{push.generator} (pid {push.pid})"].append(push)
    yield _reached(published, lives)
    yield _computed(lives)


def _reached(published: Mapping[Version, int], lives: Mapping[str, list[Pushed]]) -> Statement:
    answers = [(life, push) for life, pushes in lives.items() for push in pushes]
    absences = [text for life, pushes in lives.items() for text in _absent(published, life, pushes)]
    num_loads = sum(push.loaded is not None for _, push in answers)
    return statement(
        "weights",
        "every push reached every generator, or its absence is listed",
        broken=[
            f"{life} was sent version {push.version} and reported version {push.loaded}"
            for life, push in answers
            if push.loaded not in (None, push.version)
        ],
        unknown=[] if lives else ["the run has no record of pushes"],
        evidence=[
            f"{len(published)} versions of {len({life for life, _ in published})} lives of the"
            f" learner, {len(lives)} lives of generators: {num_loads} loads, each reported by the"
            f" generator; {len(absences)} absences",
            *listed(absences),
        ],
    )


def _absent(published: Mapping[Version, int], life: str, pushes: list[Pushed]) -> Iterator[str]:
    """Yield a sentence for each version that a life did not load while it served."""
    asked = {(push.life, push.version) for push in pushes}
    for push in pushes:
        if push.loaded is None:
            # An engine may report a traceback.
            yield f"version {push.version} at {life}: cut off ({push.reason.splitlines()[0]})"
    # A power loss may have taken lines of one file only.
    numbers = [published[each] for each in asked if each in published] or [0]
    # The newest version of each life of the learner: a later pair replaces an earlier one.
    ends = dict(published.keys())
    for (learner, version), number in published.items():
        if min(numbers) < number < max(numbers) and (learner, version) not in asked:
            reason = "never asked, because a newer version was published before its turn"
            if ends[learner] == version:
                reason = f"no answer before life {learner} of the learner ended"
            yield f"version {version} at {life}: {reason}"


def _computed(lives: Mapping[str, list[Pushed]]) -> Statement:
    broken: list[str] = []
    unknown: list[str] = []
    means: list[float] = []
    shares: list[float] = []
    num_unprobed = 0
    for life, pushes in lives.items():
        loads = [push for push in pushes if push.loaded is not None]
        probes = [push.probed for push in loads if push.probed is not None]
        num_unprobed += len(loads) - len(probes)
        broken += [f"{life}: {probe.problem}" for probe in probes if probe.problem]
        means += [probe.mean for probe in probes if probe.mean is not None]
        compared = [
            (probe.version, probe.followed, probe.error or 0.0)
            for probe in probes
            if probe.followed is not None
        ]
        # Nearer to the new weights (1) or to the old ones (0) by more than their error.
        sure = [
            (version, followed)
            for version, followed, error in compared
            if abs(followed - 0.5) > _SURE * error
        ]
        shares += [followed for _, followed in sure]
        old = [version for version, followed in sure if followed < 0.5]
        if old:
            broken.append(
                f"{life} reported version {ranges(old)} and kept its old weights: its log-probs did"
                " not follow the learner's"
            )
        if compared and not sure:
            unknown.append(f"{life}: the log-probs changed less than their rounding")
    if not means:
        unknown.append("no load was probed")
    evidence = [
        f"{len(means)} probes: the log-probs differ from the learner's by"
        f" {max(means, default=0.0):.2g} nats on average in the worst one; {num_unprobed} loads"
        " were not probed, and of these only the reported version is known",
        f"{len(shares)} probes decide between the old weights (0) and the new ones (1): the"
        f" generators followed {min(shares, default=1.0):.3f} to {max(shares, default=1.0):.3f} of"
        " the change of the learner; others are the first of a life, show no change, or are too"
        " coarse",
    ]
    return statement(
        "weights",
        "each generator computes with the weights that it was sent",
        broken=broken,
        unknown=unknown,
        evidence=evidence,
    )
