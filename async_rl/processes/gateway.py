"""A gateway: agents make its groups, over an endpoint that records what it serves.

takes: tickets from the buffer, as a generator does
waits for: a generator with weights; then tickets, and the environments
returns: complete groups to the buffer, or the ticket with the reason of a failure
woken by: the calls of agents, the exit of an environment, Drain (finish the groups in flight, then
exit), `stopping` (exit now; the buffer issues the groups again)
"""

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec

from async_rl.core.os import write_private
from async_rl.core.types import Ticket
from async_rl.data.tokenizer import load_tokenizer, spare_torch
from async_rl.protocol.generator import Drain
from async_rl.rollouts.agents import Agents
from async_rl.rollouts.environments import Environments, open_environments
from async_rl.rollouts.groups import Groups
from async_rl.rollouts.journal import Journal
from async_rl.rollouts.remote import RemoteEngines
from async_rl.rollouts.rollout import Rollouts
from async_rl.runtime.context import ProcessContext, load_control
from async_rl.sessions.open_sessions import Offers, Sessions, key_from
from async_rl.sessions.server import KEEP_ALIVE_S, build_app, spare_heap
from async_rl.wire.http import listen_again, serving, url_of


async def run(context: ProcessContext) -> None:
    """Serve sessions and make groups until a stop."""
    config = context.config
    # A gateway has no model, and transformers would load torch, which takes 260 MB.
    spare_torch(config)
    await context.directory.changed(-1)  # the first member list
    tokenizer = await asyncio.to_thread(load_tokenizer, config, context.model_path)
    spare_heap()
    environments: Environments
    offers = None
    if config.agent.is_external:
        # The other half of the time is for a program that takes the session at the last moment.
        environments = offers = Offers(key_from(context.token), config.timeouts.group_s / 2)
    else:
        environments = open_environments(config.agent)
    control = load_control(context.run_dir)
    # The port distinguishes two lives of a supervisor in containers, where every pid may be the
    # same.
    life = f"{control.pid}-{control.address.rpartition(':')[2]}"
    folder = context.run_dir / "sessions" / context.name
    journal = Journal(folder, life)
    sessions = Sessions(journal.secret, journal.returning)
    engines = RemoteEngines(context)
    # Programs keep the address of a gateway that starts again.
    with listen_again(context.host, folder / "port") as listener:
        app = build_app(sessions, offers)
        url = url_of(listener)
        async with serving(app, listener, keep_alive_s=KEEP_ALIVE_S):
            agents = Agents(
                config,
                tokenizer=tokenizer,
                sessions=sessions,
                environments=environments,
                journal=journal,
                url=url,
                read_calls=engines.read_calls,
            )
            rollouts = Rollouts(
                config,
                tokenizer=tokenizer,
                token=context.token,
                name=context.name,
                activity=context.activity,
                maker=agents.sample,
            )
            shown = announced(context, url) if offers is not None else contextlib.nullcontext()
            try:
                with shown:
                    await _work(context, engines, rollouts, sessions, journal)
            finally:
                # The environments first: their programs still call for samples and scores.
                await environments.close()
                await rollouts.close()


@contextlib.contextmanager
def announced(context: ProcessContext, url: str) -> Iterator[None]:
    """Show the owner of the run, during the block, the address where programs take sessions,
    and the key.
    """
    folder = context.run_dir / "gateways"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{context.name}.json"
    address = {"sessions_url": f"{url}/sessions", "api_key": key_from(context.token)}
    found = msgspec.json.encode(address)
    write_private(file, found)
    context.log.info("programs find this gateway by %s", file)
    try:
        yield
    finally:
        # A successor may have started already, if this gateway was given up.
        with contextlib.suppress(FileNotFoundError):
            if file.read_bytes() == found:
                file.unlink()


async def _work(
    context: ProcessContext,
    engines: RemoteEngines,
    rollouts: Rollouts,
    sessions: Sessions,
    journal: Journal,
) -> None:
    def on_version() -> None:
        context.version = engines.version
        context.life = engines.life
        groups.weights_loaded()
        context.group.create_task(groups.report_version(), name="report version")

    def closed(ticket: Ticket) -> None:
        journal.forget(ticket.group_id)
        engines.forget(ticket)

    groups = Groups(
        context, rollouts, engine=lambda: engines, limit=asyncio.timeout, on_closed=closed
    )

    await context.serve({Drain: groups.drain})
    owned = {
        "follow generators": engines.follow(on_version),
        "follow verifiers": rollouts.follow_verifiers(context.directory),
        "show sessions": _show(context, sessions),
    }
    await context.work_until_stopped(groups.make(), owned)


async def _show(context: ProcessContext, sessions: Sessions) -> None:
    while True:
        for name, value in sessions.gauges.items():
            context.activity.gauge(f"sessions/{name}", value)
        await asyncio.sleep(context.config.timeouts.heartbeat_s)
