"""Ranks over gloo train as one does, each with rows of its own or with pieces of shared rows, and
read each other's checkpoints.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_support import (
    as_trees,
    equal_rewards,
    make_groups,
    make_trainer,
    relative_difference,
    spy_on_gradients,
)
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from warm_processes import warm_context

from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import Group, StepScore
from async_rl.learner import sharding
from async_rl.learner.checkpoint_files import Staging
from async_rl.learner.trainer import Trainer

ROW = np.array([3, 1, 4, 1, 5, 9], dtype=np.int32)
STEPS = 3
OVERRIDES = ("learner.minibatches=2", "learner.optimizer.eps=1e-4")
EXACT_KL = (
    "algorithm.entropy_coef=0.01",
    "algorithm.kl=loss",
    "algorithm.kl.coef=0.1",
    "algorithm.kl.estimator=full",
)
GAC = ("algorithm.step_scale=plugin", "algorithm.step_scale.fn=async_rl.examples.losses.gac:cut")
STEPS_COUNT = ("reward.mode=fraction", "reward.placement=steps", "algorithm.truncated=zero_reward")
OBJECTIVES = {
    # The reference moves: its checkpoints have it. The scored steps are those of all ranks.
    "ppo": ("ppo_code", (*EXACT_KL, "algorithm.kl.ref_ema_eta=0.1", *STEPS_COUNT)),
    "ppo on one backbone": (
        "ppo_code",
        (
            "algorithm.advantage=vtrace",
            "algorithm.advantage.critic=shared",
            "algorithm.advantage.critic.warmup_steps=1",
            "algorithm.advantage.critic.value_norm=exp",
            "algorithm.truncated=bootstrap",
        ),
    ),
    # Weights of the whole batch; silent groups have no backward pass.
    "grpo": ("grpo_code", ("algorithm=m2po", "algorithm.normalize_advantages=group", *GAC)),
    "an adapter": ("grpo_code", (*EXACT_KL, "model.lora=lora", "model.lora.rank=4")),
}
MEMORY_KNOBS = {
    "ppo": ("learner.gradient_checkpointing=true", "learner.shard_units=1000"),
    "ppo on one backbone": ("learner.budget_tokens=30",),
    "grpo": ("learner.budget_tokens=30",),
    "an adapter": ("learner.gradient_checkpointing=true",),
}
"""What several ranks do otherwise than one, besides being several: it must not matter."""
ALONE, PARTS, CONTEXT, BOTH = (1, 1), (2, 1), (2, 2), (4, 2)
LAYOUTS = {
    ALONE: list(OBJECTIVES),
    PARTS: ["ppo", "ppo on one backbone", "grpo"],
    CONTEXT: ["ppo", "grpo"],
    # Of two nodes, which have a copy of the models each.
    BOTH: ["an adapter"],
}
"""The cases by ranks, and how many of them share each row."""


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that collectives write into tensors of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            # Operations in place have their outputs first; functional ones return them.
            outputs = args[0] if func.namespace == "c10d" else result
            self.total += sum(x.nbytes for x in tree_leaves(outputs) if isinstance(x, torch.Tensor))
        return result


def batch_of(version: int) -> list[Group]:
    """Trees, some of which are silent: without a KL they get no backward pass. Two steps of each
    sample are scored, the second at its end.
    """
    groups = equal_rewards(make_groups(version, version=version, ages=(0,)), every=4)
    for group in groups:
        for n, t in enumerate(group.trajectories):
            ends = {max(1, t.response_length // 2): 0.5, t.response_length: 1.0}
            steps = tuple(StepScore(end_tokens=end, reward=reward) for end, reward in ends.items())
            score = msgspec.structs.replace(t.score, steps=steps)
            group.trajectories[n] = msgspec.structs.replace(t, score=score)
    return as_trees(groups, np.random.default_rng(version))


def train_all(rank: int, layout: tuple[int, int], model_path: Path, out: Path) -> None:
    """Every case in turn, in a process of its own."""
    torch.set_num_threads(1)
    if layout[0] > 1:
        sharding.join(
            dist.FileStore(f"{out}/rendezvous", layout[0]),  # type: ignore[attr-defined]
            rank,
            layout[0],
            host="127.0.0.1",
            device=torch.device("cpu"),
            timeout_s=60,
        )
    for case in LAYOUTS[layout]:
        with pytest.MonkeyPatch.context() as patch:
            train(rank, layout, model_path, out / case, case, patch)


def train(
    rank: int,
    layout: tuple[int, int],
    model_path: Path,
    out: Path,
    case: str,
    patch: pytest.MonkeyPatch,
) -> None:
    """Trains, saves, trains one step more; rank 0 writes what it found."""
    world_size, context_ranks = layout
    conf, objective = OBJECTIVES[case]
    knobs = (
        *OVERRIDES,
        *objective,
        *(MEMORY_KNOBS[case] if world_size > 1 else ()),
        f"learner.ranks={world_size}",
        f"learner.context_ranks={context_ranks}",
    )
    if layout == BOTH:
        patch.setattr(RunConfig, "node_ranks", 2)

    def make() -> Trainer:
        return make_trainer(model_path, conf, *knobs, rank=rank, world_size=world_size)

    trainer = make()
    gradients = spy_on_gradients(patch)
    results = []
    for version in range(STEPS):
        if version == STEPS - 1:
            written = trainer.save(out / "checkpoint", version)
        results.append(trainer.step(batch_of(version), version).scalars)
    written.result()
    with ReceivedBytes() as received:
        tensors = [t.clone() for t in trainer.full_tensors()]
    (out / f"received_{rank}").write_text(str(received.total))
    logprobs = trainer.logprobs([ROW])
    trainer.export_hf(out / "hf")
    if rank == 0:
        torch.save(
            {
                "tensors": tensors,
                "logprobs": logprobs[0],
                "scalars": results,
                "gradients": gradients,
            },
            out / "result.pt",
        )
    if (layout, case) == (PARTS, "ppo"):
        save_again(rank, make, [model_path, conf, *OVERRIDES, *objective], out)
    if world_size > 1:
        dist.barrier()


def no_room(staging: Staging, path: Path) -> bytes:
    raise OSError(28, "No space left on device")


def save_again(rank: int, make: Callable[[], Trainer], alone: list[Any], out: Path) -> None:
    """Rank 0 reads the checkpoint of both alone and saves `one`; both read that and save `again`.
    Before, the disk of rank 1 is full.
    """
    two = make()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as raised:
        if rank == 1:
            patch.setattr(Staging, "write", no_room)
        if rank == 0:
            text = r"full could not be written: .*No space left on device at rank 1; free disk"
            raised.enter_context(pytest.raises(InfrastructureError, match=text))
        two.save(out / "full", 1).result()
    if rank == 0:
        one = make_trainer(*alone)
        one.save(out / "one", one.load(out / "checkpoint")).result()
    dist.barrier()
    two.save(out / "again", two.load(out / "one")).result()


@pytest.fixture(scope="module")
def trained(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, int], Path]:
    """Where the ranks of each layout left what they found, a folder per case. All start at once."""
    found = {layout: tmp_path_factory.mktemp("ranks") for layout in LAYOUTS}
    context = warm_context()
    children = []
    for layout, out in found.items():
        for case in LAYOUTS[layout]:
            (out / case).mkdir()
        children += [
            context.Process(target=train_all, args=(rank, layout, model_path, out))
            for rank in range(layout[0])
        ]
    for child in children:
        child.start()
    for child in children:
        child.join(240)
        assert child.exitcode == 0
    return found


@pytest.mark.proves("learner.ranks")
@pytest.mark.proves("learner.context_ranks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "case"), [(x, case) for x in (PARTS, CONTEXT, BOTH) for case in LAYOUTS[x]]
)
def test_several_ranks_reach_the_weights_of_one(
    model_path: Path, trained: dict[tuple[int, int], Path], layout: tuple[int, int], case: str
) -> None:
    conf, objective = OBJECTIVES[case]
    found = trained[layout] / case
    one, two = (
        torch.load(path / "result.pt", weights_only=False)
        for path in (trained[ALONE] / case, found)
    )
    for name, gradients in one["gradients"].items():
        assert relative_difference(two["gradients"][name][0], gradients[0]) < 1e-6, (
            "the first update starts from equal weights"
        )
    for mine, theirs in zip(one["tensors"], two["tensors"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(one["logprobs"], two["logprobs"], atol=1e-4)
    sender, other = (int((found / f"received_{rank}").read_text()) for rank in (0, 1))
    # The model is so small that its adapter's A is a third of it; every rank needs A to merge.
    size = sum(t.nbytes for t in two["tensors"])
    merging = size / 3 if case == "an adapter" else 0
    assert 0 < sender <= 1.1 * size + merging
    assert other <= merging, "only rank 0 sends weights, so only it gathers them"
    for first, second in zip(one["scalars"], two["scalars"], strict=True):
        assert first.keys() == second.keys()
        for name in first:
            if not name.startswith("time/"):
                # A maximum over tokens moves more than a mean.
                assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name

    exported = make_trainer(found / "hf", "grpo_code")
    np.testing.assert_allclose(exported.logprobs([ROW])[0], two["logprobs"], atol=1e-6)

    resumed = make_trainer(model_path, conf, *OVERRIDES, *objective)
    assert resumed.load(found / "checkpoint") == STEPS - 1
    resumed.step(batch_of(STEPS - 1), STEPS - 1)
    for mine, theirs in zip(resumed.full_tensors(), two["tensors"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def whole(directory: Path) -> dict[str, np.ndarray]:
    """Join the pieces with json and safetensors alone, as docs/checkpoints.md says."""
    index = json.loads((directory / "index.json").read_text())
    found = {}
    for name, stored in index["tensors"].items():
        pieces = []
        for file, begin, end in stored["pieces"]:
            with safe_open(directory / file, framework="np") as shard:
                pieces.append(shard.get_tensor(name))
            assert len(pieces[-1]) == end - begin
        found[name] = np.concatenate(pieces)
        assert list(found[name].shape) == stored["shape"], name
    return found


@pytest.mark.slow
def test_the_checkpoint_of_two_ranks_becomes_one_and_two_again_bit_for_bit(
    trained: dict[tuple[int, int], Path],
) -> None:
    saved = trained[PARTS] / "ppo"
    two, one = whole(saved / "checkpoint"), whole(saved / "one")
    assert not (saved / "full").exists()
    shards = ["rank_0000.safetensors", "rank_0001.safetensors"]
    names = {path.name for path in (saved / "checkpoint").iterdir()}
    assert names == {"index.json", *shards, "sha256sums.txt"}
    first, again = (
        [(saved / name / shard).read_bytes() for shard in shards]
        for name in ("checkpoint", "again")
    )
    assert len(first[1]) < len(first[0]) < 1.5 * len(first[1]), "each rank has its part"
    assert first == again
    assert two.keys() == one.keys()
    assert all(np.array_equal(two[name], one[name]) for name in two)
