"""A verifier: serves verdicts over HTTP on a free port, from cells that stay warm.

takes: programs with their tests, over HTTP, from clients with the run's token
waits for: a free cell
returns: one verdict per test
woken by: a request; `stopping`, after which it finishes the admitted requests
"""

from async_rl.rewards.verifier.server import serve
from async_rl.rewards.verifier.service import open_service
from async_rl.runtime.context import ProcessContext
from async_rl.wire.http import listen


async def run(context: ProcessContext) -> None:
    """Start the cells, serve until a stop, finish the admitted requests."""
    config = context.config

    async def ready(url: str) -> None:
        await context.register(url)

    # The cells before the address: a client that finds the verifier expects verdicts.
    async with open_service(config, context.activity, has_functions=True) as service:
        pool = service.cells
        context.log.info(
            "jail at level %d with %d cells%s",
            pool.level,
            config.verifiers.cells,
            "".join(f"; {r}" for r in pool.reasons),
        )
        # A free port, because several verifiers of a run serve on one machine.
        with listen(context.host, 0) as listener:
            await serve(
                service,
                listener,
                token=context.token,
                ready=ready,
                stopping=context.stopping,
                log=context.log,
            )
