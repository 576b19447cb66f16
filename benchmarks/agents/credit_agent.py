"""The function of benchmarks/agents/credit.py: starts its program in a jail, and rewards it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from async_rl.rollouts.environments import in_jail, variables
from async_rl.sessions.endpoint import Endpoint

_COMMAND = [sys.executable, str(Path(__file__).resolve().with_name("credit_program.py"))]


def share(text: str) -> float:
    """Return the share of lower-case letters, which is the reward of a planner's answer."""
    return sum(map(str.islower, text)) / max(1, len(text))


async def solve(task: dict[str, Any], endpoint: Endpoint) -> float:
    """Run the agent in a jail, and reward it with the key that the jail has not."""
    async with in_jail(_COMMAND, endpoint) as start:
        process = await asyncio.create_subprocess_exec(
            *start.command,
            env={**start.environment, **variables(start.endpoint, task)},
            pass_fds=start.descriptors,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    written = json.loads(printed)
    key = {"Authorization": f"Bearer {endpoint.session_key}"}
    async with httpx.AsyncClient(headers=key) as client:
        plan = {"call": written[0][0], "reward": {"letters": share(written[0][1])}}
        for reward in (plan, {"role": "solver", "reward": 0.25 * (task["sample"] % 2)}):
            answer = await client.post(f"{endpoint.session_url}/reward", json=reward)
            answer.raise_for_status()
    return float(task["sample"] % 4 == 0)
