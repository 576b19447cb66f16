"""Every setting of the objective and the learner has a test that fails if the product ignores it,
and every knob of the two source systems has a test that shows it.
"""

from pathlib import Path

import pytest
import yaml
from proofs import marked, proofs_of

from async_rl.composition.schema import settings

PROVED_SECTIONS = ("algorithm.", "learner.")
MAX_UNPROVED = 117
"""Settings of other sections without a proof; lower it with each marker that is added."""
KNOBS = yaml.safe_load(Path(__file__).with_name("source_knobs.yaml").read_text())
ROWS = [row for rows in KNOBS.values() for row in rows]


def test_every_setting_of_the_objective_and_the_learner_has_a_proof() -> None:
    named = [path for path in settings() if path.startswith(PROVED_SECTIONS)]
    assert [path for path in named if not proofs_of(path)] == []


def test_the_settings_without_a_proof_become_fewer() -> None:
    unproved = [path for path in settings() if not proofs_of(path)]
    assert len(unproved) <= MAX_UNPROVED, "\n".join(unproved)


def test_every_marker_names_a_setting() -> None:
    assert sorted(set(marked("proves")) - set(settings())) == []


@pytest.mark.parametrize("row", ROWS)
def test_every_knob_of_the_source_systems_is_covered(row: str) -> None:
    assert marked("covers").get(row), f"no test has @pytest.mark.covers({row!r})"


def test_every_covered_knob_is_one_of_the_source_systems() -> None:
    assert sorted(set(marked("covers")) - set(ROWS)) == []
    assert len(set(ROWS)) == len(ROWS)
