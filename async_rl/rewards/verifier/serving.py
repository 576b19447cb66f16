"""One verifier from its first cell to its last answer: opens the jail, serves HTTP on a socket,
drains and exits.

Takes settings and a bound socket, waits for requests, and sends answers. Woken by: a request;
`stopping`, after which new work is refused, admitted work is finished, and the server exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from async_rl.config.rewards import RewardConfig, SandboxConfig, VerifiersConfig
from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.errors import ConfigError, Unavailable
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.binaries import Binaries
from async_rl.rewards.verifier.command_judging import CommandJudge
from async_rl.rewards.verifier.containers import Containers
from async_rl.rewards.verifier.intake import ACCEPTED_AT_ONCE, Intake, sparse_logs
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.packaged_cells import PackagedCells
from async_rl.rewards.verifier.reward_process import RewardProcess
from async_rl.rewards.verifier.server import build_app
from async_rl.rewards.verifier.service import VerifierService
from async_rl.sandbox.cells import Cells, Unsafe
from async_rl.wire.http import serving, url_of

QUEUE_SIZE = 4096
"""Programs that wait at most; the next is refused with 429. Eight generators with 64 groups of 8
can have this number in flight; more than usual, because some trainers count a refusal as a wrong
answer.
"""


@contextlib.asynccontextmanager
async def open_service(
    verifiers: VerifiersConfig,
    sandbox: SandboxConfig,
    activity: Activity,
    timeouts: TimeoutsConfig,
    reward: RewardConfig | None = None,
) -> AsyncIterator[VerifierService]:
    """A service with warm cells, and with the functions of `reward` if it is given.

    Raises ConfigError if no jail works here, with the reason of each level, or if a function cannot
    be loaded.
    """
    allow_unsafe = sandbox.allow_unsafe
    # As many again for slow programs, which would otherwise hold up the quick ones.
    num_cells = 2 * verifiers.cells
    async with contextlib.AsyncExitStack() as stack:
        try:
            cells = await Cells.start(num_cells, allow_unsafe=allow_unsafe)
        except Unsafe as error:
            raise ConfigError(str(error)) from error
        await stack.enter_async_context(cells)
        packaged = PackagedCells(cells, num_cells, sandbox.packages, allow_unsafe=allow_unsafe)
        stack.push_async_callback(packaged.close)
        binaries = Binaries(Path.home() / ".cache" / "async_rl" / "programs")
        commands = CommandJudge(num_cells, cells.level, cells.reasons, binaries)
        containers = Containers(sandbox.container_engine, sandbox.rootfs, verifiers.cells)
        judge = Judge(cells, sandbox, packaged, commands, containers)
        stack.push_async_callback(judge.close)
        functions = None
        if reward is not None:
            functions = RewardProcess(reward, timeouts=timeouts)
            stack.push_async_callback(functions.close)
            await functions.start()
        yield VerifierService(
            functions=functions,
            cells=cells,
            judge=judge,
            queue_size=QUEUE_SIZE,
            num_cells=verifiers.cells,
            num_spare=verifiers.cells,
            queue_timeout_s=timeouts.score_s,
            activity=activity,
        )


async def serve(
    service: VerifierService,
    listener: socket.socket,
    *,
    token: str,
    ready: Callable[[str], Awaitable[None]],
    stopping: asyncio.Event,
    log: logging.Logger,
) -> None:
    """Serve until `stopping`, then finish admitted programs.

    ready: called with the URL once requests are accepted.
    """
    intake = Intake.for_cells(2 * service.num_cells)
    app, url = build_app(service, token, intake.known), url_of(listener)
    http = serving(app, listener, accepted_at_once=ACCEPTED_AT_ONCE, protocol=intake.protocol)
    async with sparse_logs(), http as server:
        await ready(url)
        stopped = asyncio.create_task(stopping.wait(), name="stopping")
        await asyncio.wait((server, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if server.done():
            raise Unavailable(f"the HTTP server on {url} ended unexpectedly")
        if not await service.drain(service.queue_timeout_s):
            log.warning("left with programs unfinished after %g s", service.queue_timeout_s)
