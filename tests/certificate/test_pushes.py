"""What the records of pushes say about generators that missed one or kept other weights."""

from pathlib import Path

from async_rl.core import records
from async_rl.runs.certificate.handed_out import weights
from async_rl.runs.certificate.statements import Verdict
from async_rl.training.checkpoints import PUSHES_FILE, VERSIONS_FILE, Probed, Published, Pushed


def pushed(version: int, *, life: int = 1, name: str = "a", **kinds: object) -> Pushed:
    values = {"loaded": version, **kinds}
    return Pushed(version=version, life=life, generator=name, pid=7, at_s=0.0, **values)  # type: ignore[arg-type]


def probe(version: int, followed: float | None, error: float | None, problem: str = "") -> Probed:
    return Probed(
        version=version, worst=2e-5, mean=1e-5, followed=followed, error=error, problem=problem
    )


def said(path: Path, versions: list[tuple[int, int]], answers: list[Pushed]) -> dict[str, str]:
    """Both statements, as verdict and evidence."""
    path.mkdir(exist_ok=True)
    rows = [Published(version=version, checksum=1, life=life) for life, version in versions]
    for name in (VERSIONS_FILE, PUSHES_FILE):
        (path / name).unlink(missing_ok=True)
    records.append(path / VERSIONS_FILE, rows)
    records.append(path / PUSHES_FILE, answers)
    reached, computed = weights(path)
    return {
        key: f"{each.verdict}: " + "\n".join(each.evidence)
        for key, each in (("reached", reached), ("computed", computed))
    }


def test_each_absence_has_its_reason(tmp_path: Path) -> None:
    versions = [(1, 0), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
    answers = [
        pushed(0),
        # Version 1 was superseded while the generator loaded version 0.
        pushed(2),
        # The learner was killed before the answer to version 3; its successor started from 2.
        pushed(2, life=2),
        pushed(3, life=2, loaded=None, reason="WeightsError: broken\nTraceback"),
    ]
    text = said(tmp_path, versions, answers)["reached"]
    assert text.startswith(
        "holds: 6 versions of 2 lives of the learner, 1 lives of generators: 3 loads"
    )
    assert "version 1 at a (pid 7): never asked" in text
    assert "version 3 at a (pid 7): no answer before life 1 of the learner ended" in text
    assert "version 3 at a (pid 7): cut off (WeightsError: broken)" in text
    assert "3 absences" in text


def test_a_generator_that_reports_another_version_breaks_the_promise(tmp_path: Path) -> None:
    text = said(tmp_path, [(1, 0), (1, 1)], [pushed(0), pushed(1, loaded=0)])["reached"]
    assert text.startswith("broken: a (pid 7) was sent version 1 and reported version 0")


def test_old_weights_are_told_from_rounding(tmp_path: Path) -> None:
    versions = [(1, version) for version in range(4)]

    def computed(*shares: tuple[float, float]) -> str:
        probes = [probe(0, None, None), *(probe(n + 1, *each) for n, each in enumerate(shares))]
        answers = [pushed(each.version, probed=each) for each in probes]
        return said(tmp_path, versions, answers)["computed"]

    assert computed((1.0, 0.01), (0.98, 0.02)).startswith("holds: 3 probes")
    assert computed((1.0, 0.01), (0.02, 0.02)).startswith(
        "broken: a (pid 7) reported version 2 and kept its old weights"
    )
    # Each share is within three of its errors of one half, so it is no evidence.
    assert computed((0.1, 0.4), (1.3, 0.5)).startswith(
        "cannot be known: a (pid 7): the log-probs changed less than their rounding"
    )


def test_a_probe_beyond_the_tolerance_is_broken(tmp_path: Path) -> None:
    bad = probe(0, None, None, "a and the learner disagree by 9 nats")
    text = said(tmp_path, [(1, 0)], [pushed(0, probed=bad)])["computed"]
    assert text.startswith("broken: a (pid 7): a and the learner disagree by 9 nats")


def test_without_records_nothing_is_known(tmp_path: Path) -> None:
    for statement in weights(tmp_path):
        assert statement.verdict is Verdict.UNKNOWN
    # A power loss took the versions and left the answers.
    text = said(tmp_path / "lost", [], [pushed(0)])
    assert text["reached"].startswith("holds: 0 versions of 0 lives of the learner")
