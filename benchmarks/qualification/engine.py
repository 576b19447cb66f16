"""The engine and the learner, in one process: their log-probs on the same tokens, over pushes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import torch

from async_rl.composition.compose import compose
from async_rl.composition.overrides import with_defaults
from async_rl.config.run import RunConfig
from async_rl.core.types import IntArray, Sampling
from async_rl.generation.engine import Engine
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.launchers.preflight.inputs import installed
from async_rl.learner.trainer import Trainer
from async_rl.protocol.generator import Completion
from async_rl.protocol.weights import Manifest
from async_rl.weights.block import SharedTensors
from benchmarks.qualification.models import group_of, model_directory
from benchmarks.qualification.vllm_names import missing

Numbers = dict[str, float]
Samples = list[tuple[IntArray, Completion]]
"""Token ids of whole rows, and the completion with the engine's log-probs."""
_VERSIONS = 4
_PROMPTS, _SAMPLES, _TOKENS = 4, 4, 48
# Steps so large that an engine with the weights of another version is far off.
_STEPS = (
    "learner.optimizer.lr=0.01",
    "learner.optimizer.warmup_steps=0",
    f"buffer.groups_per_step={_PROMPTS}",
    f"generation.group_size={_SAMPLES}",
)


def names(scratch: Path, settings: list[str]) -> Numbers:
    """Count the names of vLLM that the product uses and the installed vLLM lacks."""
    root = installed()
    if root is None:
        raise RuntimeError("vLLM is not installed")
    lacking = missing(root)
    if lacking:
        raise RuntimeError(f"the installed vLLM lacks {', '.join(lacking)}")
    return {"missing_names": 0.0}


def parity(scratch: Path, settings: list[str]) -> Numbers:
    """Compare over pushes through the shared block, while samples are in flight."""
    return asyncio.run(_parity(scratch, settings))


def parity_after_sleep(scratch: Path, settings: list[str]) -> Numbers:
    """Let the engine sleep before each push, with requests in flight."""
    return asyncio.run(_parity(scratch, settings, sleeps=True))


class Pair:
    """A real engine and a real learner with the same model."""

    def __init__(self, config: RunConfig, engine: Engine, trainer: Trainer) -> None:
        self.config, self.engine, self.trainer = config, engine, trainer
        self._publisher = SharedTensors(trainer.tensor_specs())

    def publish(self, version: int) -> Manifest:
        """Write the learner's weights."""
        return self._publisher.write(version, self.trainer.full_tensors())

    async def push(self, version: int) -> float:
        """Change the engine's weights; returns the seconds without generation."""
        return (await self.engine.load_weights(self.publish(version))).pause_s

    def train(self, version: int, samples: Samples) -> None:
        """Make one real step on the samples, which changes the weights."""
        rows = [(row, done.logprobs, done.versions) for row, done in samples]
        groups = [
            group_of(index, rows[index * _SAMPLES : (index + 1) * _SAMPLES], version)
            for index in range(_PROMPTS)
        ]
        self.trainer.step(groups, version)

    async def samples(self, version: int) -> Samples:
        """Draw samples of fixed prompts."""
        rng = np.random.default_rng(version)
        prompts = [rng.integers(8, 200, 24).astype(np.int32) for _ in range(_PROMPTS)]
        sampling = Sampling(temperature=1.0, max_new_tokens=_TOKENS)

        async def of(index: int, prompt: IntArray) -> Samples:
            name = f"q{version}-{index}"
            stream = self.engine.generate(name, prompt.tolist(), _SAMPLES, sampling)
            return [(np.concatenate([prompt, done.token_ids]), done) async for done in stream]

        groups = await asyncio.gather(*(of(i, prompt) for i, prompt in enumerate(prompts)))
        return [sample for group in groups for sample in group]

    def differences(self, version: int, samples: Samples) -> list[float]:
        """|engine - learner| of each token, of samples that this version drew from end to end."""
        whole = [pair for pair in samples if set(pair[1].versions.tolist()) == {version}]
        scores = self.trainer.logprobs([row for row, _ in whole]) if whole else []
        pairs = zip(whole, scores, strict=True)
        parts = [np.abs(score[-len(done.logprobs) :] - done.logprobs) for (_, done), score in pairs]
        return [float(value) for part in parts for value in part]


@contextlib.asynccontextmanager
async def open_pair(scratch: Path, settings: list[str]) -> AsyncIterator[Pair]:
    """Open both on this machine; on a GPU they share the first one."""
    has_gpu = torch.cuda.is_available()
    shared = ["learner.gpus_each=0.5", "generators.gpus_each=0.5", "hardware=gpu"]
    # A share of a large GPU would be millions of blocks of so small a model, each a Python object.
    shared.append("generation.vllm.kv_cache_mb=8192")
    on_device = shared if has_gpu else ["hardware=cpu"]
    path = model_directory(scratch, settings, is_large=False)
    given = with_defaults([*_STEPS, f"model.path={path}"], settings)
    config = compose("grpo_code", with_defaults(given, on_device))
    prepare_environment(config, [])
    engine = await engine_opener(config, path)()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    trainer = Trainer(config, path, rank=0, world_size=1, device=device)
    try:
        yield Pair(config, engine, trainer)
    finally:
        await engine.close()


async def _parity(scratch: Path, settings: list[str], *, sleeps: bool = False) -> Numbers:
    values: list[float] = []
    pauses: list[float] = []
    kept = 0.0
    async with open_pair(scratch, settings) as pair:
        await pair.push(0)
        for version in range(_VERSIONS):
            samples = await pair.samples(version)
            values += pair.differences(version, samples)
            # These are in flight during the push.
            begun = asyncio.create_task(pair.samples(version), name=f"samples {version}")
            await asyncio.sleep(0)
            if sleeps:
                awake = torch.cuda.mem_get_info()[0]
                await pair.engine.sleep()
                asleep = torch.cuda.mem_get_info()[0]
                used = torch.cuda.get_device_properties(0).total_memory - awake
                kept = 1 - (asleep - awake) / used
            pair.train(version, samples)
            pauses.append(await pair.push(version + 1))
            await begun
        values += pair.differences(_VERSIONS, await pair.samples(_VERSIONS))
    numbers = {
        "engine_abs_mean": float(np.mean(values)),
        "engine_abs_max": float(np.max(values)),
        "tokens": float(len(values)),
        "pause_s": float(np.median(pauses)),
    }
    return numbers | ({"memory_kept_share": kept} if sleeps else {})
