"""Opens vLLM: the arguments that follow from the configuration, an AsyncLLM made with them, and the
engine around it.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from async_rl.batching.support import Grammars
from async_rl.config.run import RunConfig
from async_rl.config.sampling import supports_of
from async_rl.core.calls import MOST_TOP
from async_rl.core.errors import ConfigError
from async_rl.generation import environment
from async_rl.generation.engine import ModelFacts, OpenEngine, read_model_facts
from async_rl.generation.environment import uses_gpu, version_problem
from async_rl.generation.vllm.core import ThreadedCore
from async_rl.generation.vllm.engine import AppliedAdapter, VllmEngine
from async_rl.generation.vllm.llm import Llm
from async_rl.generation.vllm.scheduler import SALTING_SCHEDULER

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The bounds of the rank that vLLM can be started with."""


def vllm_opener(config: RunConfig, model_path: Path, seed: int) -> OpenEngine:
    """Return the function that starts vLLM. Raises ConfigError for settings that do not fit."""
    facts = read_model_facts(model_path)
    try:
        args = engine_args(config, model_path, facts, seed)
    except TypeError as error:
        extra = config.generation.vllm.extra
        raise ConfigError(f"generation.vllm.extra={extra}: vLLM says: {error}") from error
    end_token_ids = () if config.data.ignores_end else facts.end_token_ids
    adapter = config.model.adapter

    async def open_engine() -> VllmEngine:
        shared = await open_llm(config, args)
        Grammars(
            tokenizer=str(args.tokenizer),
            vocab_size=shared.llm.model_config.get_vocab_size(),
            has_code=config.model.trust_remote_code,
        ).require(supports_of(config))
        if adapter is not None and adapter.slots:
            # The other half of a service's slots is for adapters in directories.
            count = adapter.slots // 2 if config.agent.is_service else adapter.slots
            own, *places = [AppliedAdapter(shared, end_token_ids) for _ in range(count)]
            own.places = places
            return own
        return VllmEngine(shared, end_token_ids)

    return open_engine


def engine_args(
    config: RunConfig, model_path: Path, facts: ModelFacts, seed: int
) -> AsyncEngineArgs:
    """Raises ConfigError if the version of vLLM is not supported, TypeError if it lacks an argument
    of generation.vllm.extra.
    """
    data = config.data
    vllm = config.generation.vllm
    # Preflight may have run on a machine with another vLLM, or without one.
    if problem := version_problem():
        raise ConfigError(problem)
    has_grammars = config.agent.is_used or any(support.grammar for support in supports_of(config))
    longest = data.max_prompt_tokens + data.max_response_tokens
    return AsyncEngineArgs(
        model=str(model_path),
        # Token ids go in and out; the tokenizer would only delay the start. A service ends samples
        # with texts, and grammars are about text.
        skip_tokenizer_init=not has_grammars,
        tokenizer=config.data.tokenizer or str(model_path),
        trust_remote_code=config.model.trust_remote_code,
        dtype=config.model.dtype,
        hf_overrides={"head_dtype": config.generation.head_dtype},
        seed=seed,
        load_format="auto",
        tensor_parallel_size=vllm.tensor_parallel_size,
        # "uni" keeps the model in the process of the core: one import of vLLM less.
        distributed_executor_backend="uni" if vllm.num_workers == 1 else "mp",
        worker_extension_cls="async_rl.generation.vllm.worker.SharedWeightsExtension",
        # One more than a trajectory: a probe of a whole one generates a token.
        max_model_len=min(longest + 1, facts.max_positions),
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
        enforce_eager=vllm.enforce_eager,
        # All samples of a group read one prefill of their prompt.
        enable_prefix_caching=True,
        scheduler_cls=SALTING_SCHEDULER,
        # Raw log-probs leave out the temperature: wrong by 0.1 to 0.6 nats on average.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        structured_outputs_config={"backend": "xgrammar"},
        # Otherwise a model's generation_config.json could set top_k or top_p.
        generation_config="vllm",
        **_settings(config, model_path),
    )


