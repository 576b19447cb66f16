"""The end of a run whose generators serve other runs (model.lora.host)."""

from __future__ import annotations

import asyncio

from async_rl.config.run import RunConfig
from async_rl.monitoring.console import Console
from async_rl.supervision.control import StopRequest
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.registry import Registry

_LOOK_S = 1.0


async def until_unused(
    registry: Registry, config: RunConfig, fleet: Fleet, stop: StopRequest, console: Console
) -> None:
    """After the learner's last step, wait until no other run uses the generators, or a stop.

    A generator that ended may come back, and its guests with it, within timeouts.start_s.
    """
    is_noted = False
    while fleet.learner_done.is_set() and registry.has_guests(config.timeouts.start_s):
        if stop.graceful.is_set() or fleet.failed.done():
            return
        if not is_noted:
            console.note(
                "the last step is saved; the generators serve other runs (model.lora.host) until"
                " those end, or until Ctrl-C"
            )
            is_noted = True
        await asyncio.sleep(_LOOK_S)
