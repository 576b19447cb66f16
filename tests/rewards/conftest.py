import asyncio
import threading
from collections.abc import Iterator

import pytest
from rewards_support import Jail, Served, opened, verifier

from async_rl.sandbox.protocol import LANDLOCK, NAMESPACES


@pytest.fixture(scope="session")
def jail() -> Iterator[Jail]:
    yield from opened(NAMESPACES)


@pytest.fixture(scope="session", params=[NAMESPACES, LANDLOCK], ids=["namespaces", "landlock"])
def each_jail(request: pytest.FixtureRequest) -> Iterator[Jail]:
    """For what the levels do differently; the judge is the same code at each."""
    for made in opened(request.param):
        if made.cells.level != request.param:
            pytest.skip(f"this machine has no level {request.param}: {made.cells.reasons}")
        yield made


@pytest.fixture(scope="session")
def served(jail: Jail) -> Iterator[Served]:
    """A live verifier in a thread of its own, for clients that block and tests that leave it as it
    was.
    """
    started, stopping = threading.Event(), threading.Event()
    made: list[Served] = []

    async def serve() -> None:
        async with verifier(num_cells=2) as (url, service):
            made.append(Served(url, service))
            started.set()
            await asyncio.to_thread(stopping.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    yield made[0]
    stopping.set()
    thread.join()
