"""A verifier on a real socket, in this process, and the configuration its client needs."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from composing import compose_unchecked
from rewards_support import LIMITS
from starlette.types import ASGIApp

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.observability.activity import Activity
from async_rl.processes import verifier as verifier_main
from async_rl.rewards.scoring import VerifierClient
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.reward_process import RewardProcess
from async_rl.rewards.verifier.server import build_app
from async_rl.rewards.verifier.service import VerifierService
from async_rl.sandbox.cells import Cells
from async_rl.wire.http import serving, url_of

TOKEN = "secret"


class Served(NamedTuple):
    """A live verifier."""

    url: str
    service: VerifierService

    @property
    def base(self) -> str:
        """The URL for clients that send no header of ours."""
        return f"{self.url}/token/{TOKEN}"


def run_config(*, timeout_s: float = 20.0, mode: str = "all_or_nothing") -> RunConfig:
    """The sections that client and scorer read."""
    settings = [f"timeouts.group_s={4 * timeout_s}", f"reward.mode={mode}"]
    base = compose_unchecked("ppo_code", [*settings, "reward.fail_reward=-1", "verifiers.cells=1"])
    return replace(base, sandbox=LIMITS)


def no_functions() -> RewardProcess:
    """The functions of a configuration that has none."""
    config = run_config()
    return RewardProcess(config.reward, timeouts=config.timeouts)


@contextlib.asynccontextmanager
async def serve(app: ASGIApp) -> AsyncIterator[str]:
    """The application on a loopback port; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(app, listener, close_s=1):
            yield url_of(listener)


@contextlib.asynccontextmanager
async def verifier(
    *, num_cells: int = 1, queue_size: int = 64, queue_timeout_s: float = 30
) -> AsyncIterator[tuple[str, VerifierService]]:
    """A whole verifier: cells, service, socket."""
    async with await Cells.start(num_cells) as cells:
        limits: Any = {"queue_size": queue_size, "queue_timeout_s": queue_timeout_s}
        judge = Judge(cells, LIMITS, num_others=num_cells)
        service = VerifierService(
            cells=cells, judge=judge, functions=no_functions(), num_cells=num_cells, **limits
        )
        try:
            async with serve(build_app(service, TOKEN)) as url:
                yield url, service
        finally:
            await service.judge.close()


@contextlib.asynccontextmanager
async def verifier_process(config: RunConfig) -> AsyncIterator[VerifierClient]:
    """The verifier as a run starts it, with a client; ends it by its own drain. Raises what its
    start raises.
    """
    registered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def register(address: str) -> None:
        registered.set_result(address)

    context: Any = SimpleNamespace(
        config=config, host="127.0.0.1", token=TOKEN, register=register, stopping=asyncio.Event(),
        activity=Activity(), log=logging.getLogger("verifier"),
    )  # fmt: skip
    process = asyncio.create_task(verifier_main.run(context))
    await asyncio.wait((process, registered), return_when=asyncio.FIRST_COMPLETED)
    if process.done():
        process.result()
    client = VerifierClient(config, TOKEN)
    client.update_servers([registered.result()])
    try:
        yield client
    finally:
        await client.close()
        context.stopping.set()
        await process
