"""Drives one engine through everything the tests ask about, and returns what it said."""

import asyncio
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from generation_support import model_from, weights_of

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.core.errors import AsyncRLError
from async_rl.core.os import die_with_parent
from async_rl.core.types import Sampling
from async_rl.generation import environment
from async_rl.generation.engine import Engine
from async_rl.generation.opener import engine_opener
from async_rl.protocol.generator import LoadReport
from async_rl.protocol.supervisor import Member
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights import broadcast
from async_rl.weights.block import SharedTensors
from async_rl.weights.broadcast import Broadcaster
from async_rl.weights.media import LearnerSide
from async_rl.weights.membership import Load
from async_rl.weights.tensors import tensor_spec

LAST = 6
NUM_SPANNING = 6
"""More than the engine runs at a time."""
LIFE = ("generator", 1)
NO_TENSORS = Manifest(version=0, path="", tensors=[], total_bytes=0, checksum=0)
EXTRA = [
    "enable_chunked_prefill=true",
    "kv_cache_dtype=auto",
    "async_scheduling=false",
    # A prompt is prefilled in two steps.
    "long_prefill_token_threshold=48",
]
CONFIG = compose("grpo_code", ["weights.transfer=collective"])
# The embedded model then needs several buckets.
broadcast.BUCKET_BYTES["gloo"] = 1 << 20


def sampling(*, temperature: float = 1.0, max_new_tokens: int = 100) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=max_new_tokens)


def prompt(seed: int, length: int = 70) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(6, 200, size=length)]


async def group(
    engine: Engine, name: str, tokens: list[int], num_samples: int, settings: Sampling
) -> dict[str, Any]:
    samples = [done async for done in engine.generate(name, tokens, num_samples, settings)]
    return {"prompt": tokens, "temperature": settings.temperature or 1.0, "samples": samples}


