"""A gateway: agents make its groups, over an endpoint that records what it serves.

takes: tickets from the buffer, as a generator does
waits for: a generator with weights; then tickets, and the environments
returns: complete groups to the buffer, or the ticket with the reason of a failure
woken by: the calls of agents, the end of an environment, `stopping`, after which the buffer issues
the open groups again
"""

from __future__ import annotations

import asyncio

from async_rl.data.tokenizer import load_tokenizer, spare_torch
from async_rl.rewards.verifier.serving import listen
from async_rl.rollouts.agents import Agents
from async_rl.rollouts.environments import open_environments
from async_rl.rollouts.groups import Groups
from async_rl.rollouts.remote import RemoteEngines
from async_rl.rollouts.rollout import Rollouts
from async_rl.runtime.context import ProcessContext
from async_rl.sessions.server import Sessions, build_app
from async_rl.sessions.serving import serving


async def run(context: ProcessContext) -> None:
    """Serve sessions and make groups until a stop."""
    config = context.config
    spare_torch(config)
    await context.directory.changed(-1)  # the first member list
    tokenizer = await asyncio.to_thread(load_tokenizer, config, context.model_path)
    sessions = Sessions()
    environments = open_environments(config.agent)
    with listen(context.host, 0) as listener:
        async with serving(build_app(sessions), listener) as url:
            agents = Agents(
                config, tokenizer=tokenizer, sessions=sessions, environments=environments, url=url
            )
            rollouts = Rollouts(
                config,
                tokenizer=tokenizer,
                token=context.token,
                name=context.name,
                activity=context.activity,
                agents=agents,
            )
            try:
                await _work(context, rollouts, sessions)
            finally:
                await environments.close()
                await rollouts.close()


async def _work(context: ProcessContext, rollouts: Rollouts, sessions: Sessions) -> None:
    def on_version() -> None:
        context.version = engines.version
        groups.weights_loaded()
        context.group.create_task(groups.report_version(), name="report version")

    engines = RemoteEngines(context, on_version)
    groups = Groups(context, rollouts, engines)
    await context.serve({})
    async with asyncio.TaskGroup() as group:
        owned = [
            group.create_task(engines.follow(), name="follow generators"),
            group.create_task(_follow_verifiers(context, rollouts), name="follow verifiers"),
            group.create_task(_show(context, sessions), name="show sessions"),
            group.create_task(groups.make(), name="make groups"),
        ]
        await context.stopping.wait()
        for task in owned:
            task.cancel()


async def _follow_verifiers(context: ProcessContext, rollouts: Rollouts) -> None:
    while True:
        revision = context.directory.revision
        rollouts.update_verifiers([m.address for m in context.directory.of_role("verifier")])
        await context.directory.changed(revision)


async def _show(context: ProcessContext, sessions: Sessions) -> None:
    while True:
        context.activity.gauge("sessions/open", len(sessions))
        context.activity.gauge("sessions/calling", sessions.num_calling)
        await asyncio.sleep(context.config.timeouts.heartbeat_s)
