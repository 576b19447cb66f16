"""Compare the sessions of a group of agents as trees of tokens with a row for each history: tokens,
bytes on the wire and in the store, time of the gateway, and time of the learner.

Run: `python -m benchmarks.agents.trees [--samples N] [--turns N] [--only NAME] [--no-training]
[--own-directories] [--agent COMMAND...]`.

The built-in agents each make N calls. `--agent` starts any other program instead, with the
variables of an agent of a run. For Claude Code: `--agent claude -p --model policy "Say hello."`

The policy is a stub. Both forms of the session go through one update of the same random model, with
the learner's own packing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack
from async_rl.core.calls import Support
from async_rl.core.heads import pack_group
from async_rl.core.types import Group, IntArray, Purpose, Score, Trajectory
from async_rl.learner.loading import load_policy
from async_rl.learner.models import Policy
from async_rl.protocol.generator import Completion, joined, only_read
from async_rl.rollouts.groups import with_common_prompt
from async_rl.sessions.chat import Chat
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.record import Record
from async_rl.sessions.server import build_app
from async_rl.sessions.session import Session
from async_rl.wire.http import serving, url_of
from benchmarks.agents.agents_processes import text, tokenizer
from benchmarks.figures import figure
from benchmarks.generation.generation import random_model

_ANSWER = 50
_SYSTEM, _QUESTION = 1000, 60
"""Words."""

Say = Callable[[list[Any]], Awaitable[Any]]


def _user(rng: random.Random, words: int = _QUESTION) -> Any:
    return {"role": "user", "content": text(rng, words)}


def _system(content: str) -> Any:
    return {"role": "system", "content": content}


async def appends(say: Say, turns: int, rng: random.Random) -> None:
    """Repeat and extend the history."""
    messages = [_system(text(rng, _SYSTEM))]
    for _ in range(turns):
        messages.append(_user(rng))
        messages.append(await say(messages))


async def forgets(say: Say, turns: int, rng: random.Random) -> None:
    """Replace all but the last messages by a note."""
    system = _system(text(rng, _SYSTEM))
    messages: list[Any] = []
    for _ in range(turns):
        messages.append(_user(rng))
        messages.append(await say([system, *messages]))
        messages = [_user(rng, 20), *messages[-4:]]


async def counts(say: Say, turns: int, rng: random.Random, share: float = 0.0) -> None:
    """Have the number of the call in the system prompt, after this share of it."""
    words = text(rng, _SYSTEM)
    at = int(share * len(words))
    messages: list[Any] = []
    for turn in range(turns):
        messages.append(_user(rng))
        system = _system(f"{words[:at]} turn {turn} {words[at:]}")
        messages.append(await say([system, *messages]))


async def counts_late(say: Say, turns: int, rng: random.Random) -> None:
    """Have the number of the call after most of the system prompt."""
    await counts(say, turns, rng, 0.8)


async def asks_helpers(say: Say, turns: int, rng: random.Random) -> None:
    """Let three helpers with a common beginning work at the same time."""

    async def helper(begin: list[Any], seed: int) -> None:
        own = random.Random(seed)
        messages = [*begin]
        for _ in range(max(1, turns // 4)):
            messages.append(_user(own))
            messages.append(await say(messages))

    begin = [_system(text(rng, _SYSTEM))]
    await helper([_system(text(rng, _SYSTEM))], 0)
    await asyncio.gather(*(helper(begin, seed) for seed in (1, 2, 3)))


AGENTS = {
    "appends": appends,
    "forgets": forgets,
    "counts": counts,
    "counts late": counts_late,
    "asks helpers": asks_helpers,
}


def open_session(words: Any, seed: int) -> Session:
    """Return a session whose policy writes random words."""
    rng = np.random.default_rng(seed)
    ids = np.array(words(text(random.Random(0), 400), add_special_tokens=False)["input_ids"])
    end = words.convert_tokens_to_ids("<|end|>")

    async def write(
        name: str, before: IntArray, most: int, support: Support, shown: Any
    ) -> Completion:
        written = np.append(rng.choice(ids, min(most, _ANSWER) - 1), end).astype(np.int32)
        return Completion(
            token_ids=written,
            logprobs=np.log(rng.uniform(0.01, 1, len(written))).astype(np.float32),
            versions=np.zeros(len(written), np.int32),
            is_truncated=False,
        )

    async def run(body: bytes) -> Any:
        raise NotImplementedError

    prompt = np.array(words("Say hello.", add_special_tokens=False)["input_ids"], np.int32)
    limits: Any = {"limit": 1 << 22, "max_turns": 1 << 20}
    limits |= {"token": f"sk-{seed}", "session_key": f"session-{seed}"}
    return Session(record=Record(prompt), chat=Chat(words), write=write, run=run, **limits)


async def played(words: Any, seed: int, agent: Any, turns: int) -> tuple[Session, float]:
    """Return the session of a built-in agent, and the CPU seconds of a call."""
    session = open_session(words, seed)
    num_calls = 0

    async def say(messages: list[Any]) -> Any:
        nonlocal num_calls
        num_calls += 1
        call = session.chat_call(messages, [])
        (number,) = session.begin([call])
        return (await session.answer(call, number)).message

    started_s = time.process_time()
    await agent(say, turns, random.Random(1))
    return session, (time.process_time() - started_s) / num_calls


async def served(words: Any, seed: int, command: Sequence[str], home: Path) -> Session:
    """Return the session of a program in a new directory."""
    session = open_session(words, seed)
    sessions = Sessions()
    with (
        sessions.open(session),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        async with serving(build_app(sessions), listener):
            endpoint = Endpoint.of(url_of(listener), session.token, session.session_key)
            variables = {
                "HOME": str(home),
                "OPENAI_BASE_URL": endpoint.base_url,
                "OPENAI_API_KEY": endpoint.api_key,
                "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
                "ANTHROPIC_API_KEY": endpoint.api_key,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            }
            await asyncio.to_thread(home.mkdir)
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=home,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            await process.wait()
            await asyncio.to_thread(shutil.rmtree, home)
    return session


def tree_of(session: Session) -> Trajectory:
    """Return the sample as the product makes it."""
    tokens, branches, _ = session.record.row()
    prompt = only_read(session.record.prompt)
    whole = joined([prompt, tokens])
    return Trajectory(
        token_ids=whole.token_ids,
        prompt_length=len(prompt.token_ids),
        loss_mask=whole.is_written,
        behavior_logprobs=whole.logprobs,
        versions=whole.versions,
        is_truncated=False,
        score=Score(reward=1.0, parts={}, verdicts=(), latency_s=0.0),
        branches=branches,
    )


def rows_of(tree: Trajectory) -> list[Trajectory]:
    """Return a row for the path to the end of each branch. Each token is trained in the first."""
    parents = dict(tree.branches)
    ends = [*(start for start, _ in tree.branches), len(tree.token_ids)]
    is_new = np.ones(len(tree.token_ids), bool)
    rows = []
    for end in ends:
        at, path = end - 1, []
        while at >= 0:
            path.append(at)
            at = parents.get(at, at - 1)
        kept = np.array(path[::-1])
        mask = tree.loss_mask[kept] & is_new[kept]
        is_new[kept] = False
        if mask.any():
            rows.append(
                replace(
                    tree,
                    token_ids=tree.token_ids[kept],
                    prompt_length=1,
                    loss_mask=mask,
                    behavior_logprobs=np.where(mask, tree.behavior_logprobs[kept], 0),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    branches=(),
                )
            )
    return rows


def group_of(samples: list[Trajectory]) -> Group:
    """Return samples as a group."""
    return Group(
        group_id=0,
        attempt=1,
        prompt_id="",
        purpose=Purpose.TRAIN,
        data_source="",
        generator="",
        admitted_version=0,
        trajectories=samples,
        generation_s=0.0,
    )


def update_s(policy: Policy, rows: Sequence[list[Trajectory]]) -> float:
    """Return the CPU seconds of forward and backward passes, one for each list of samples."""
    started_s = time.process_time()
    for samples in rows:
        batch = collate_part(whole([group_of(samples)]), device=torch.device("cpu"))
        members = range(len(samples))
        row = pack(batch, members, device=torch.device("cpu"), with_ends=False)
        output = policy(row, temperature=1.0, chunk_tokens=4096)
        (output.logprobs * batch.loss_mask[row.token_index]).sum().backward()
    return time.process_time() - started_s


def report(name: str, sessions: Sequence[Session], policy: Policy, *, trains: bool) -> None:
    """Print the figures of a group."""
    trees = with_common_prompt([tree_of(session) for session in sessions])
    rows = [row for tree in trees for row in rows_of(tree)]
    num_rows = sum(len(row.token_ids) for row in rows)
    num_tree = trees[0].prompt_length + sum(tree.response_length for tree in trees)
    figure(f"{name}: samples", len(sessions), "")
    figure(f"{name}: calls", sum(len(session.record.turns) for session in sessions), "")
    figure(f"{name}: trained tokens", sum(int(tree.loss_mask.sum()) for tree in trees), "")
    figure(f"{name}: tokens as rows", num_rows, "")
    figure(f"{name}: tokens as trees", num_tree, "")
    # An id and a log-prob of each token.
    figure(f"{name}: bytes as rows", 8 * num_rows, "")
    figure(f"{name}: bytes as trees", len(pack_group(group_of(trees))), "")
    if trains:
        tree_s = update_s(policy, [trees])
        rows_s = update_s(policy, [[row] for row in rows])
        figure(f"{name}: update as rows", rows_s, "CPU s")
        figure(f"{name}: update as trees", tree_s, "CPU s")
        figure(f"{name}: speed of the trees", rows_s / tree_s, "x")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--only", choices=[*AGENTS])
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument(
        "--own-directories", action="store_true", help="directories of different names, not one"
    )
    parser.add_argument("--agent", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    words = tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        made = random_model(Path(folder) / "model", vocabulary=len(words), hidden=384, heads=4)
        policy = load_policy(made, trust_remote_code=False)
    how: Any = {"policy": policy, "trains": not args.no_training}
    seeds = range(args.samples)
    if args.agent:
        with tempfile.TemporaryDirectory() as folder:
            # Claude Code has the name of its directory in its prompt.
            names = [f"agent-{seed if args.own_directories else 0}" for seed in seeds]
            sessions = [
                asyncio.run(served(words, seed, args.agent, Path(folder) / name))
                for seed, name in zip(seeds, names, strict=True)
            ]
        report(args.agent[0], sessions, **how)
        return
    for name in [args.only] if args.only else AGENTS:
        made_by = [asyncio.run(played(words, seed, AGENTS[name], args.turns)) for seed in seeds]
        sessions = [session for session, _ in made_by]
        calls_s = [seconds for _, seconds in made_by]
        figure(f"{name}: CPU time of a call", 1000 * sum(calls_s) / len(calls_s), "ms")
        report(name, sessions, **how)


if __name__ == "__main__":
    main()
