"""How long do the pages of `async-rl view` take on the server, for a run of 100,000 groups?

    python -m benchmarks.control.view [--groups 100000] [--rounds 9]

Writes a store with the product's own schema (trajectories of the newest 2,000 groups, eight samples
of 64 tokens), metrics of 12,500 steps with 80 names, and requests every page through the ASGI
application: first once, when metrics are read, then `rounds` times. Prints the first time and the
median of the later times in milliseconds of CPU, the client's part included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models

from async_rl.buffer.store.connection import connect
from async_rl.buffer.store.schema import SCHEMA_VERSION, create_schema
from async_rl.composition.compose import compose, write_config
from async_rl.core.heads import pack_group
from async_rl.core.types import NO_VERSION, Group, Purpose, Score, Trajectory, Verdict
from async_rl.runs.view.library import Library
from async_rl.runs.view.server import build_app
from async_rl.runtime.context import Control

GROUPS_PER_STEP, SAMPLES, TOKENS, STORED, PROMPTS, NAMES = 8, 8, 64, 2000, 5000, 80


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "long"
        run_dir.mkdir()
        make_files(run_dir, options.groups)
        make_store(run_dir, options.groups)
        client = TestClient(build_app(Library(run_dir.parent), token="secret"))
        client.get("/?token=secret")
        last, step = options.groups - 1, options.groups // GROUPS_PER_STEP
        print(f"{options.groups} groups, {step} steps; milliseconds of CPU")
        print(f"{'page':58} {'first':>7} {'median':>7} {'kB':>6}")
        for page in (
            "/",
            "/runs/long",
            f"/runs/long?step={step // 2}",
            "/curves?run=long",
            "/curves?run=long&section=section1",
            "/runs/long/samples",
            f"/runs/long/samples?step={step // 2}",
            "/runs/long/samples?failed=1&truncated=1",
            "/runs/long/samples?sort=worst",
            "/runs/long/samples?text=number+4321",
            "/runs/long/samples?text=nowhere",
            f"/runs/long/groups/{last}",
            "/runs/long/samples?prompt_id=p17",
        ):
            times = []
            for _ in range(options.rounds + 1):
                start = time.process_time()
                reply = client.get(page)
                times.append(1000 * (time.process_time() - start))
                assert reply.status_code == 200, reply.text
            size = len(reply.content) / 1000
            print(f"{page:58} {times[0]:7.1f} {statistics.median(times[1:]):7.1f} {size:6.0f}")


def make_files(run_dir: Path, num_groups: int) -> None:
    """Write everything but the store."""
    write_config(compose("grpo_code"), run_dir / "config.yaml")
    vocabulary = {f"word{index} ": index for index in range(1000)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="word0 ")).save(
        str(run_dir / "tokenizer.json")
    )
    control = Control(address="", pid=1, machine="", model_path=str(run_dir))
    (run_dir / "control.json").write_bytes(msgspec.json.encode(control))
    (run_dir / "state.json").write_text(json.dumps({"outcome": "finished"}))
    names = ["reward/mean", "staleness/max_versions"]
    names += [f"section{index % 8}/metric{index}" for index in range(NAMES)]
    with (run_dir / "metrics.jsonl").open("w") as rows:
        for step in range(1, num_groups // GROUPS_PER_STEP + 1):
            values = {name: random.random() for name in names}
            rows.write(json.dumps({"step": step, "time_s": float(step), **values}) + "\n")


def make_store(run_dir: Path, num_groups: int) -> None:
    """Write the store."""
    connection = connect(run_dir / "store.sqlite")
    connection.executescript(f"PRAGMA journal_mode=wal; BEGIN; {create_schema()}")
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    prompts = ((f"p{i}", "train", "code", f"Sum the numbers; number {i}") for i in range(PROMPTS))
    connection.executemany(
        "INSERT INTO prompts VALUES (?1, ?2, ?3, ?4, checksum(?1, ?2, ?3, ?4))", prompts
    )
    columns = (
        "group_id, purpose, prompt_id, position, num_samples, state, attempt, generator,"
        " incarnation, version, train_version, oldest_version, newest_version, num_tokens,"
        " num_trained_tokens, reward_mean, pass_rate, response_length_mean, truncated_share,"
        " generation_s, rewards, parts, admitted_s, changed_s"
    )
    marks = ",".join("?" * (columns.count(",") + 1))
    connection.executemany(
        f"INSERT INTO groups ({columns}) VALUES ({marks})",
        (row_of(group_id) for group_id in range(num_groups)),
    )
    connection.executemany(
        "INSERT INTO transitions (group_id, attempt, state, at_s, generator, version, reason)"
        " VALUES (?,1,?,?,'generator-0',0,'')",
        (
            (group_id, state, group_id / GROUPS_PER_STEP + delay)
            for group_id in range(num_groups)
            for delay, state in enumerate(("issued", "generating", "ready", "leased", "trained"))
        ),
    )
    blobs = ((i, pack_group(group_of(i))) for i in range(num_groups - STORED, num_groups))
    connection.executemany("INSERT INTO blobs VALUES (?1, ?2, checksum(?2, ?1))", blobs)
    connection.execute("COMMIT")
    connection.close()


def row_of(group_id: int) -> tuple[object, ...]:
    """Return the ledger's row of a group."""
    version = group_id // GROUPS_PER_STEP
    rewards = [float(random.random() < 0.6) for _ in range(SAMPLES)]
    mean = sum(rewards) / SAMPLES
    return (
        group_id, "train", f"p{group_id % PROMPTS}", group_id, SAMPLES, "trained", 1, "generator-0",
        "x", version, version, max(version - group_id % 3, 0), version, SAMPLES * TOKENS,
        SAMPLES * TOKENS, mean, mean, float(TOKENS), float(group_id % 50 == 0), 1.0,
        json.dumps(rewards), json.dumps({"tests_passed": mean}), float(version), float(version),
    )  # fmt: skip


def group_of(group_id: int) -> Group:
    """Return the trajectories of a group."""
    return Group(
        group_id=group_id,
        attempt=1,
        prompt_id=f"p{group_id % PROMPTS}",
        purpose=Purpose.TRAIN,
        data_source="code",
        generator="generator-0",
        admitted_version=group_id // GROUPS_PER_STEP,
        trajectories=[trajectory() for _ in range(SAMPLES)],
        generation_s=1.0,
    )


def trajectory() -> Trajectory:
    """Return one sample."""
    length = 2 * TOKENS
    is_response = np.arange(length) >= TOKENS
    return Trajectory(
        token_ids=np.random.randint(0, 1000, length, dtype=np.int32),
        prompt_length=TOKENS,
        loss_mask=is_response,
        behavior_logprobs=np.where(is_response, -0.5, 0.0).astype(np.float32),
        versions=np.where(is_response, 3, NO_VERSION).astype(np.int32),
        is_truncated=False,
        score=Score(reward=1.0, parts={}, verdicts=(Verdict.PASS,), latency_s=0.1),
    )


if __name__ == "__main__":
    main()
