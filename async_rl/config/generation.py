"""Settings of how samples are made: the model, sampling, the engine, the pools of generators, and
rollouts of several turns with the agent that `rollout.fn` names.

Part of the schema in `run.py`, whose invariants hold here.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from async_rl.config.base import (
    Entries,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMore,
    PositiveInt,
    Section,
    Share,
    Tag,
    Text,
    Word,
    absolute,
    by_name,
    is_function,
)
from async_rl.core.frozen import frozen

Dtype = Literal["float32", "bfloat16"]
ENGINES = ("vllm", "hf")
"""The engines of this package; any other name is a plug-in."""
_QUANTIZING = ("quantization", "quantization_config", "kv_cache_dtype")
EXTERNAL = "external"
"""The value of rollout.fn that lets programs outside the run request sessions."""
JAIL = "jail"
"""The first word of a command that runs in a jail."""
SERVICE = "tinker"
"""The value of rollout.fn that makes the run a training service (docs/service.md)."""


def is_local_model(model: str) -> bool:
    """Return whether a model is named by a directory rather than by its hub name."""
    return model.startswith(("/", ".", "~")) or Path(model).exists()


def _directory_or_name(model: str) -> str:
    return absolute(model) if is_local_model(model) else model


class NoAdapter(Section):
    """All weights are trained."""

    kind: Literal["none"]


class LoraAdapter(Section):
    """Only two small matrices per chosen linear layer are trained."""

    kind: Literal["lora"]
    # 512 is the largest rank that vLLM serves (MaxLoRARanks in vllm/config/lora.py).
    rank: Annotated[int, Field(ge=1, le=512)]
    """columns of the matrix B and rows of A, whose product is added to a weight"""
    alpha: PositiveInt
    """the product is multiplied by alpha / rank"""
    targets: Annotated[list[Word], OneOrMore]
    """names of the linear layers with an adapter, for example q_proj; empty = all but the output
    head"""
    slots: NonNegativeInt
    """adapters that an engine applies at a time (vLLM's LoRA): 1 for a run, more for a service; 0 =
    the engine merges the adapter into the weights"""


class ModelConfig(Section):
    """The policy that is trained."""

    path: Annotated[str, AfterValidator(_directory_or_name)] | None
    """directory or hub name of a Hugging Face causal LM; null = the embedded tiny_coder"""
    dtype: Dtype
    """compute dtype of learner and generators; master weights are float32"""
    trust_remote_code: bool
    """allow transformers to run code from the model's repository"""
    external_lib: Annotated[str, Field(pattern="^[\\w.]+$")] | None
    """module imported before the model is created, for example to register its architecture; null =
    none"""
    override_config: Annotated[list[Annotated[str, Field(pattern="^\\w+=.+$")]], OneOrMore]
    """field=value pairs that replace fields of the model's config.json; the value is JSON"""
    lora: Annotated[NoAdapter | LoraAdapter, Tag]
    """train all weights (none), or an adapter on frozen weights (lora)"""

    @property
    def adapter(self) -> LoraAdapter | None:
        """The adapter that is trained; None if all weights are."""
        return self.lora if isinstance(self.lora, LoraAdapter) else None

    @property
    def is_applied(self) -> bool:
        """Whether engines apply the adapter to their base model, instead of merging it."""
        return self.adapter is not None and self.adapter.slots > 0


TOOL_PARSER = "tool_call_parser"
THINKING_PARSER = "reasoning_parser"
PARSERS = (TOOL_PARSER, THINKING_PARSER)
"""The entries of `generation.vllm.extra` that no engine reads: the parsers of tool calls and of
thinking, under their names in `vllm serve`.
"""


class VllmConfig(Section):
    """Settings passed to vLLM."""

    tensor_parallel_size: PositiveInt
    """devices per engine"""
    max_num_seqs: PositiveInt
    """sequences decoded in one batch"""
    max_num_batched_tokens: PositiveInt
    """tokens processed in one engine step"""
    kv_cache_mb: NonNegativeInt
    """MB of KV cache per engine; 0 = by gpu_memory_utilization (GPU only)"""
    gpu_memory_utilization: Share
    """share of the GPU's memory for the engine"""
    enforce_eager: bool
    """disable compilation and CUDA graphs"""
    extra: Entries
    """name=value pairs of further vLLM engine arguments, tool_call_parser and reasoning_parser; the
    value is JSON or text"""

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine's arguments in `extra`; checks/sections.py decides which may be given."""
        given = by_name(self.extra)
        return {name: _json_or_text(text) for name, text in given.items() if name not in PARSERS}

    def parser(self, kind: str) -> str:
        """Return the parser of this kind in `extra`; empty if the chat template decides."""
        return by_name(self.extra).get(kind, "")

    @property
    def num_stages(self) -> int:
        """Pipeline stages, each of tensor_parallel_size devices."""
        stages = self.arguments.get("pipeline_parallel_size", 1)
        # vLLM refuses text instead of a number; here it must only not raise.
        return stages if isinstance(stages, int) else 1

    @property
    def num_workers(self) -> int:
        """The devices of an engine: the parts of all its stages."""
        return self.num_stages * self.tensor_parallel_size


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class GenerationConfig(Section):
    """Sampling of the responses, and the engine."""

    engine: Text
    """vllm, hf (transformers) for debugging, or a plug-in"""
    group_size: PositiveInt
    """samples per prompt that are trained"""
    generation_size: PositiveInt | None
    """samples drawn per prompt; the group_size best are kept; null = group_size"""
    head_dtype: Literal["model", "float32"]
    """dtype of the logits: model = model.dtype; float32 = not rounded to it, as in the learner"""
    # Above 0: greedy samples of a prompt are equal, and so are their rewards.
    temperature: Annotated[float, Field(gt=0, le=10)]
    """divisor of the logits, in generators and learner"""
    sampling: Entries
    """name=value pairs that limit what training samples draw: top_k (at most 1,024), top_p (needs
    top_k), min_tokens, logit_bias (a JSON object by token id), grammar (a JSON schema, EBNF with
    ::=, or a regular expression)"""
    max_concurrent_groups: PositiveInt
    """groups in flight per generator"""
    max_attempts: PositiveInt
    """attempts to generate a group before it is dropped"""
    vllm: VllmConfig

    @property
    def num_drawn(self) -> int:
        """The samples drawn for a training prompt; group_size of them are kept."""
        return self.generation_size or self.group_size

    @property
    def quantization(self) -> str:
        """The arguments by which the engine computes with fewer bits than the learner; empty if it
        does not.
        """
        given = by_name(self.vllm.extra) if self.is_vllm else {}
        return ", ".join(f"{name}={given[name]}" for name in _QUANTIZING if name in given)

    @property
    def has_drafts(self) -> bool:
        """Whether the engine proposes tokens that it verifies in one step."""
        return self.is_vllm and "speculative_config" in self.vllm.arguments

    @property
    def is_vllm(self) -> bool:
        """Whether the engine is vLLM: it alone reads generation.vllm, applies adapters to the base
        model, and reads weights from the memory of another process on its GPU.
        """
        return self.engine == "vllm"


class PoolConfig(Section):
    """A further pool of generators; a setting that is omitted has the value of the main pool."""

    count: NonNegativeInt
    """processes at the start, until async-rl scale changes it"""
    work: Literal["train", "evaluation", "both"]
    """train = training groups; evaluation = held-out evaluations, which then run in this pool only;
    both"""
    # The only defaults in the schema: an entry names just the settings that differ from the main
    # pool, and the settings that it omits follow the main pool.
    cores: list[int] | None = None
    """instead of generators.cores"""
    gpus_each: NonNegativeFloat | None = None
    """instead of generators.gpus_each; tensor_parallel_size, if only that is set and generators use
    GPUs"""
    max_concurrent_groups: PositiveInt | None = None
    """instead of generation.max_concurrent_groups"""
    tensor_parallel_size: PositiveInt | None = None
    """instead of generation.vllm.tensor_parallel_size"""
    max_num_seqs: PositiveInt | None = None
    """instead of generation.vllm.max_num_seqs"""
    max_num_batched_tokens: PositiveInt | None = None
    """instead of generation.vllm.max_num_batched_tokens"""
    kv_cache_mb: NonNegativeInt | None = None
    """instead of generation.vllm.kv_cache_mb"""
    gpu_memory_utilization: Share | None = None
    """instead of generation.vllm.gpu_memory_utilization"""
    cpus_each: PositiveInt | None = None
    """instead of launcher.generator_cpus"""
    node_kind: Text | None = None
    """instead of launcher.node_kind"""


class GeneratorsConfig(Section):
    """The main pool of generator processes, and further pools."""

    count: NonNegativeInt
    """processes at the start, until async-rl scale changes it; 0 = wait for async-rl scale"""
    cores: list[int]
    """numbers of the CPU cores that the first `count` generators divide; empty = all"""
    gpus_each: NonNegativeFloat
    """GPUs per process"""
    # By name and not in a list: the name is part of the names of processes, of metrics and of
    # commands, and a list would rename them when an entry is removed.
    pools: dict[str, PoolConfig]
    """further pools by name: generators.pools.NAME.<setting>=<value>"""


@frozen
class Agent:
    """The program or the function that makes a sample, and the limits of its processes; neither of
    them if programs outside the run do.

    workers: processes of fn, each for many samples at a time, or of command at a time.
    is_jailed: the command runs in a jail. is_service:
    programs outside the run train, too.
    """

    command: Sequence[str] = ()
    fn: str | None = None
    workers: int = 0
    is_jailed: bool = False
    is_external: bool = False
    is_service: bool = False

    @property
    def name(self) -> str:
        """The name of its samples in status and metrics: of the function, or of the script."""
        scripts = [word for word in self.command if Path(word).suffix[1:].isalpha()]
        # The script says more than the interpreter that runs it.
        outside = SERVICE if self.is_service else EXTERNAL
        word = self.fn or [*scripts, *self.command, outside][0]
        return Path(word).name

    @property
    def is_used(self) -> bool:
        """Return whether agents make the samples."""
        return bool(self.command) or self.fn is not None or self.is_external or self.is_service


class RolloutConfig(Section):
    """The function that conducts a sample, and its number of turns."""

    fn: Text | Annotated[list[str], Field(min_length=1)] | None
    """async function that conducts the turns of a sample; a list = an agent that calls an endpoint:
    [program, argument, ...], with jail as the first word in a jail, or [function]; external =
    programs that the run does not start request sessions; tinker = such programs train too, by the
    Tinker API; null = one answer per sample"""
    max_turns: PositiveInt
    """largest number of turns of the policy in one sample"""

    @property
    def agent(self) -> Agent:
        """The agent of a run. A list of one function is called, any other list is a command."""
        if self.fn in (EXTERNAL, SERVICE):
            return Agent(is_external=self.fn == EXTERNAL, is_service=self.fn == SERVICE)
        words = self.fn if isinstance(self.fn, list) else []
        workers = os.cpu_count() or 1
        if len(words) == 1 and is_function(words[0]):
            return Agent(fn=words[0], workers=workers)
        is_jailed = words[:1] == [JAIL]
        return Agent(command=words[is_jailed:], workers=workers, is_jailed=is_jailed)
