"""Environments of `verifiers` (0.4, for prime-rl) as agents.

    rollout.fn=[async_rl.adapters.verifiers_tasks:play]

A row of the data has `environment`, the configuration of the environment (its `[env]` block), and
`task`, the data of one task of its taskset. To write such rows:

    python -m async_rl.adapters.verifiers_tasks '{"taskset": {"id": "my-taskset"},
        "agent": {"runtime": {"type": "subprocess"}}}' 1000 > tasks.jsonl

The policy plays every agent of the environment that has no separate client. The weighted rewards
of its agents, averaged over the agents, are the rewards of the sample.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import verifiers.v1 as vf
from verifiers.v1.utils import loaders

from async_rl.sessions.endpoint import Endpoint

_keys = itertools.count()


async def play(task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """Play the episode of the row; return its rewards by name."""
    row = task["row"]
    env = _load(row["environment"])
    kind = type(env.taskset).task_type()
    data = kind.data_type().model_validate(row["task"])
    with _variable(endpoint.api_key) as variable:
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        context = vf.ModelContext(model=endpoint.model, client=client)
        # Per episode: an environment that serves keeps a client for every token it has seen.
        async with env.serving():
            episode = await env.run_episode(kind(data, env.config.taskset.task), context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(f"the episode of verifiers failed: {reasons or 'no reason was given'}")
    return _rewards(episode)


def _rewards(episode: Any) -> dict[str, float]:
    # An agent that an environment marks as not trainable is a judge or an opponent, whose reward is
    # not the policy's.
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    rewards: dict[str, float] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[name] = rewards.get(name, 0.0) + reward.value / len(traces)
    if not rewards:
        raise ValueError("no agent of the environment has a reward; give its tasks a vf.reward")
    return rewards


def _load(environment: Mapping[str, Any]) -> Any:
    return loaders.load_environment(loaders.resolve_env_config(dict(environment)))


@contextlib.contextmanager
def _variable(token: str) -> Iterator[str]:
    """An environment variable with the token, which is how verifiers takes a key. verifiers gives
    programs that it starts no variable with API_KEY in its name.
    """
    name = f"ASYNC_RL_API_KEY_{next(_keys)}"
    os.environ[name] = token
    try:
        yield name
    finally:
        del os.environ[name]


def main() -> None:
    """Write the first tasks of an environment as rows."""
    environment = msgspec.json.decode(sys.argv[1], type=dict[str, Any])
    name = environment["taskset"]["id"]
    for task in itertools.islice(_load(environment).taskset, int(sys.argv[2])):
        data = task.data.model_dump(mode="json", exclude_none=True)
        row = {"prompt": task.data.prompt_text, "data_source": name, "prompt_id": task.key}
        line = msgspec.json.encode({**row, "environment": environment, "task": data})
        sys.stdout.write(line.decode() + "\n")


if __name__ == "__main__":
    main()
