"""A directory with two runs as a run leaves it: store, metrics, settings, tokenizer."""

import asyncio
import json
from pathlib import Path

import msgspec
from buffer_support import FakePrompts, make_config, make_group, opened, take, tickets
from tokenizers import Tokenizer, models

from async_rl.composition.compose import write_config
from async_rl.core.heads import pack_group
from async_rl.core.types import Prompt, Purpose
from async_rl.protocol.buffer import CommitStep, PutGroup
from async_rl.runtime.context import Control

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"
"""A prompt that would run code in the browser if a page did not escape it."""
WORDS = ("w0 ", "w1 ", "<b>w2</b> ", "w3 ", "w4 ")
"""The text of each token: prompts have 1 and 2, responses 3, 4 and one that is unknown."""


class HostilePrompts(FakePrompts):
    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        prompt = super().prompt(purpose, index)
        return msgspec.structs.replace(prompt, text=f"{prompt.text} {HOSTILE}")


async def make_store(run_dir: Path) -> None:
    """Two steps of two groups of two samples. Group 1 failed, group 2 was cut at the limit; the
    second step has a critic. Two more groups are ready.
    """
    async with opened(run_dir, make_config(), HostilePrompts()) as service:
        for version in range(2):
            for ticket in await tickets(service, version):
                group = make_group(
                    ticket,
                    passes=ticket.group_id != 1,
                    is_truncated=ticket.group_id == 2,
                    versions=[max(version - 1, 0), version, version],
                )
                await service.put_group(PutGroup(payload=pack_group(group)))
            batch = await take(service, version)
            ids = [group.group_id for group in batch.groups]
            await service.commit_step(CommitStep(version=version + 1, group_ids=ids))


def make_run(run_dir: Path, *, reward: float, num_steps: int = 30) -> None:
    """Write a finished run whose mean reward at step s is `reward` * s / `num_steps`."""
    run_dir.mkdir()
    asyncio.run(make_store(run_dir))
    write_config(make_config(), run_dir / "config.yaml")
    ids = {word: i for i, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(ids, unk_token=WORDS[0]))
    core.save(str(run_dir / "tokenizer.json"))
    control = Control(address="", pid=1, machine="", model_path=str(run_dir))
    (run_dir / "control.json").write_bytes(msgspec.json.encode(control))
    (run_dir / "state.json").write_text(json.dumps({"outcome": "finished", "cause": ""}))
    rows: list[dict[str, float]] = [
        {"step": step, "time_s": 2.0 * step, "reward/mean": reward * step / num_steps}
        for step in range(1, num_steps + 1)
    ]
    for row in rows:
        row |= {"stage_s/learner/training": 1.5, "wait_s/learner/batch": 0.5}
        if row["step"] % 10 == 0:
            row |= {"eval/pass_at_1": row["step"] / 40, "eval/pass_at_1_error": 0.05}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
