"""Configurations of other trainers in sources/, and what becomes of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from empty_model import write_model

from async_rl.composition.compose import compose
from async_rl.core.machine import Machine, this_machine
from async_rl.launchers.commands.migrate import to_yaml
from async_rl.launchers.migration.applying import Migration, read
from async_rl.launchers.preflight.checks import preflight
from async_rl.planning.topology import processes

FOLDER = Path(__file__).with_name("sources")
SOURCES = sorted(path.name for path in FOLDER.iterdir())


def migrated(name: str, overrides: Sequence[str] = ()) -> Migration:
    return read(FOLDER / name, overrides)


def changed(tmp_path: Path, name: str, given: Mapping[str, Any]) -> Migration:
    """The migration of a source of YAML, with keys set to other values."""
    tree = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for key, value in given.items():
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    file = tmp_path / "source.yaml"
    file.write_text(yaml.safe_dump(tree))
    return read(file)


def check_answers(migration: Migration) -> None:
    """Check that every key has a rule, and the settings or the reason that follow from it."""
    assert [line.key for line in migration.lines if "no rule for it" in line.fate.reason] == []
    assert all(
        line.fate.settings if line.fate.kind == "translated" else line.fate.reason
        for line in migration.lines
    )


def check_launch(tmp_path: Path, migration: Migration) -> None:
    """Check what a launch checks, with a model and rows of this machine and with 16 GPUs."""
    ours = tmp_path / "ours.yaml"
    ours.write_text(to_yaml(migration))
    row = {"prompt": "add", "input": "add", "question": "add", "query_id": "q0", "solutions": ["1"]}
    row["tests"] = [{"kind": "stdin", "input": "1", "output": "1"}]  # type: ignore[assignment]
    for name in ("rows", "held_out", "metadata"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    write_model(tmp_path)
    given = [f"model.path={tmp_path}", f"output_dir={tmp_path}/runs"]
    given.append(f"data.train_files={tmp_path}/rows.jsonl")
    if "data.metadata_file" in migration.settings:
        given.append(f"data.metadata_file={tmp_path}/metadata.jsonl")
    if "data.val_files" in migration.settings:
        given.append(f"data.val_files={tmp_path}/held_out.jsonl")
    machine = Machine(cores=tuple(this_machine().cores), num_gpus=16, memory_mb=1_000_000)
    config = compose(str(ours), given)
    preflight(config, machine)
    assert processes(config, machine)
