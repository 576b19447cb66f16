"""Short scenarios of vLLM: settings, fewer bits, memory after many pushes, and changed words."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from generation_support import QUANTIZED_ROWS, make_model, publisher_of, weights_of
from transformers import PretrainedConfig, PreTrainedModel
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

from async_rl.composition.compose import compose_unchecked
from async_rl.core.types import Alternatives, Sampling
from async_rl.generation.engine import ModelFacts
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.generation.vllm import opening
from async_rl.generation.vllm.llm import Llm
from async_rl.generation.vllm.model import change_words, has_plain_weights, second_model
from async_rl.protocol.weights import Manifest
from async_rl.weights.tensors import compared, layout, tensor_spec

FAMILIES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())["families"]
LARGE = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 7}


async def opened(path: Path, settings: list[str]) -> Any:
    config = compose_unchecked("grpo_code", [f"model.path={path}", *settings])
    prepare_environment(config, [])
    return await (await asyncio.to_thread(engine_opener, config, path))()


async def quantized(settings: list[str], path: Path) -> tuple[list[Any], Any]:
    """Return the log-probs of rows at two versions, and of the likeliest tokens of samples."""
    model = make_model(path)
    bits = ["model.dtype=bfloat16", "generation.vllm.enforce_eager=true"]
    engine = await opened(path, [*bits, *settings])
    rows = [np.array(row, np.int32) for row in QUANTIZED_ROWS]
    scores = []
    with publisher_of(weights_of(model, 0)) as publisher:
        for version in (0, 1):
            manifest = publisher.write(version, weights_of(model, version).values())
            await engine.load_weights(manifest)
            scores.append(np.stack(await engine.logprobs(rows)))
    sampling = Sampling(temperature=1.0, max_new_tokens=40, alternatives=Alternatives(num_top=4))
    samples = [it async for it in engine.generate("1.0.0", QUANTIZED_ROWS[0], 8, sampling)]
    await engine.close()
    return scores, np.concatenate([it.likeliest.logprobs for it in samples if it.likeliest])


async def pushed_often(path: Path) -> tuple[float, list[float]]:
    """Return the size of a model and the memory of the process after each push, in MB."""
    tensors = dict(make_model(path, **LARGE).named_parameters())
    engine = await opened(path, ["generation.vllm.kv_cache_mb=200"])
    # A generator has used all threads of the loop's pool before long.
    await asyncio.gather(*[asyncio.to_thread(time.sleep, 0.2) for _ in range(16)])
    memory_mb = []
    with publisher_of(tensors) as publisher:
        for version in range(6):
            await engine.load_weights(publisher.write(version, tensors.values()))
            sampling = Sampling(temperature=1.0, max_new_tokens=4)
            async for _ in engine.generate(str(version), [5, 6, 7], 2, sampling):
                pass
            memory_mb.append(anonymous_mb())
    await engine.close()
    return sum(t.numel() * t.element_size() for t in tensors.values()) / 2**20, memory_mb


def anonymous_mb() -> float:
    """The process's memory that is not of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def told(model: Path, settings: list[list[str]]) -> list[dict[str, Any]]:
    """Return the arguments of vLLM and the parameters of a request under each of the settings, by
    name.
    """
    prepare_environment(compose_unchecked("grpo_code"), [])
    return [asyncio.run(told_once(model, overrides)) for overrides in settings]


async def told_once(model: Path, overrides: list[str]) -> dict[str, Any]:
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

    opening.open_llm = open_llm  # type: ignore[assignment]
    engine: Any = await opening.vllm_opener(config, model, config.seed)()
    engine._vllm.outputs, engine.version = outputs, 0
    async for _ in engine.generate("r", [1], 2, Sampling(temperature=0.5, max_new_tokens=9)):
        pass
    is_plain = (str, int, float, list, dict, type(None))
    return {name: value for name, value in asked.items() if isinstance(value, is_plain)}


def changed(family: str, sizes: dict[str, Any], scratch: Path) -> str:
    """Return what a model is that got changed words. sizes: of a random one of the family."""
    torch.manual_seed(3)
    kind: type[PretrainedConfig] = getattr(transformers, f"{family}Config")
    source: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(kind(**sizes))
    source.to(torch.bfloat16).save_pretrained(scratch / family)
    overrides = [f"model.path={scratch / family}", "model.dtype=bfloat16", "hardware=cpu"]
    facts = ModelFacts(max_positions=512, end_token_ids=(2,))
    config = opening.engine_args(
        compose_unchecked("grpo_code", overrides), scratch / family, facts, 0
    ).create_engine_config()
    before = {name: p.detach().clone() for name, p in source.named_parameters()}
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        chosen = torch.rand(tensor.shape) < 0.02
        tensor[chosen] = torch.randn(int(chosen.sum())).to(tensor.dtype)
    entries, total_bytes = layout(tensor_spec(name, tensor) for name, tensor in after.items())
    manifest = Manifest(version=2, path="", tensors=entries, total_bytes=total_bytes, checksum=0)

    def words(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1).view(torch.int16)

    with set_current_vllm_config(config), torch.no_grad():
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{scratch}/ranks", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        model, whole = (second_model(config) for _ in range(2))
        if not has_plain_weights(model):
            return "not plain"
        model.load_weights(iter(before.items()))
        whole.load_weights(iter(after.items()))
        lists = ((n, compared(words(before[n]), words(after[n]))) for n in after)
        change_words(model, manifest, lists)
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        return "equal" if all(torch.equal(words(a), words(b)) for a, b in pairs) else "other"


def changed_words(scratch: Path) -> dict[str, str]:
    return {family: changed(family, sizes, scratch) for family, sizes in FAMILIES.items()}
