"""Stored trajectories as JSONL for other tools. docs/operations.md describes the columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import PAGE, Filter, page_of, rollout_of
from async_rl.runs.samples import Decode, Sample, samples_of


def lines(run_dir: Path, decode: Decode, *, step: int | None, failed: bool) -> Iterator[bytes]:
    """Yield a line for each stored sample, the newest groups first; of one step, or (None) of all;
    failed: only those that did not pass all tests.
    """
    before = None
    while True:
        page = Filter(step=step, failed=failed, stored=True, before=before)
        # Read the page into memory: a slow reader must not keep a transaction of a live store open,
        # because the write-ahead log could then not be shortened.
        with reading(run_dir / STORE_FILE) as store:
            listed = page_of(store, page)
            stored = [rollout_of(store, row) for row in listed]
        for row, rollout in zip(listed, stored, strict=True):
            for sample in [] if rollout is None else samples_of(rollout, decode):
                if not (failed and sample.score.is_passed):
                    facts = {"run": run_dir.name, "step": row.step, "state": row.state}
                    yield msgspec.json.encode(facts | _row(sample)) + b"\n"
        # A page that is not full is the last one.
        if len(listed) < PAGE:
            return
        before = listed[-1].group_id


def _row(sample: Sample) -> dict[str, Any]:
    group = sample.rollout.group
    trajectory = sample.trajectory
    advantages = sample.advantages
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
        "advantages": None if advantages is None else advantages.tolist(),
    }
