"""Statements about weights: which version reached which generator, by the generator's own answers.

Evidence: versions.jsonl (what was published) and pushes.jsonl (each answer, with the version that
the generator reports and its probe). A probe compares changes, so a generator that keeps old
weights is detected although both versions are within the tolerance.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from async_rl.core import records
from async_rl.core.text import ranges
from async_rl.runs.certificate.statements import Statement, listed, statement
from async_rl.training.checkpoints import (
    PUSHES_FILE,
    VERSIONS_FILE,
    Published,
    Pushed,
)

_SURE = 3.0
"""Standard errors between the share that a generator followed and 1/2: with the new weights it is
1, with the old ones 0.
"""
Version = tuple[int, int]
"""The learner's life, and a version that it published."""


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
