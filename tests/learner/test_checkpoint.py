"""Checkpoints of the learner: everything is restored, and what is not whole is refused."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_support import (
    equal,
    make_groups,
    make_trainer,
    optimizers_of,
    policy_of,
    weights_of,
)
from safetensors.torch import load_file

from async_rl.core.checksums import damage
from async_rl.core.errors import DataError, InfrastructureError
from async_rl.learner import checkpoint, checkpoint_files


@pytest.mark.covers("checkpoints hold everything", "value_norm in the checkpoint")
@pytest.mark.parametrize(
    ("conf", "knobs"),
    [
        ("grpo_code", ()),
        (
            "ppo_code",
            (
                "algorithm.kl.controller=adaptive",
                "algorithm.kl.controller.horizon=16",
                "algorithm.advantage.critic.value_norm=exp",
            ),
        ),
        ("ppo_code", ("algorithm.advantage.critic=shared", "algorithm.kl.ref_ema_eta=0.1")),
    ],
)
def test_a_restored_run_goes_on_bit_for_bit(
    model_path: Path, tmp_path: Path, conf: str, knobs: tuple[str, ...]
) -> None:
    trainer = make_trainer(model_path, conf, *knobs)
    for version in range(2):
        trainer.step(make_groups(version, version=version), version)
    trainer.save(tmp_path / "step_2", 2).result()
    onward = trainer.step(make_groups(2, version=2), 2)
    restored = make_trainer(model_path, conf, *knobs)
    assert restored.load(tmp_path / "step_2") == 2
    again = restored.step(make_groups(2, version=2), 2)
    assert equal(weights_of(trainer), weights_of(restored))
    timeless = {k: v for k, v in onward.scalars.items() if not k.startswith("time/")}
    assert timeless == {k: v for k, v in again.scalars.items() if not k.startswith("time/")}


def test_a_restored_run_has_the_optimizer_settings_of_its_configuration(
    model_path: Path, tmp_path: Path
) -> None:
    """`async-rl resume RUN learner.optimizer.weight_decay=0.5` would change nothing otherwise."""
    make_trainer(model_path, "grpo_code").save(tmp_path / "step_1", 1).result()
    changed = ("weight_decay=0.5", "betas=[0.8,0.9]", "eps=1e-3")
    restored = make_trainer(
        model_path, "grpo_code", *(f"learner.optimizer.{knob}" for knob in changed)
    )
    restored.load(tmp_path / "step_1")
    matrices = optimizers_of(restored)[0].torch_optimizer.param_groups[0]
    assert (matrices["weight_decay"], matrices["betas"], matrices["eps"]) == (0.5, (0.8, 0.9), 1e-3)


def test_a_checkpoint_that_was_not_finished_is_not_taken_for_one(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model_path, "grpo_code")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("async_rl.core.checksums.sync_tree", fail)
    with pytest.raises(
        InfrastructureError, match=r"step_1 could not be written.*No space.*async-rl resume"
    ):
        trainer.save(tmp_path / "step_1", 1).result()
    with pytest.raises(DataError, match="is not a checkpoint"):
        trainer.load(tmp_path / "step_1")
    monkeypatch.undo()
    trainer.save(tmp_path / "step_1", 1).result()
    assert trainer.load(tmp_path / "step_1") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_the_random_state_of_torch_is_that_of_the_checkpoint(
    model_path: Path, tmp_path: Path
) -> None:
    """A model with dropout would otherwise draw other numbers after a resume."""
    trainer = make_trainer(model_path, "grpo_code")
    torch.rand(3)
    trainer.save(tmp_path / "step_1", 1).result()
    expected = torch.rand(5)
    restored = make_trainer(model_path, "grpo_code")
    torch.manual_seed(123)
    restored.load(tmp_path / "step_1")
    assert torch.equal(torch.rand(5), expected)


def test_the_memory_of_a_checkpoint_is_used_again_once_the_previous_one_is_written(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[object] = []
    real_wait = checkpoint.wait
    monkeypatch.setattr(checkpoint, "wait", lambda given: (waited.append(given), real_wait(given)))
    trainer = make_trainer(model_path, "grpo_code")
    first = trainer.save(tmp_path / "step_1", 1)
    before = weights_of(trainer)
    trainer.step(make_groups(0), 0)
    trainer.save(tmp_path / "step_2", 2).result()
    assert waited[-1] == [first]
    restored = make_trainer(model_path, "grpo_code")
    for version, expected in ((1, before), (2, weights_of(trainer))):
        restored.load(tmp_path / f"step_{version}")
        assert equal(weights_of(restored), expected)


@pytest.mark.parametrize("refused", ["nowhere", "at the first write"])
def test_a_checkpoint_is_written_past_the_cache_or_through_it(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    flags = []
    real_open = os.open
    real_write = os.write

    def opening(path: Path, flag: int, mode: int) -> int:
        flags.append(bool(flag & os.O_DIRECT))
        return real_open(path, flag, mode)

    def write(fd: int, content: memoryview) -> int:
        address = np.frombuffer(content, dtype=np.uint8).ctypes.data
        assert (address % 4096, len(content) % 4096) == (0, 0)
        if refused == "at the first write" and flags == [True]:
            raise OSError(22, "Invalid argument")
        # Disks may take less than they get.
        return real_write(fd, content[: 3 * 4096])

    monkeypatch.setattr(
        checkpoint_files, "os", SimpleNamespace(**{**vars(os), "open": opening, "write": write})
    )
    trainer = make_trainer(model_path, "grpo_code")
    trainer.save(tmp_path / "step_1", 1).result()
    monkeypatch.undo()
    assert flags == ([True] if refused == "nowhere" else [True, False])
    assert damage(tmp_path / "step_1") == ""
    named = load_file(tmp_path / "step_1" / "rank_0000.safetensors")
    index = json.loads((tmp_path / "step_1" / "index.json").read_text())
    assert named.keys() == index["tensors"].keys()
    for name, tensor in policy_of(trainer).named_parameters():
        assert torch.equal(named[f"policy.model.{name}"], tensor), name