async def refusal(awaitable: Any) -> str:
    try:
        await awaitable
    except AsyncRLError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Scenario:
    def __init__(self, engine: Engine, model: Any) -> None:
        self.engine = engine
        self.model = model
        self.said: dict[str, Any] = {}
        self.publisher = SharedTensors(
            [tensor_spec(name, tensor) for name, tensor in weights_of(model, 0).items()]
        )
        exporter: Any = SimpleNamespace(block=self.publisher)
        self.broadcaster = Broadcaster(
            LearnerSide(
                config=CONFIG.weights,
                folder="",
                life="test",
                host="127.0.0.1",
                device=torch.device("cpu"),
                exporter=exporter,
                push_s=60,
            )
        )

    def manifest(self, version: int) -> Any:
        return self.publisher.write(version, weights_of(self.model, version).values())

    async def push(self, version: int) -> LoadReport:
        """Even versions by the shared block, odd ones by broadcast."""
        if version % 2 == 0:
            return await self.engine.load_weights(self.manifest(version))
        return await self.broadcast(version)

    async def broadcast(self, version: int) -> LoadReport:
        """Send a version as a learner does to generators on other machines."""
        manifest = self.manifest(version)
        seat = await self.seat(version)
        sending = asyncio.create_task(self.broadcaster.send(manifest))
        report = await self.engine.load_weights(manifest, seat)
        await sending
        return report

    async def seat(self, version: int) -> Seat:
        member = Member(
            name=LIFE[0],
            role="generator",
            pid=LIFE[1],
            address="tcp://127.0.0.1:1",
            state="",
            since_s=0.0,
            devices=await self.engine.weight_devices(),
        )
        load = Load(number=version, version=version, members=frozenset([LIFE]), missing=set())
        self.broadcaster.join(load, [member])
        return await self.broadcaster.source(NO_TENSORS, load, LIFE)

    async def play(self) -> dict[str, Any]:
        engine, said = self.engine, self.said
        said["before_first_load"] = await refusal(group(engine, "early", prompt(0), 1, sampling()))
        said["version_at_start"] = engine.version
        await engine.load_weights(self.manifest(0))
        said["at_version_0"] = await group(engine, "zero", prompt(1), 4, sampling(temperature=0.7))
        # The ranks of a broadcast take a second to connect, which the groups below would not live.
        await self.broadcast(0)
        said["spanning"] = await self.spanning()
        said["after_pushes"] = [
            await group(engine, f"after-{i}", prompt(10), 2, sampling()) for i in range(2)
        ]
        said["trained_again"] = await self.trained_again()
        if has_steps_to_count(engine):
            said["rested"] = await self.rested()
        said["greedy"] = await group(
            engine, "greedy", prompt(2), 1, sampling(temperature=0.0, max_new_tokens=20)
        )
        rows = [np.array(prompt(seed, length), np.int32) for seed, length in ((3, 40), (4, 90))]
        said["probe_rows"] = rows
        said["probe"] = await engine.logprobs(rows)
        await self.bad_blocks()
        said["after_bad_blocks"] = await group(engine, "good", prompt(5), 2, sampling())
        said["version_at_end"] = engine.version
        return said

    async def spanning(self) -> list[dict[str, Any]]:
        """Groups under way while versions are pushed one after another; one group waits until there
        is room.
        """
        async with asyncio.TaskGroup() as tasks:
            groups = [
                tasks.create_task(
                    group(self.engine, f"span-{i}", prompt(10 + i % 3), 4, sampling())
                )
                for i in range(NUM_SPANNING)
            ]
            for version in range(1, LAST + 1):
                report = await self.push(version)
                assert report.version == version
                assert report.pause_s > 0
        return [task.result() for task in groups]

    async def trained_again(self) -> dict[str, Any]:
        """The learner went back and trained the last version once more, to other weights: those of
        LAST + 7.
        """
        other = self.publisher.write(LAST, weights_of(self.model, LAST + 7).values())
        await self.engine.load_weights(other)
        said = await group(self.engine, "again", prompt(10), 2, sampling())
        await self.engine.load_weights(self.manifest(LAST))
        return said

    async def rested(self) -> dict[str, Any]:
        """A rest in the midst of two groups, and a third that is asked for meanwhile; then the
        version after.
        """
        num_steps = count_steps(self.engine)
        await self.engine.load_weights(self.manifest(LAST - 2))
        async with asyncio.TaskGroup() as tasks:
            groups = [
                tasks.create_task(
                    group(self.engine, f"rest-{i}", prompt(30 + i, 40 + i), 4, sampling())
                )
                for i in range(2)
            ]
            while num_steps() < 5:
                await self.engine.logprobs([np.array(prompt(3), np.int32)])
            await self.engine.sleep()
            steps_before = num_steps()
            await self.engine.sleep()
            groups.append(
                tasks.create_task(
                    group(self.engine, "rest-late", prompt(33), 2, sampling(max_new_tokens=5))
                )
            )
            manifest = self.manifest(LAST - 1)
            for _ in range(30):  # time in which an engine that does not rest would step
                manifest = await asyncio.to_thread(self.manifest, LAST - 1)
            steps_at_rest = num_steps() - steps_before
            await self.engine.load_weights(manifest)
        await self.engine.load_weights(self.manifest(LAST))
        return {"steps_at_rest": steps_at_rest, "groups": [task.result() for task in groups]}

    async def bad_blocks(self) -> None:
        good = self.manifest(LAST + 1)
        self.said["wrong_checksum"] = await refusal(
            self.engine.load_weights(msgspec.structs.replace(good, checksum=good.checksum ^ 1))
        )
        lonely = msgspec.structs.replace(
            await self.seat(LAST + 1),
            communicator="of two who do not come",
            world_size=3,
            timeout_s=0.5,
        )
        self.said["broken_broadcast"] = await refusal(self.engine.load_weights(good, lonely))
        if has_steps_to_count(self.engine):
            lacking = msgspec.structs.replace(good, tensors=good.tensors[:-1])
            self.said["lacking_a_tensor"] = await refusal(self.engine.load_weights(lacking))
        else:
            # It loads in place, so it stays paused until a load is complete.
            await self.engine.load_weights(self.manifest(LAST))


async def loaded_in_place(scenario: Scenario) -> dict[str, Any]:
    """What a load that fails half-way leaves, where there is no spare copy of the weights."""
    good = scenario.manifest(LAST + 4)
    lacking = msgspec.structs.replace(good, tensors=good.tensors[:-1])
    said = {"lacking_in_place": await refusal(scenario.engine.load_weights(lacking))}
    said["after_lacking"] = await refusal(group(scenario.engine, "dirty", prompt(6), 1, sampling()))
    return said


async def on_two_workers(scenario: Scenario) -> dict[str, Any]:
    """Push to both workers."""
    engine = scenario.engine
    said: dict[str, Any] = {"devices": await engine.weight_devices()}
    await engine.load_weights(scenario.manifest(0))
    await scenario.broadcast(0)
    said["spanning"] = await scenario.spanning()
    said["processes"] = [it.pid for it in psutil.Process().children(recursive=True)]
    return said


