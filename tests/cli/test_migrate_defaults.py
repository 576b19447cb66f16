"""Every key that decides results has the source's default where the source is silent."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import table

from async_rl.launchers.migration.applying import SYSTEMS, read
from async_rl.launchers.migration.rules import read_table

FALLBACKS = table(__file__, "fallbacks")
"""The release that has the values of which a release lists none, by system."""


def listed(system: str, release: str) -> dict[str, Any]:
    below = FALLBACKS[system].get(release)
    rows = table(__file__, system).get(release, {})
    inherited = {} if below is None else listed(system, below)
    return {**inherited, **{key: value for key, (value, _) in rows.items()}}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_default_of_a_table_has_its_line_in_the_source(system: str) -> None:
    for release in read_table(system).releases:
        name = release.name.split()[0]
        expected = listed(system, name)
        found = {key: expected.get(key, "not listed") for key in release.absent}
        assert found == release.absent, name


def test_the_page_of_public_files_has_the_numbers_of_the_table() -> None:
    by_source = yaml.safe_load(Path(__file__).with_name("migrate_public.yaml").read_text())["files"]
    files = [row for rows in by_source.values() for row in rows.values()]
    valid = [sum(row[when] == "valid" for row in files) for when in ("before", "now")]
    lines, wrong = (sum(row[name] for row in files) for name in ("lines", "wrong"))
    page = (Path(__file__).parents[2] / "docs" / "decisions" / "migration.md").read_text()
    counts = f"{valid[0]} | {wrong} | {valid[1]} | {sum(row['launched'] for row in files)}"
    assert f"| all | {len(files)} | {lines:,} | {counts} |" in page
    assert len(files) >= 60


DECIDES = table(__file__, "decides")
"""Settings with a default of ours that a migrated run must not fall back on."""
SILENT = table(__file__, "silent")


@pytest.mark.parametrize("case", SILENT)
def test_a_silent_source_leaves_no_deciding_setting_to_our_defaults(
    tmp_path: Path, case: str
) -> None:
    file = tmp_path / "source.yaml"
    file.write_text(SILENT[case])
    release = case.partition(" ")[2].removeprefix("fully")
    settings = read(file, release=release).settings
    missing = {path for path in DECIDES if path not in settings}
    if case.startswith("areal") or "verl 0.2" in case:
        # Their default loss and schedule have no such parameter, or the file none to decide by.
        missing -= {"algorithm.policy_loss.correction", "algorithm.policy_loss.clip_dual"}
    if case in ("areal", "trl 0.14"):
        # float16 there, which the report refuses; float32 there and here.
        missing -= {"model.dtype"}
    assert missing == set()
