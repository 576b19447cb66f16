"""Writes down what vLLM would be told under other settings: python engine_settings.py MODEL
OVERRIDES OUT, with a JSON list of lists of overrides.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_rl.composition.compose import compose, compose_unchecked
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment

SAMPLING = Sampling(temperature=0.5, max_new_tokens=9)


def told(model: Path, overrides: list[str]) -> dict[str, Any]:
    """The arguments of the engine and the parameters of a request that can be written as JSON, by
    name.
    """
    # vLLM reads the variables of prepare_environment at import.
    from async_rl.generation.vllm import opening
    from async_rl.generation.vllm.llm import Llm

    config = compose_unchecked("grpo_code", overrides)
    asked: dict[str, Any] = {}

    async def outputs(_: str, __: object, params: Any, lora: object) -> AsyncGenerator[Any, None]:
        asked.update({name: getattr(params, name) for name in params.__struct_fields__})
        return
        yield

    async def open_llm(_: object, arguments: Any) -> Any:
        asked.update(vars(arguments))
        model_config = SimpleNamespace(get_vocab_size=lambda: 99)
        return Llm(SimpleNamespace(engine_core=None, model_config=model_config))  # type: ignore[arg-type]

    async def ask() -> None:
        opening.open_llm = open_llm  # type: ignore[assignment]
        engine: Any = await opening.vllm_opener(config, model, config.seed)()
        engine._vllm.outputs, engine.version = outputs, 0
        async for _ in engine.generate("r", [1], 2, SAMPLING):
            pass

    asyncio.run(ask())
    return {
        name: value
        for name, value in asked.items()
        if isinstance(value, str | int | float | list | dict | None)
    }


if __name__ == "__main__":
    prepare_environment(compose("grpo_code"), [])
    found = [told(Path(sys.argv[1]), overrides) for overrides in json.loads(sys.argv[2])]
    Path(sys.argv[3]).write_text(json.dumps(found))
