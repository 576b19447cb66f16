"""Environments of `gymnasium` that read and write text, as agents.

    rollout.fn=[async_rl.adapters.gymnasium_text:play]

A row of the data names its environment: `environment` (the id for `gymnasium.make`, with its module
as `my_package:Guess-v0`), and optional `seed`, `options` and `arguments` (of the environment). To
write such rows:

    python -m async_rl.adapters.gymnasium_text my_package:Guess-v0 1000 > guess.jsonl

Observations become messages of the user, answers become actions; the sum of the rewards is the
reward of the sample. Without room for another answer the episode stops as it is.
"""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import msgspec
import openai

from async_rl.sessions.endpoint import Endpoint

_OUT_OF_ROOM = ("context_length_exceeded", "too_many_turns")
"""The endpoint's reasons to refuse a call that no shorter call would avoid."""


async def play(task: Mapping[str, Any], endpoint: Endpoint) -> float:
    """Play the episode of the row; return the sum of its rewards."""
    # In a thread: environments block, and other episodes run in the same process.
    env, observation = await asyncio.to_thread(begin, task["row"])
    total = 0.0
    messages: list[Any] = []
    is_over = False
    try:
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key
        ) as client:
            while not is_over:
                messages.append({"role": "user", "content": observation})
                try:
                    answer = await client.chat.completions.create(
                        model=endpoint.model, messages=messages
                    )
                except openai.BadRequestError as error:
                    if error.code in _OUT_OF_ROOM:
                        break
                    raise
                text = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                step = await asyncio.to_thread(env.step, text)
                observation, reward, is_terminated, is_truncated, _ = step
                total += float(reward)
                is_over = is_terminated or is_truncated
    finally:
        await asyncio.to_thread(env.close)
    return total


def begin(row: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the environment of a row and its first observation."""
    # The checker's warnings are for the authors of environments, once, not for every sample.
    arguments = {"disable_env_checker": True, **row.get("arguments", {})}
    env = gymnasium.make(row["environment"], **arguments)
    for name, space in (("observations", env.observation_space), ("actions", env.action_space)):
        if not isinstance(space, gymnasium.spaces.Text):
            raise TypeError(
                f"the {name} of {row['environment']} are {space}, not text; register it behind"
                " wrappers (gymnasium.ObservationWrapper, ActionWrapper) whose space is"
                " gymnasium.spaces.Text"
            )
    observation, _ = env.reset(seed=row.get("seed"), options=row.get("options"))
    return env, observation


def main() -> None:
    """Write rows of one environment, with the seeds from 0."""
    environment = sys.argv[1]
    count = int(sys.argv[2])
    for seed in range(count):
        row = {"environment": environment, "seed": seed}
        env, observation = begin(row)
        env.close()
        line = msgspec.json.encode({"prompt": observation, "data_source": environment, **row})
        sys.stdout.write(line.decode() + "\n")


if __name__ == "__main__":
    main()