def _settings(config: RunConfig, model_path: Path) -> dict[str, Any]:
    """The arguments that depend on the device and on adapters, and those of
    generation.vllm.extra.
    """
    vllm = config.generation.vllm
    settings: dict[str, Any] = {"gpu_memory_utilization": vllm.gpu_memory_utilization}
    # The project's defaults, which generation.vllm.extra may replace.
    settings["use_tqdm_on_load"] = False
    if not uses_gpu(config):
        # The smallest block of vLLM's attention on CPU. Prompts share whole blocks, so smaller
        # blocks share more of a short prompt.
        settings["block_size"] = 32
    if truncated := [support for support in supports_of(config) if support.is_truncated]:
        # The second model runner calls processors before the temperature.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        settings["logits_processors"] = ["async_rl.generation.vllm.sampling:Truncation"]
        widths = [s.top_k * s.is_recorded for s in truncated]
        settings["max_logprobs"] = max(MOST_TOP, *widths)
    if config.agent.is_service:
        # The second model runner draws no alternatives for prompts.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    settings |= vllm.arguments
    if vllm.kv_cache_mb:
        settings["kv_cache_memory_bytes"] = vllm.kv_cache_mb << 20
        if uses_gpu(config):
            # vLLM 0.32 does not size the cache by the share then, but refuses to start unless that
            # much is free: next to a learner that has started, an engine could never start again.
            # It refuses 0.
            settings["gpu_memory_utilization"] = 0.001
    if vllm.enforce_eager:
        settings["compilation_config"] = {"mode": 0}
    if uses_gpu(config) and config.takes_turns:
        # Memory that vLLM can release must come from its own allocator from the start.
        settings["enable_sleep_mode"] = True
    adapter = config.model.adapter
    if adapter is not None and adapter.slots:
        settings |= {
            "enable_lora": True,
            "max_loras": adapter.slots,
            "max_lora_rank": min(rank for rank in _LORA_RANKS if rank >= adapter.rank),
            "lora_target_modules": _linear_layers(model_path),
        }
    return settings


def _linear_layers(model_path: Path) -> list[str]:
    """Return the names of the linear layers inside the model's blocks, for example q_proj.

    Without a list vLLM would wrap the head too, and fail for a probe (vLLM 0.32): the wrapped head
    takes one row per request.
    """
    names = set()
    for file in model_path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # not a mapping
                layer, _, leaf = name.rpartition(".")
                is_matrix = len(weights.get_slice(name).get_shape()) == 2
                # Blocks are numbered; embedding and head are outside them.
                is_inside = any(part.isdigit() for part in layer.split("."))
                if leaf == "weight" and is_matrix and is_inside:
                    names.add(layer.rpartition(".")[2])
    return sorted(names)


async def open_llm(config: RunConfig, args: AsyncEngineArgs) -> Llm:
    """Build model and cache, ready for weights. Raises ConfigError if vLLM refuses."""
    has_core_process = environment.has_core_process(config)
    try:
        # In a thread, so that the event loop continues: this takes seconds on a CPU, minutes on a
        # GPU, and a process that sends no heartbeat for 15 s is killed.
        if has_core_process:
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
        else:
            llm = await asyncio.to_thread(_open_threaded, args, asyncio.get_running_loop())
        # A copy is staged next to the steps, which only a core in this process offers.
        wants_spare = not has_core_process and not config.model.is_applied
        spares = await llm.collective_rpc("prepare_shared_weights", args=(wants_spare,))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"vLLM refused the model {args.model} or the settings of generation.vllm: {error}"
        ) from error
    # The end tokens of a request alone end it, and alone are those that its grammar has.
    llm.renderer.get_eos_token_id = lambda: None
    return Llm(llm, has_spare=all(spares))


def _open_threaded(args: AsyncEngineArgs, loop: asyncio.AbstractEventLoop) -> AsyncLLM:
    """Build an AsyncLLM for `loop` whose core is a thread. Blocks for seconds."""

    def make_core(
        vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: object
    ) -> ThreadedCore:
        return ThreadedCore(vllm_config, executor_class, log_stats, loop)

    # AsyncLLM has no argument for its client of the core.
    factory = EngineCoreClient.__dict__["make_async_mp_client"]
    EngineCoreClient.make_async_mp_client = staticmethod(make_core)
    try:
        return _ThreadedLLM.from_engine_args(args)
    finally:
        EngineCoreClient.make_async_mp_client = factory


class _ThreadedLLM(AsyncLLM):
    """Shut down by its owner only.

    vLLM's own `__del__` would do it again while the interpreter exits, without its modules.
    """

    def __del__(self) -> None:
        return None
