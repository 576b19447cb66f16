"""A checkpoint of two ranks is read by one, one of one rank by two, and nothing changes."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_support import make_groups, make_trainer
from safetensors import safe_open
from warm_processes import warm_context

from async_rl.core.errors import InfrastructureError
from async_rl.learner import sharding
from async_rl.learner.checkpoint_files import Staging
from async_rl.learner.trainer import Trainer

CASES = {
    "a critic and a moving reference": (
        "ppo_code",
        ("learner.shard_units=1000", "algorithm.kl.ref_ema_eta=0.1"),
    ),
    "an adapter and a head on the policy": (
        "ppo_code",
        ("algorithm.advantage.critic=shared", "model.lora=lora", "model.lora.rank=3"),
    ),
}


def no_room(staging: Staging, path: Path) -> bytes:
    raise OSError(28, "No space left on device")


def save_all(rank: int, model_path: Path, out: Path) -> None:
    """Every case in turn, in a process of its own."""
    torch.set_num_threads(1)
    sharding.join(
        dist.FileStore(f"{out}/rendezvous", 2),  # type: ignore[attr-defined]
        rank,
        2,
        host="127.0.0.1",
        device=torch.device("cpu"),
        timeout_s=60,
    )
    for case, (conf, knobs) in CASES.items():
        save(rank, model_path, out / case, conf, knobs)


def save(rank: int, model_path: Path, out: Path, conf: str, knobs: tuple[str, ...]) -> None:
    """Two ranks save `two`; rank 0 reads it alone and saves `one`; both read that, save `again`."""

    def pair() -> Trainer:
        return make_trainer(model_path, conf, *knobs, "learner.ranks=2", rank=rank, world_size=2)

    trained = pair()
    trained.step(make_groups(0), 0)
    # A pass gathers the root's weights, which a checkpoint must not have whole.
    trained.logprobs([np.array([1, 2, 3], dtype=np.int32)])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Staging, "write", no_room)
        with contextlib.ExitStack() as raised:
            if rank == 0:
                text = r"full could not be written: .*No space left on device at rank 1; free disk"
                raised.enter_context(pytest.raises(InfrastructureError, match=text))
            trained.save(out / "full", 1).result()
    trained.save(out / "two", 1).result()
    dist.barrier()
    if rank == 0:
        alone = make_trainer(model_path, conf, *knobs)
        assert alone.load(out / "two") == 1
        alone.save(out / "one", 1).result()
    dist.barrier()
    other = pair()
    assert other.load(out / "one") == 1
    other.save(out / "again", 1).result()
    dist.barrier()


@pytest.fixture(scope="module")
def all_saved(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    for case in CASES:
        (out / case).mkdir()
    context = warm_context()
    children = [context.Process(target=save_all, args=(rank, model_path, out)) for rank in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(240)
        assert child.exitcode == 0
    return out


@pytest.fixture(params=CASES)
def saved(request: pytest.FixtureRequest, all_saved: Path) -> Path:
    found: Path = all_saved / request.param
    return found


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


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow
def test_two_ranks_become_one_and_two_again_bit_for_bit(saved: Path) -> None:
    two, one = whole(saved / "two"), whole(saved / "one")
    assert not (saved / "full").exists()
    assert sorted(files_of(saved / "two")) == [
        "index.json",
        "rank_0000.safetensors",
        "rank_0001.safetensors",
        "sha256sums.txt",
    ]
    sizes = [(saved / "two" / f"rank_000{rank}.safetensors").stat().st_size for rank in (0, 1)]
    assert sizes[1] < sizes[0] < 1.5 * sizes[1], "each rank has its part"
    assert two.keys() == one.keys()
    assert all(np.array_equal(two[name], one[name]) for name in two)
    assert files_of(saved / "again") == files_of(saved / "two")
