"""Compare the planned GPU memory of a learner rank with an account of the real learner.

The account runs the learner's own code (FSDP2, packed rows, log-probs in chunks, AdamW) as rank 0
of many on tensors without storage (FakeTensorMode) and a process group that sends nothing, while
FSDPMemTracker adds up the tensors that are alive. It needs neither a GPU nor the model's memory.
It differs from a real run in three points: weights are not read, and the check of the model and
the gradient norm are skipped, because they need values.

Run: `python -m benchmarks.learner.memory_plan` (several minutes for each row).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from async_rl.algorithms import logprobs
from async_rl.batching.batch import Batch, collate_part, whole
from async_rl.batching.packing import Pass, pack
from async_rl.composition.compose import compose_unchecked
from async_rl.composition.overrides import with_defaults
from async_rl.config.run import RunConfig
from async_rl.core.types import NO_VERSION, Group, Purpose, Score, Trajectory
from async_rl.learner import loading, models, optimizer, sharding
from async_rl.learner.attention import VarlenPlan
from async_rl.learner.forward_passes import ForwardPasses
from async_rl.learner.models import LearnerModels
from async_rl.learner.optimizer import MOMENTS, Trained, model_optimizers
from async_rl.learner.sharding import Ranks
from async_rl.planning.learner_memory import learner_memory
from async_rl.planning.shape import shape_from_hf

CPU = torch.device("cpu")
_GIB = 2**30

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SIZES: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    # Width, layers, heads, key and value heads, feed-forward width, tied embeddings.
    "Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
    "Qwen3-8B": (4096, 36, 32, 8, 12288, False),
    "Qwen3-32B": (5120, 64, 64, 8, 25600, False),
}


def hf_settings(name: str) -> dict[str, Any]:
    """Return the config.json of a model of SIZES."""
    hidden, layers, heads, kv_heads, width, is_tied = SIZES[name]
    return QWEN3 | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "tie_word_embeddings": is_tied,
    }


def accounted_bytes(hf: Mapping[str, Any], config: RunConfig) -> dict[str, int]:
    """Run two passes and an update of each model; return the bytes at the peak by their kind."""
    num_ranks = config.learner.ranks
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        ranks = Ranks(
            rank=0,
            world_size=num_ranks,
            device=CPU,
            dtype=getattr(torch, config.model.dtype),
            min_shard_params=0,
            offload="none",
        )
        batches = [_full_batch(config, n) for n in _budgets(config)]
        with _without_values(hf, num_ranks), FakeTensorMode(allow_non_fake_inputs=True):
            learner = loading.load_models(config, "", ranks)  # type: ignore[arg-type]
            return _peak(config, learner, ranks, batches)
    finally:
        dist.destroy_process_group()


def planned_bytes(hf: Mapping[str, Any], config: RunConfig) -> float:
    """Return the plan's number for the same tensors."""
    memory = learner_memory(config, shape_from_hf(hf))
    return memory.kept + memory.step


def _peak(
    config: RunConfig, learner: LearnerModels, ranks: Ranks, batches: Sequence[Batch]
) -> dict[str, int]:
    trained = model_optimizers(config, learner)
    row, wide = (
        pack(batch, range(batch.num_sequences), device=CPU, with_ends=learner.has_values)
        for batch in batches
    )
    tracker = FSDPMemTracker(learner.policy, trained["policy"][1].torch_optimizer)
    with tracker:
        # The tracker knows the state of one optimizer; of the critic's it counts what is made now.
        for name, (_, each) in trained.items():
            if name != "policy":
                for state in each.torch_optimizer.state.values():
                    state.update({moment: torch.zeros_like(state[moment]) for moment in MOMENTS})
            each.apply(0.0)
        _update(config, learner, ranks, trained, row, wide, tracker)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {str(kind).rpartition(".")[2]: size for kind, size in peak.items()}


def _update(
    config: RunConfig,
    learner: LearnerModels,
    ranks: Ranks,
    trained: Trained,
    row: Pass,
    wide: Pass,
    tracker: FSDPMemTracker,
) -> None:
    """The passes of one step of a batch of two passes. wide: a pass without a gradient."""
    forward = ForwardPasses(config, learner, ranks)
    with torch.no_grad():
        if wide is not row:
            tracker.reset_mod_stats()
            forward.run_policy(wide)
            if learner.critic is not None:
                learner.critic(wide)
    tracker.reset_mod_stats()
    for _ in range(2):
        # The tracker expects one run of each module; its peak remains.
        tracker.reset_mod_stats()
        output = forward.run_policy(row)
        output.logprobs.sum().backward()
        del output
    trained["policy"][1].apply(0.0)
    if learner.critic is not None:
        for _ in range(2):
            tracker.reset_mod_stats()
            learner.critic(row).at_tokens.sum().backward()
        trained["critic"][1].apply(0.0)


