"""What vLLM would be told under other settings."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_rl.composition.compose import compose, compose_unchecked
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment

SAMPLING = Sampling(temperature=0.5, max_new_tokens=9)


def told(model: Path, overrides: list[str]) -> dict[str, Any]:
    """The arguments of the engine and the parameters of a request, by name."""
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
        llm: Any = SimpleNamespace(engine_core=None, model_config=model_config)
        return Llm(llm)

    async def ask() -> None:
        opening.open_llm = open_llm  # type: ignore[assignment]
        engine: Any = await opening.vllm_opener(config, model, config.seed)()
        engine._vllm.outputs, engine.version = outputs, 0
        async for _ in engine.generate("r", [1], 2, SAMPLING):
            pass

    asyncio.run(ask())
    is_plain = (str, int, float, list, dict, type(None))
    return {name: value for name, value in asked.items() if isinstance(value, is_plain)}


def main(model: Path, settings: list[list[str]]) -> list[dict[str, Any]]:
    prepare_environment(compose("grpo_code"), [])
    return [told(model, overrides) for overrides in settings]