def has_steps_to_count(engine: Any) -> bool:
    """The stock core steps in another process, and sleeps on GPUs only."""
    return not hasattr(engine, "_vllm") or hasattr(engine._vllm.llm.engine_core, "_core")


def count_steps(engine: Any) -> Callable[[], int]:
    """How often the engine's model has run, from now on."""
    steps: list[None] = []
    if type(engine).__name__ == "HfEngine":
        engine._model.register_forward_pre_hook(lambda *_: steps.append(None))
    else:
        executor = engine._vllm.llm.engine_core._core.model_executor
        execute = executor.execute_model

        def counted(*args: Any, **options: Any) -> Any:
            steps.append(None)
            return execute(*args, **options)

        executor.execute_model = counted
    return lambda: len(steps)


async def vllm_only(engine: Any) -> dict[str, Any]:
    """What can be asked of vLLM alone: its scheduler, and its death."""
    said: dict[str, Any] = {}
    llm = engine._vllm.llm
    core = llm.engine_core._core
    scheduled: list[int] = []
    has_stepped = asyncio.Event()
    loop = asyncio.get_running_loop()
    execute = core.model_executor.execute_model

    def recording(output: Any, **options: Any) -> Any:
        # A step without tokens may tell the worker of requests that have ended.
        if output.total_num_scheduled_tokens:
            scheduled.append(output.total_num_scheduled_tokens)
        loop.call_soon_threadsafe(has_stepped.set)
        return execute(output, **options)

    core.model_executor.execute_model = recording
    await group(engine, "shared", prompt(20, 36), 8, sampling(max_new_tokens=2))
    said["first_step_of_8_samples_of_36_tokens"] = scheduled[0]

    stream = engine.generate("left", prompt(21), 8, sampling(max_new_tokens=250))
    await anext(stream)
    said["unfinished_at_first_yield"] = llm.get_num_unfinished_requests()
    await stream.aclose()
    said["unfinished_after_close"] = llm.get_num_unfinished_requests()
    await llm.collective_rpc("check_health")
    said["scheduled_after_close"] = core.scheduler.get_num_unfinished_requests()
    said["held_after_close"] = len(llm.engine_core._unsent)

    has_stepped.clear()
    async with asyncio.TaskGroup() as tasks:
        dying = tasks.create_task(
            refusal(group(engine, "dying", prompt(22), 2, sampling(max_new_tokens=250)))
        )
        await has_stepped.wait()

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the model burns")

        core.model_executor.execute_model = fail
    said["death"] = dying.result()
    said["after_death"] = await refusal(group(engine, "dead", prompt(23), 1, sampling()))
    said["load_after_death"] = await refusal(engine.logprobs([np.array(prompt(24), np.int32)]))
    return said


async def main(kind: str, model_path: Path) -> dict[str, Any]:
    overrides = [
        f"model.path={model_path}",
        f"generation.engine={'hf' if kind == 'hf' else 'vllm'}",
        "hardware=cpu",
        "data.max_prompt_tokens=100",
        "data.max_response_tokens=250",
        "generation.vllm.max_num_seqs=20",
    ]
    if kind == "vllm":
        overrides.append(f"generation.vllm.extra={json.dumps(EXTRA)}")
    if kind == "parallel":
        overrides.append("generation.vllm.tensor_parallel_size=2")
    config = compose("grpo_code", overrides)
    prepare(config, kind)
    engine = await (await asyncio.to_thread(engine_opener, config, model_path))()
    scenario = Scenario(engine, model_from(model_path))
    if kind == "parallel":
        return await on_two_workers(scenario)
    said = await scenario.play()
    if kind == "stock":
        said |= await loaded_in_place(scenario)
    if kind == "vllm":
        said |= await vllm_only(engine)
    await engine.close()
    said["after_close"] = await refusal(group(engine, "late", prompt(25), 1, sampling()))
    return said


def prepare(config: RunConfig, kind: str) -> None:
    """Set the variables of the process. stock: vLLM's core has a process of its own, as on GPUs, on
    the CPU build. That and those of `parallel` are forks: a new process would import vLLM again.
    """
    if kind == "stock":
        environment.has_core_process = lambda _: True
        os.register_at_fork(after_in_child=die_with_parent)
    environment.prepare_environment(config, [])
    if kind in ("stock", "parallel"):
        # vLLM's platform for CPUs sets its variable to `spawn`.
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: fork
    if kind == "parallel":
        # The forks import them again, as new processes do, and then end with their parent.
        for name in ("scheduler", "worker"):
            del sys.modules[f"async_rl.generation.vllm.{name}"]
