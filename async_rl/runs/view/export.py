"""Stored trajectories as JSONL for other tools. docs/operations.md describes the columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from async_rl.buffer.store import trajectories
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import Filter, Rollout, rollout_of
from async_rl.runs.samples import Decode, response_of


def lines(run_dir: Path, decode: Decode, chosen: Filter) -> Iterator[bytes]:
    """Yield a line for each stored sample of the groups that pass the filter, the newest groups
    first; with `failed` only for the samples that failed, with `response` for those that have it.
    """
    before = chosen.before
    while True:
        page = msgspec.structs.replace(chosen, stored=True, sort="newest", before=before)
        # Read the page into memory: a slow client must not keep a transaction of a live store open,
        # because the write-ahead log could then not be shortened.
        with reading(run_dir / STORE_FILE) as store:
            listed = trajectories.page_of(store, page, most=trajectories.PAGE)
            stored = [rollout_of(store, row) for row in listed]
        for row, rollout in zip(listed, stored, strict=True):
            if rollout is not None:
                facts = {"run": run_dir.name, "step": row.step, "state": row.state}
                for sample in _samples(facts, rollout, decode=decode):
                    is_left_out = chosen.failed and sample["is_passed"]
                    if not is_left_out and chosen.response.lower() in sample["response"].lower():
                        yield msgspec.json.encode(sample) + b"\n"
        # A page that is not full is the last one.
        if len(listed) < trajectories.PAGE:
            return
        before = listed[-1].group_id


def _samples(
    facts: dict[str, Any], rollout: Rollout, *, decode: Decode
) -> Iterator[dict[str, Any]]:
    group, advantages = rollout.group, rollout.advantages
    start = 0
    for index, sample in enumerate(group.trajectories):
        end = start + sample.response_length
        yield facts | {
            "group_id": group.group_id,
            "prompt": rollout.prompt,
            "sample": index,
            "prompt_id": group.prompt_id,
            "data_source": group.data_source,
            "generator": group.generator,
            "response": response_of(sample, decode),
            "reward": sample.score.reward,
            "parts": sample.score.parts,
            "calls": sample.calls,
            "verdicts": [verdict.value for verdict in sample.score.verdicts],
            "is_passed": sample.score.is_passed,
            "is_truncated": sample.is_truncated,
            "prompt_length": sample.prompt_length,
            "token_ids": sample.token_ids.tolist(),
            "loss_mask": sample.loss_mask.tolist(),
            "behavior_logprobs": sample.behavior_logprobs.tolist(),
            "versions": sample.versions.tolist(),
            "advantages": None if advantages is None else advantages[start:end].tolist(),
        }
        start = end
