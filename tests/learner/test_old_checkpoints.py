"""Checkpoints of earlier versions hold pickles: nothing reads them outside the jail."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from learner_support import equal, make_config, make_groups, make_trainer, weights_of
from old_checkpoints import plant, plant_in_values, save_old
from warm_processes import run_command

from async_rl.composition.compose import write_config
from async_rl.config.base import replace
from async_rl.core.checksums import sums_of, write_sums
from async_rl.core.errors import DataError
from async_rl.learner.checkpoint_index import read_index
from async_rl.training.checkpoints import directory_of

VERSION = 2
CASES = {
    "a critic and running numbers": (
        "ppo_code",
        ("algorithm.kl.controller=adaptive", "algorithm.advantage.critic.value_norm=exp"),
    ),
    "a head on the policy": ("ppo_code", ("algorithm.advantage.critic=shared",)),
    "an adapter": ("grpo_code", ("model.lora=lora", "model.lora.rank=4")),
    "a moving reference": ("grpo_code", ("algorithm.kl=loss", "algorithm.kl.ref_ema_eta=0.1")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_converted_checkpoint_continues_bit_for_bit(
    model_path: Path, tmp_path: Path, case: str
) -> None:
    conf, knobs = CASES[case]
    trainer = make_trainer(model_path, conf, *knobs)
    for version in range(VERSION):
        trainer.step(make_groups(version, version=version), version)
    path = tmp_path / "step_000002"
    save_old(trainer, path, VERSION)
    restored = make_trainer(model_path, conf, *knobs)
    with pytest.raises(DataError, match=rf"run code .* async-rl convert {path}"):
        restored.load(path)
    done = run_command(["convert", path])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "step_000002.set_aside" / ".metadata").is_file()
    assert restored.load(path) == VERSION
    assert read_index(path).optimizers["policy"].num_steps > 0
    onward, again = (
        each.step(make_groups(VERSION, version=VERSION), VERSION).scalars
        for each in (trainer, restored)
    )
    assert equal(weights_of(trainer), weights_of(restored))
    for name in onward:
        assert name.startswith("time/") or onward[name] == again[name], name
    # What it saves now is what the other one saves.
    for each, name in ((trainer, "a"), (restored, "b")):
        each.save(tmp_path / name, VERSION + 1).result()
    assert (tmp_path / "a" / "sha256sums.txt").read_bytes() == (
        tmp_path / "b" / "sha256sums.txt"
    ).read_bytes()


@pytest.mark.parametrize("planting", [plant, plant_in_values])
def test_no_command_of_a_crafted_checkpoint_runs(
    model_path: Path, tmp_path: Path, planting: Callable[[Path, str], None]
) -> None:
    trace = tmp_path / "trace"
    run_dir = tmp_path / "mine"
    model_path = shutil.copytree(model_path, tmp_path / "model")
    (model_path / "tokenizer.json").write_text('{"model": {}}')
    config = make_config("grpo_code", "run_name=mine", f"model.path={model_path}")
    (run_dir / "checkpoints").mkdir(parents=True)
    write_config(replace(config, output_dir=str(tmp_path)), run_dir / "config.yaml")
    for name in ("store.sqlite", "metrics.jsonl"):
        (run_dir / name).touch()
    trainer = make_trainer(model_path, "grpo_code")
    path = directory_of(run_dir, VERSION)
    save_old(trainer, path, VERSION)
    planting(path, f"touch {trace}")
    # Torch itself runs the command.
    dcp.load({"policy.optimizer.param_groups.0.lr": 0.0}, checkpoint_id=path, no_dist=True)
    assert trace.exists()
    trace.unlink()
    command = f"async-rl convert {path}"
    # They refuse the format itself; what is planted where is seen by the conversion only.
    commands: list[list[str | Path]] = [["export", run_dir, tmp_path / "out"]]
    if planting is plant:
        commands += [["eval", run_dir, "evaluation.num_prompts=1"], ["resume", run_dir]]
    for words in commands:
        done = run_command(words)
        assert done.returncode != 0
        assert command in done.stderr, words
        assert not trace.exists(), words
    done = run_command(["convert", path])
    assert done.returncode == 0, done.stderr
    assert make_trainer(model_path, "grpo_code").load(path) == VERSION
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"nothing", "UnpicklingError"),
        (pickle.dumps([1] * 9), "AttributeError"),
        # 60 GB, which the jail does not have.
        (b"\x80\x04(" + b"K\x00" * 1000 + b"t" + b"2\x86" * 1_000_000 + b".", ""),
        (b"c__builtin__\nexec\n(Vraise SystemExit\ntR.", "TypeError"),
    ],
)
def test_a_metadata_file_that_is_no_checkpoint_is_refused(
    model_path: Path, tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "step_000002"
    save_old(make_trainer(model_path, "grpo_code"), path, VERSION)
    (path / ".metadata").write_bytes(content)
    write_sums(path, sums_of(path))
    done = run_command(["convert", path])
    assert done.returncode == 1
    assert re.search(rf"step_000002 is damaged: [^$]*{reason}", done.stderr), done.stderr
    assert (path / ".metadata").is_file()


@pytest.mark.parametrize("place", ["../secret", "/etc/hostname", "secret"])
def test_a_place_outside_the_files_of_the_checkpoint_is_not_read(
    model_path: Path, tmp_path: Path, place: str
) -> None:
    path = tmp_path / "step_000002"
    save_old(make_trainer(model_path, "grpo_code"), path, VERSION)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for directory in (path, tmp_path):
        (directory / "secret").write_text("secret")
    write_sums(path, sums_of(path))
    done = run_command(["convert", path])
    assert done.returncode == 1
    assert "matching regex" in done.stderr


def test_a_link_in_place_of_a_file_of_the_checkpoint_is_not_followed(
    model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step_000002"
    save_old(make_trainer(model_path, "grpo_code"), path, VERSION)
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    done = run_command(["convert", path])
    assert done.returncode == 1
    assert "__0_0.distcp is not a regular file" in done.stderr
