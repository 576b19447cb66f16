"""The gateway of a training service: its HTTP front.

takes: requests of programs
waits for: the learner and the generators, per request
returns: answers, which outlive this process
woken by: the programs, the answers of the other processes, `stopping`
"""

from __future__ import annotations

import json

from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Drain
from async_rl.runtime.context import ProcessContext
from async_rl.service.address import FOLDER, address_of
from async_rl.service.app import build_app
from async_rl.service.desk import Desk
from async_rl.service.processes import Processes
from async_rl.service.sampling import Model
from async_rl.service.store import Store
from async_rl.sessions.server import KEEP_ALIVE_S, spare_heap
from async_rl.wire.http import listen, serving, url_of

EMBEDDED = "tiny_coder"


async def serve(context: ProcessContext) -> None:
    """Serve programs until the process has to stop."""
    await context.directory.changed(-1)  # the first member list
    spare_heap()
    address = address_of(context.run_dir)
    store = Store(context.run_dir / FOLDER)
    desk = Desk(store, Processes(context), model_of(context))

    async def drain(_: Drain) -> Message:
        # The next life finds the accepted requests in the store.
        context.stopping.set()
        return Ok()

    with listen(context.host, address.port) as listener:
        app = build_app(desk, address.api_key)
        async with serving(app, listener, keep_alive_s=KEEP_ALIVE_S):
            await context.serve({Drain: drain})
            context.log.info("programs find this service at %s", url_of(listener))
            await context.work_until_stopped(desk.run(), {})


def model_of(context: ProcessContext) -> Model:
    """Return what clients are told about the base model."""
    config = context.config
    adapter = config.model.adapter
    described = json.loads((context.model_path / "config.json").read_bytes())
    return Model(
        name=config.model.path or EMBEDDED,
        tokenizer=str(context.model_path),
        vocab_size=described.get("text_config", described)["vocab_size"],
        context_tokens=config.data.max_prompt_tokens + config.data.max_response_tokens,
        most_rank=adapter.rank if adapter else 0,
    )
