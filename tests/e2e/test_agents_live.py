"""A run whose samples agents make, through the loss of each process that takes part."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from e2e_support import LiveRun, async_rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Key = tuple[str, int, int]
PAUSE_S = 0.5
# The parent of a worker is the gateway. The log-probs of an answer identify its tokens.
AGENT = """
import asyncio, json, os, time
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

HTTP = DefaultAsyncHttpxClient()
PAUSE_S = {pause_s}


async def solve(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=HTTP)
    messages = [{{"role": "user", "content": task["prompt"]}}]
    for turn in range(2):
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=messages, max_tokens=64, logprobs=True
        )
        choice = answer.choices[0]
        read = [token.logprob for token in choice.logprobs.content]
        with open({log!r}, "a") as log:
            row = [os.getppid(), task["prompt_id"], task["sample"], turn, read, time.time()]
            log.write(json.dumps(row) + "\\n")
        messages += [choice.message, {{"role": "user", "content": task["prompt"]}}]
        # Most of the time an answer is with its agent and its group is open.
        await asyncio.sleep(PAUSE_S)
"""


def rows_of(log: Path) -> list[list[Any]]:
    """The complete lines: an agent may be writing the last one."""
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]]


def answers(log: Path, gateway: int | None = None) -> dict[Key, list[float]]:
    """The last answers that agents read, by prompt, sample and turn; gateway: only those of one."""
    rows = rows_of(log)
    return {(row[1], row[2], row[3]): row[4] for row in rows if gateway in (None, row[0])}


def num_pausing(log: Path) -> int:
    """The sessions that have their first answer and will ask for the second one."""
    return sum(row[3] == 0 and row[5] > time.time() - PAUSE_S / 2 for row in rows_of(log))


def stored(run: LiveRun) -> list[dict[str, Any]]:
    """The samples that are still stored, those of trained groups."""
    file = run.run_dir / "samples.jsonl"
    done = async_rl("rollouts", str(run.run_dir), "--export", str(file))
    assert done.returncode == 0, done
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if row["state"] == "trained"]


def test_sessions_survive_or_are_drawn_again_and_each_is_trained_once(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    # Under another name, so that the run uses the model that other tests have made already.
    (tmp_path / "my_agent.py").write_text(AGENT.format(log=str(log), pause_s=PAUSE_S))
    run = LiveRun(
        tmp_path,
        "conf=grpo_code",
        f"rollout.fn=[{tmp_path}/my_agent.py:solve]",
        "rollout.max_turns=2",
        "data.max_response_tokens=176",
        "generation.engine=hf",
        "buffer.groups_per_step=4",
        "generation.group_size=4",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=2",
        "num_steps=7",
        # Samples of all steps, those before the kills too.
        "recording=full",
    )
    request.addfinalizer(run.end)
    run.until(lambda: run.step >= 1, "the first step")
    gateway = psutil.Process(run.pid_of("gateway-0"))
    workers = [p for p in gateway.children() if "async_rl.rollouts.agent_worker" in p.cmdline()]
    assert len(workers) == 2
    workers[0].send_signal(signal.SIGKILL)
    for lost in (("generator-0", "learner-0"), ("buffer",)):
        step = run.step
        for process in lost:
            run.kill(process)
        run.until(lambda step=step: run.step > step, f"a step after the loss of {lost}")  # type: ignore[misc]
    run.until(lambda: num_pausing(log) >= 4, "sessions between two answers")
    run.kill("gateway-0")
    run.serves_again("gateway-0", gateway.pid)
    successor = run.pid_of("gateway-0")
    assert run.wait() == 0, run.terminal
    read, read_again = answers(log, gateway.pid), answers(log, successor)
    shared = read.keys() & read_again.keys()
    # Their agents began again and got the same answers.
    assert len(shared) >= 4
    assert {key: read_again[key] for key in shared} == {key: read[key] for key in shared}
    assert run.rows[-1]["step"] == 7
    # The worker's attempts were given up, counted, and drawn again.
    assert max(row.get("failures/agent_failed", 0) for row in run.rows) >= 1
    assert run.audit()["problems"] == []
    assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    samples = stored(run)
    assert len(samples) == 7 * 4 * 4
    last = answers(log)
    for sample in samples:
        mask = np.array(sample["loss_mask"])
        key = (sample["prompt_id"], sample["sample"])
        expected = [*last[(*key, 0)], *last[(*key, 1)]]
        assert np.array(sample["behavior_logprobs"])[mask].tolist() == expected
    shown = async_rl("rollouts", str(run.run_dir)).stdout
    assert "gateway-0" in shown
