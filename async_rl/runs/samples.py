"""The stored responses of a run, as text and with their scores, and as JSONL for other tools.
docs/operations.md describes the columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.ledger import GroupRow, reading
from async_rl.buffer.store.reader import CHOSEN, LEFT
from async_rl.buffer.store.trajectories import (
    PAGE,
    Filter,
    Rollout,
    complete_steps,
    page_of,
    rollout_of,
)
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.core.types import Score, Trajectory
from async_rl.data.prompt_file import PROMPTS_FILE, RunPrompts, open_prompts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_GROUPS = 256
_INCOMPLETE = "\ufffd"  # of the bytes of a character, some are in tokens that follow

Decode = Callable[[list[int]], str]


@frozen
class Sample:
    """One stored response.

    Attributes:
        rollout: Its group, with the step that trained it.
        index: Its position in the group, counted from 0.
        decode: The function from token ids to text.
    """

    rollout: Rollout
    index: int
    decode: Decode

    @property
    def response(self) -> str:
        """The text of all tokens after the prompt, special tokens included."""
        return self.decode(self.response_ids)

    @property
    def response_ids(self) -> list[int]:
        """The ids of the tokens after the prompt."""
        ids: list[int] = self.trajectory.token_ids[self.trajectory.prompt_length :].tolist()
        return ids

    @property
    def trajectory(self) -> Trajectory:
        """Its L tokens: `token_ids` and `versions` int32 [L], `loss_mask` bool [L],
        `behavior_logprobs` float32 [L] in nats, 0 where the policy did not sample the token.
        """
        return self.rollout.group.trajectories[self.index]

    @property
    def prompt(self) -> str:
        """The text of the prompt."""
        return self.rollout.prompt

    @property
    def step(self) -> int | None:
        """The learner step that trained it; None if none did yet."""
        return self.rollout.step

    @property
    def score(self) -> Score:
        """Its reward with the parts, and the verdict of each test."""
        return self.trajectory.score


def samples(run_dir: Path, *, step: int | None, failed: bool, most: int) -> list[Sample]:
    """Return every sample of these groups; failed: only those that did not pass all tests. Raises
    ConfigError if nothing of the step is stored.
    """
    stored = list(itertools.islice(_groups(run_dir, step=step, failed=False), most))
    if step is not None and not stored:
        raise ConfigError(f"step={step}: {why_none(run_dir)}")
    decode = decoder(run_dir)
    return [sample for _, each in stored for sample in samples_of(each, decode, failed=failed)]


def samples_of(rollout: Rollout, decode: Decode, *, failed: bool = False) -> list[Sample]:
    """Return the samples of a group; failed: only those that did not pass all tests."""
    return [
        Sample(rollout=rollout, index=index, decode=decode)
        for index, trajectory in enumerate(rollout.group.trajectories)
        if not (failed and trajectory.score.is_passed)
    ]


def _groups(run_dir: Path, *, step: int | None, failed: bool) -> Iterator[tuple[GroupRow, Rollout]]:
    """Yield the stored groups, the newest first; failed: only those with a failed sample."""
    before = None
    while True:
        page = Filter(step=step, failed=failed, stored=True, before=before)
        # Read the page into memory: a slow reader must not keep a transaction of a live store open,
        # because the write-ahead log could then not be shortened.
        with reading(run_dir) as store:
            listed = page_of(store, page)
            stored = [rollout_of(store, row) for row in listed]
        for row, rollout in zip(listed, stored, strict=True):
            if rollout is not None:
                yield row, rollout
        # A page that is not full is the last one.
        if len(listed) < PAGE:
            return
        before = listed[-1].group_id


def why_none(run_dir: Path) -> str:
    """Return why the store lacks the rollouts that were asked for, with the steps that it has."""
    with reading(run_dir) as connection:
        kept = complete_steps(connection)
    span = f"steps {kept[0]} to {kept[-1]} are stored" if kept else "no step is stored yet"
    return (
        f"no such rollout; {span} (older steps are deleted unless a checkpoint needs"
        " them or recording=full keeps them)"
    )


def pieces(sample: Sample) -> list[str]:
    """Return the text that each response token adds; joined, the pieces are the response.

    A character that several tokens write together is with the last of them.
    """
    ids = sample.response_ids
    texts = []
    # Decoding from the last two boundaries between characters, not from the start, keeps the time
    # linear: 16,000 tokens would otherwise be decoded 8,000 times over.
    before = 0
    start = 0
    for end in range(1, len(ids) + 1):
        known = sample.decode(ids[before:start])
        text = sample.decode(ids[before:end])
        if text.endswith(_INCOMPLETE) and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(known) :])
        before = start
        start = end
    return texts


def verdicts_of(sample: Trajectory) -> list[tuple[str, int]]:
    """Return (verdict, number of equal neighbours) of the tests."""
    runs = itertools.groupby(sample.score.verdicts)
    return [(verdict.value, len(list(same))) for verdict, same in runs]


def tokenizer_of(run_dir: Path) -> Tokenizer:
    """Return the tokenizer of the run's model. Raises ConfigError if it has no file of it."""
    # Imported late: commands that decode nothing need not wait for it.
    from tokenizers import Tokenizer

    from async_rl.runtime.context import load_control

    file = Path(load_control(run_dir).model_path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist; the responses cannot be decoded without the model's fast"
            " tokenizer"
        )
    return Tokenizer.from_file(str(file))


def decoder(run_dir: Path) -> Decode:
    """Return the function from token ids to text, of the tokenizer of the run's model."""
    tokenizer = tokenizer_of(run_dir)
    # The policy writes special tokens too, so they are part of the response.
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def lines(run_dir: Path, decode: Decode, *, step: int | None, failed: bool) -> Iterator[bytes]:
    """Yield a line for each stored sample, the newest groups first; of one step, or (None) of all;
    failed: only those that did not pass all tests.
    """
    for row, rollout in _groups(run_dir, step=step, failed=failed):
        facts = {"run": run_dir.name, "step": row.step, "state": row.state}
        for sample in samples_of(rollout, decode, failed=failed):
            yield msgspec.json.encode(facts | _row(sample)) + b"\n"


def _row(sample: Sample) -> dict[str, Any]:
    group = sample.rollout.group
    trajectory = sample.trajectory
    return {
        "group_id": group.group_id,
        "prompt": sample.prompt,
        "sample": sample.index,
        "prompt_id": group.prompt_id,
        "data_source": group.data_source,
        "generator": group.generator,
        "response": sample.response,
        "reward": sample.score.reward,
        "parts": sample.score.parts,
        "calls": trajectory.calls,
        "verdicts": sample.score.verdicts,
        "is_passed": sample.score.is_passed,
        "is_truncated": trajectory.is_truncated,
        "prompt_length": trajectory.prompt_length,
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "behavior_logprobs": trajectory.behavior_logprobs.tolist(),
        "versions": trajectory.versions.tolist(),
    }


def issued_prompts(run_dir: Path, config: RunConfig, store: Connection) -> RunPrompts | None:
    """Return the prompts of a run at the positions of its groups; None for a copy from the mirror,
    which has no prompts.sqlite.
    """
    if not (run_dir / PROMPTS_FILE).is_file():
        return None
    found = open_prompts(run_dir / PROMPTS_FILE, config, vocabulary_size=0)
    found.order.restore(store.execute(LEFT), store.execute(CHOSEN))
    return found
