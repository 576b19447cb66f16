"""Writes down what vLLM would be told under other settings: python engine_settings.py MODEL OUT
OVERRIDES... (JSON lists).

A process of its own, since vLLM changes its process for good.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from async_rl.core.types import Sampling
from async_rl.generation.engine import build_engine, prepare_environment
from async_rl.launchers.configuration.compose import compose, compose_unchecked

SAMPLING = Sampling(temperature=0.5, top_p=1.0, top_k=-1, max_new_tokens=9, min_new_tokens=0)


def told(model: Path, overrides: list[str]) -> dict[str, Any]:
    """The arguments of the engine and the parameters of a request that can be written as JSON, by
    name.
    """
    engine: Any = build_engine(compose_unchecked("grpo_code", overrides), model)
    asked: dict[str, Any] = {}

    async def outputs(_: str, __: object, params: Any) -> AsyncGenerator[Any, None]:
        asked.update({name: getattr(params, name) for name in params.__struct_fields__})
        return
        yield

    async def ask() -> None:
        engine._outputs, engine._version, engine._opened = outputs, 0, engine
        async for _ in engine.generate("r", [1], 2, SAMPLING):
            pass

    asyncio.run(ask())
    return {
        name: value
        for name, value in {**vars(engine._args), **asked}.items()
        if isinstance(value, str | int | float | list | None)
    }


if __name__ == "__main__":
    prepare_environment(compose("grpo_code"), [])
    found = [told(Path(sys.argv[1]), json.loads(overrides)) for overrides in sys.argv[3:]]
    Path(sys.argv[2]).write_text(json.dumps(found))
