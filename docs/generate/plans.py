"""Generation of the plans in docs/hardware.md: the choices for a model and a number of GPUs."""

from __future__ import annotations

from typing import Any

from async_rl.composition.compose import compose_for
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import gb, gpu_memory_mb
from async_rl.planning.fit import fit_problems
from async_rl.planning.presets import fitted, fleet
from async_rl.planning.shape import ModelShape, shape_from_hf
from docs.generate.settings import table

# Width, layers, heads, key and value heads, feed-forward width, tied embeddings: config.json of
# these models. One entry is a mixture of 128 experts of which a token uses 8.
_SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
    "Qwen3-4B": (2560, 36, 32, 8, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 8, 12288, False),
    "Qwen3-14B": (5120, 40, 40, 8, 17408, False),
    "Qwen3-32B": (5120, 64, 64, 8, 25600, False),
    "Qwen3-30B-A3B": (2048, 48, 32, 4, 6144, False),
    "Llama-3.1-70B": (8192, 80, 64, 8, 28672, False),
}
_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_VOCABULARY = {"Llama-3.1-70B": 128256}
_NUM_GPUS = (1, 2, 4, 8)
_NODES = (2, 4)
_ON_NODES = ("Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Llama-3.1-70B")
_CLUSTER = ("launcher=slurm", "launcher.gpus_per_node=8", "buffer.groups_per_step=64")
_MEMORY_GB_PER_GPU = 256
_SETTINGS = ("model.dtype=bfloat16", "data.max_prompt_tokens=1024", "data.max_response_tokens=3072")

_START, _END = "<!-- plans: written by make docs -->\n", "<!-- end of plans -->\n"


def with_plans(page: str) -> str:
    """Return the page with a table for each algorithm between its marks."""
    parts = []
    for conf, title in (("grpo_code", "GRPO"), ("ppo_code", "PPO with its own critic and a KL")):
        rows = []
        for name in list(_SIZES)[:-1]:
            shape = _shape(name)
            cells = [_cell(conf, shape, num_gpus) for num_gpus in _NUM_GPUS]
            if set(cells) != {"-"}:
                rows.append((name, *cells))
        header = ("model", *(f"{n} GPU{'s' * (n > 1)}" for n in _NUM_GPUS))
        parts += [f"### {title}\n", table(header, rows) + "\n"]
    rows = [(n, *(_cell("grpo_code", _shape(n), 8, nodes) for nodes in _NODES)) for n in _ON_NODES]
    header = ("model", *(f"{nodes} nodes of 8 GPUs" for nodes in _NODES))
    parts += ["### GRPO with 64 groups per step on several nodes\n", table(header, rows) + "\n"]
    before, _, rest = page.partition(_START)
    return before + _START + "\n".join(parts) + _END + rest.partition(_END)[2]


def _cell(conf: str, shape: ModelShape, num_gpus: int, nodes: int = 1) -> str:
    # One GPU is shared: at the same time if memory suffices, otherwise in turns.
    placements = ("disaggregated", "colocated") if num_gpus == 1 else ("disaggregated",)
    for placement in placements:
        machine = Machine(
            cores=tuple(range(16 * num_gpus)),
            num_gpus=num_gpus,
            memory_mb=num_gpus * _MEMORY_GB_PER_GPU << 10,
            gpu_mb=80 << 10,
            disk_mb=0,
        )
        settings = [*_SETTINGS, f"placement={placement}"]
        if nodes > 1:
            settings += [*_CLUSTER, f"launcher.nodes={nodes}"]
        config, _ = compose_for(machine, conf, settings)
        whole = fleet(config, machine)
        assert whole is not None
        config = fitted(config, shape, whole, ())
        if not fit_problems(config, shape, whole):
            return _described(config, shape)
    return "-"


def _described(config: RunConfig, shape: ModelShape) -> str:
    learner, generators = config.learner, config.generators
    division = f"{learner.ranks} + {generators.count}"
    if generators.gpus_each > 1:
        division += f" x {generators.gpus_each:g}"
    if learner.gpus_each < 1:
        division = "turns" if config.placement == "colocated" else "shared"
    activations = ", recomputed" if learner.gradient_checkpointing else ""
    needed = gb(gpu_memory_mb(config, "learner", shape))
    return f"{division}: {needed}{activations}, {learner.budget_tokens:,}"


def _shape(name: str) -> ModelShape:
    hidden, layers, heads, kv_heads, width, is_tied = _SIZES[name]
    settings: dict[str, Any] = {
        "model_type": "llama" if name in _VOCABULARY else "qwen3",
        "vocab_size": _VOCABULARY.get(name, 151936),
        "head_dim": 128,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": is_tied,
    }
    if name.endswith("A3B"):
        settings |= _EXPERTS
    return shape_from_hf(settings)