def _budgets(config: RunConfig) -> tuple[int, int]:
    return config.learner.budget_tokens, config.learner.forward_tokens


def _full_batch(config: RunConfig, tokens: int) -> Batch:
    """Responses of the greatest length to one prompt, which fill a pass."""
    data = config.data
    longest = data.max_prompt_tokens + data.max_response_tokens
    num_rows = (tokens - data.max_prompt_tokens) // data.max_response_tokens
    row = Trajectory(
        token_ids=np.full(longest, 5, np.int32),
        prompt_length=data.max_prompt_tokens,
        loss_mask=np.zeros(longest, np.bool_),
        behavior_logprobs=np.zeros(longest, np.float32),
        versions=np.full(longest, NO_VERSION, np.int32),
        is_truncated=False,
        score=Score(reward=0.0, parts={}, verdicts=(), latency_s=0.0),
    )
    group = Group(
        group_id=0,
        attempt=1,
        prompt_id="",
        purpose=Purpose.EVAL,
        data_source="",
        generator="",
        admitted_version=NO_VERSION,
        trajectories=[row] * num_rows,
        generation_s=0.0,
    )
    return collate_part(whole([group]), device=CPU)


@contextlib.contextmanager
def _without_values(hf: Mapping[str, Any], num_ranks: int) -> Iterator[None]:
    """Replace what reads values of tensors: they have none."""
    settings = dict(hf)
    hf_config = AutoConfig.for_model(settings.pop("model_type"), **settings)

    def made(*_: object, dtype: torch.dtype, **__: object) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        return model

    def copied(model: PreTrainedModel) -> PreTrainedModel:
        copy: PreTrainedModel = type(model)(model.config)
        if model.is_gradient_checkpointing:
            copy.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return copy.train(model.training)

    def unchecked(lm: PreTrainedModel, _: Any) -> models.Policy:
        return loading._prepared(lm)

    mesh = init_device_mesh("cpu", (num_ranks,))
    with contextlib.ExitStack() as replaced:
        for module, name, value in (
            (loading, "AutoModelForCausalLM", types.SimpleNamespace(from_pretrained=made)),
            (loading, "_checked", unchecked),
            (models, "copy", types.SimpleNamespace(deepcopy=copied)),
            # The attention of GPUs: its kernel has a form for tensors without storage.
            (models, "plan", VarlenPlan),
            # On a GPU heads stay in bfloat16.
            (logprobs, "_factors", lambda *factors: factors),
            (sharding, "init_device_mesh", lambda *_, **__: mesh),
            (sharding, "ensure_group_of_one", lambda *_: None),
            (optimizer.ModelOptimizer, "_gradient_norm", lambda *_: 0.0),
            # The kernel works in place; without storage it is replaced by one that makes copies.
            (torch, "_fused_adamw_", lambda *_, **__: None),
            # PEFT moves an adapter to the device of its base, where it is already.
            (torch.nn.Module, "to", lambda module, *_, **__: module),
        ):
            replaced.enter_context(mock.patch.object(module, name, value))
        yield


def settings_of(conf: str, *, ranks: int, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a configuration of a learner on GPUs."""
    return compose_unchecked(
        conf,
        with_defaults(
            overrides,
            [
                "model.dtype=bfloat16",
                "learner.gpus_each=1",
                f"learner.ranks={ranks}",
                "data.max_prompt_tokens=512",
                "data.max_response_tokens=1536",
            ],
        ),
    )


def main() -> None:
    """Print a row for each model and algorithm."""
    torch.set_num_threads(1)
    for name, ranks in (("Qwen3-0.6B", 1), ("Qwen3-1.7B", 2), ("Qwen3-8B", 8)):
        for conf in ("grpo_code", "ppo_code"):
            config = settings_of(
                conf, ranks=ranks, overrides=["learner.gradient_checkpointing=true"]
            )
            accounted = accounted_bytes(hf_settings(name), config)["Total"]
            planned = planned_bytes(hf_settings(name), config)
            print(
                f"{name:12} {conf:9} ranks {ranks}: account {accounted / _GIB:6.2f} GiB,"
                f" plan {planned / _GIB:6.2f} GiB ({planned / accounted - 1:+.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
