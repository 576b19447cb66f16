"""Whatever the files of a checkpoint say, loading it runs nothing, waits for nothing and names the
file.
"""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from learner_support import make_groups, make_trainer
from tables import table

from async_rl.core.errors import DataError
from async_rl.learner.checkpoint_files import file_of

SHARD = file_of(0)
NAME = "policy.model.lm.model.norm.weight"
OTHER = "policy.model.lm.model.layers.0.mlp.up_proj.weight"
Craft = Callable[[Path], Any]


@pytest.fixture(scope="module")
def trainer(model_path: Path) -> Any:
    trainer = make_trainer(model_path, "grpo_code")
    trainer.step(make_groups(0), 0)
    return trainer


@pytest.fixture
def saved(trainer: Any, tmp_path: Path) -> Path:
    trainer.save(tmp_path / "step_1", 1).result()
    return tmp_path / "step_1"


def index(change: Callable[[dict[str, Any]], object]) -> Craft:
    """Changes the index."""

    def craft(directory: Path) -> None:
        content = json.loads((directory / "index.json").read_text())
        change(content)
        (directory / "index.json").write_text(json.dumps(content))

    return craft


def change(kind: str, value: Any) -> Craft:
    """A change of one of the kinds of the tables."""
    match kind:
        case "index":
            return index(lambda c: c.update(value))
        case "header":
            return shard(lambda h: h[NAME].update(value))
        case "pieces":
            value = {"pieces": [[SHARD, *span] for span in value]}
        case "file":
            value = {"pieces": [[value, 0, 32]]}
    return index(lambda c: c["tensors"][NAME].update(value))


def shard(change: Callable[[dict[str, Any]], object]) -> Craft:
    """Changes the header of the shard."""

    def craft(directory: Path) -> None:
        content = (directory / SHARD).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        text = json.dumps(header).encode()
        (directory / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return craft


def written(name: str, content: bytes) -> Craft:
    return lambda directory: (directory / name).write_bytes(content)


def linked(directory: Path) -> None:
    (directory / "index.json").rename(directory.parent / "elsewhere")
    (directory / "index.json").symlink_to(directory.parent / "elsewhere")


def piped(directory: Path) -> None:
    (directory / SHARD).unlink()
    os.mkfifo(directory / SHARD)


def overlapping(header: dict[str, Any]) -> None:
    begin = header[OTHER]["data_offsets"][0]
    header[NAME]["data_offsets"] = [begin, begin + 128]


CRAFTS: dict[str, Craft] = {
    name: change(kind, value)
    for kind in ("index", "tensor", "pieces", "file", "header")
    for name, value in table(__file__, kind).items()
} | {
    "an index of brackets": written("index.json", b"[" * 100_000),
    "an index that is a link": linked,
    "a shard that is a pipe": piped,
    "a short shard": lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size - 1),
    "a huge header": written(SHARD, (2**63).to_bytes(8, "little") + b"{}"),
    "tensors on top of each other": shard(overlapping),
    "a tensor that the file lacks": shard(lambda h: h.update(other=h.pop(NAME))),
}


@pytest.mark.parametrize("craft", CRAFTS)
def test_a_crafted_checkpoint_is_refused_by_the_name_of_its_file(
    trainer: Any, saved: Path, craft: str
) -> None:
    CRAFTS[craft](saved)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"step_1.*(restore|move it away|set model\.path)"):
        trainer.load(saved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + 200_000, "kB"
