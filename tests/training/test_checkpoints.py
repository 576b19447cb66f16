"""The checkpoints that are kept, and the one that the learner resumes from."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.core.checksums import SUMS_FILE, damage, sums_of, write_sums
from async_rl.core.errors import DataError
from async_rl.training.checkpoints import choose, directory_of, prune, set_aside, verified, versions


def make(run_dir: Path, *found: int) -> None:
    for version in found:
        directory = directory_of(run_dir, version)
        directory.mkdir(parents=True)
        (directory / "index.json").write_text(f"of {version}")
        (directory / "rank_0000.safetensors").write_bytes(random.Random(version).randbytes(4096))
        write_sums(directory, sums_of(directory))


def test_the_newest_complete_checkpoint_that_the_store_covers_is_chosen(tmp_path: Path) -> None:
    """Without a usable one the run does not begin again: a lost store would otherwise throw all
    checkpoints away.
    """
    assert choose(tmp_path, first=0, last=0) == (None, {})
    make(tmp_path, 20, 100000, 3)
    (tmp_path / "checkpoints" / "step_200000.partial").mkdir()
    assert versions(tmp_path) == [3, 20, 100000]
    assert choose(tmp_path, first=0, last=100000) == (directory_of(tmp_path, 100000), {})
    directory, refused = choose(tmp_path, first=0, last=99)
    assert directory == directory_of(tmp_path, 20)
    assert list(refused.values()) == ["the store has the batches of the steps up to 99 only"]
    for first, last in ((0, 1), (100001, 100002)):
        told = r"no checkpoint .* can be used: step_100000: the store .*; restore the"
        with pytest.raises(DataError, match=told):
            choose(tmp_path, first=first, last=last)


@pytest.mark.covers("save_freq")
def test_the_newest_and_the_best_of_the_older_ones_are_kept(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, 6)
    oldest = prune(tmp_path, keep=2, keep_best=2, scores={1: 0.2, 2: 0.9, 4: 0.5, 6: 0.1})
    assert (versions(tmp_path), oldest) == ([2, 4, 5, 6], 5)
    assert prune(tmp_path, keep=2, keep_best=0, scores={}) == 5
    assert versions(tmp_path) == [5, 6]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda d: os.truncate(d / "rank_0000.safetensors", 100),
    "without metadata": lambda d: (d / "index.json").unlink(),
    "without checksums": lambda d: (d / SUMS_FILE).unlink(),
    "with damaged checksums": lambda d: flip(d / SUMS_FILE, 3),
    "with a file more": lambda d: (d / "more").touch(),
    "first bit flipped": lambda d: flip(d / "rank_0000.safetensors", 0),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    tmp_path: Path, kind: str
) -> None:
    make(tmp_path, 4, 6)
    newest = directory_of(tmp_path, 6)
    assert damage(newest) == ""
    DAMAGES[kind](newest)
    directory, refused = choose(tmp_path, first=2, last=9)
    assert directory == directory_of(tmp_path, 4)
    assert list(refused) == [newest]
    assert refused[newest]
    with pytest.raises(DataError, match=r"step_000006 is damaged: .*; use another checkpoint of"):
        verified(tmp_path, 6)


def test_a_checkpoint_that_is_set_aside_is_none_any_more_and_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        make(tmp_path, 6)
        directory = directory_of(tmp_path, 6)
        assert os.system(f"cd {directory} && sha256sum --quiet -c {SUMS_FILE}") == 0
        aside = set_aside(directory)
        assert versions(tmp_path) == []
        assert (aside / "index.json").read_text() == "of 6"
