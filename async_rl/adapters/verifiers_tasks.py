"""Environments of `verifiers` (0.4, for prime-rl) as agents.

    rollout.fn=[async_rl.adapters.verifiers_tasks:play]

A row of the data has `environment`, the configuration of the environment (its `[env]` block), and
`task`, the data of one task of its taskset. To write such rows:

    python -m async_rl.adapters.verifiers_tasks '{"taskset": {"id": "my-taskset"},
        "agent": {"runtime": {"type": "subprocess"}}}' 1000 > tasks.jsonl

The policy plays every agent of the environment that has no separate client. Each agent is a role of
the session with the mean of its weighted rewards; one that the environment marks as not trainable
is not trained.
"""

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import msgspec
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils import loaders

from async_rl.core.heads import means_by_name
from async_rl.sessions.endpoint import Endpoint

_keys = itertools.count()


async def play(task: Mapping[str, Any], endpoint: Endpoint) -> float:
    """Play the episode of the row, and post the rewards of its agents."""
    row = task["row"]
    env = _load(row["environment"])
    kind = type(env.taskset).task_type()
    data = kind.data_type().model_validate(row["task"])
    with _variable(endpoint.api_key) as variable:
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        context = vf.ModelContext(model=endpoint.model, client=client)
        _name_roles(env, context)
        # Per episode: an environment that serves keeps a client for every token it has seen.
        async with env.serving():
            episode = await env.run_episode(kind(data, env.config.taskset.task), context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"the episode of verifiers failed: {errors}")
    key = {"Authorization": f"Bearer {endpoint.session_key}"}
    async with httpx.AsyncClient(headers=key) as http:
        for role, rewards in _rewards(episode).items():
            credit = {"role": role, "reward": rewards}
            (await http.post(f"{endpoint.session_url}/reward", json=credit)).raise_for_status()
    # The rewards of the roles are all: the verifiers do not score the sample.
    return 0.0


def _name_roles(env: Any, context: Any) -> None:
    """Let each agent of an episode request the policy as a role, once the environment has decided
    which of them are trained.
    """
    own_setup = env.setup

    async def setup(agents: Any) -> None:
        await own_setup(agents)
        for name in agent_config_fields(env.config):
            agent = getattr(agents, name)
            if agent.ctx.client == context.client:
                suffix = "" if agent.trainable else ":untrained"
                agent.ctx = dataclasses.replace(agent.ctx, model=f"{context.model}/{name}{suffix}")

    env.setup = setup


def _rewards(episode: Any) -> dict[str, dict[str, float]]:
    """Return the mean rewards by name of each agent that is trained."""
    of_roles: dict[str, list[dict[str, float]]] = {}
    for trace in episode.traces:
        rewards = {
            name: reward.value for name, reward in trace.rewards.items() if reward is not None
        }
        if trace.agent.trainable and rewards:
            of_roles.setdefault(trace.agent.name, []).append(rewards)
    if not of_roles:
        raise ValueError("no agent of the environment has a reward; give its tasks a vf.reward")
    return {role: means_by_name(rows) for role, rows in of_roles.items()}


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
