"""Sharded learners read their weights unit by unit: the same values, with the memory of a share."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from learner_support import make_config, make_model
from safetensors.torch import load_file, save_file
from tables import table
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from warm_processes import warm_context

from async_rl.core.errors import ConfigError
from async_rl.learner import sharding
from async_rl.learner.loading import load_models
from async_rl.learner.models import Policy
from async_rl.learner.pretrained import PretrainedWeights
from async_rl.learner.sharding import Ranks

CPU = torch.device("cpu")
SIZES = table(__file__, "sizes")
EXPERTS = {
    "num_experts": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LATENT = table(__file__, "latent")
RANK = Ranks(
    rank=0, world_size=1, device=CPU, dtype=torch.float32, min_shard_params=0, offload="parameters"
)
"""A rank that shards on the CPU."""


def save(path: Path, kind: str, **settings: Any) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, values in model.named_buffers():
            if name.endswith("correction_bias"):
                values.normal_()
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"tie_word_embeddings": False, "dtype": "bfloat16"}),
        ("Qwen3Moe", EXPERTS | {"head_dim": 8}),
        ("DeepseekV3", EXPERTS | LATENT),
    ],
)
def test_weights_and_buffers_are_those_of_a_model_that_is_loaded_whole(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    path = save(tmp_path / "model", kind, **settings)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = PretrainedWeights.open(path, trust_remote_code=False)
    assert weights is not None
    model = weights.empty_model()
    assert all(p.is_meta for p in model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights.fill(model.model.layers[1], names=names, dtype=torch.float32)
    assert all(p.is_meta for p in model.model.layers[2].parameters()), "only the unit is read"
    weights.fill(model, names=names, dtype=torch.float32)
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs), name
    for (name, mine), (_, theirs) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == (whole.lm_head.weight is whole.model.embed_tokens.weight)


@pytest.mark.parametrize("change", ["quantised", "shape", "expert", "converted"])
def test_weights_that_do_not_fit_as_they_are_are_left_to_transformers(
    tmp_path: Path, change: str
) -> None:
    kind, settings = {
        "expert": ("Qwen3Moe", EXPERTS | {"head_dim": 8}),
        "converted": ("Mixtral", {"num_local_experts": 4}),
    }.get(change, ("Llama", {}))
    path = save(tmp_path / "model", kind, **settings)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "quantised":  # its scales are in a tensor of another name
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif change == "expert":
        del tensors["model.layers.3.mlp.experts.11.down_proj.weight"]
    elif change == "shape":
        tensors[name] = tensors[name][1:].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    assert PretrainedWeights.open(path, trust_remote_code=False) is None


@pytest.mark.parametrize(
    ("kind", "settings", "reason"), table(__file__, "an_architecture_that_cannot_be")
)
def test_an_architecture_that_cannot_be_trained_is_refused_before_it_is_sharded(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    path = save(tmp_path / "model", kind, **settings)
    assert PretrainedWeights.open(path, trust_remote_code=False) is not None
    with pytest.raises(ConfigError, match=reason):
        load_models(make_config("grpo_code"), path, RANK)


def test_the_first_layers_have_every_kind_of_attention(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 2
    path = save(
        tmp_path / "model",
        "Qwen2",
        num_hidden_layers=5,
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=4,
    )
    weights = PretrainedWeights.open(path, trust_remote_code=False)
    assert weights is not None
    first = weights.first_layers()
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert len(first.model.layers) == 4
    assert torch.equal(
        first.model.layers[3].mlp.up_proj.weight, whole.model.layers[3].mlp.up_proj.weight
    )


@pytest.mark.parametrize(("eta", "dtype"), [(0.0, torch.bfloat16), (0.1, torch.float32)])
def test_a_reference_that_never_changes_has_the_type_of_the_computation(
    tmp_path: Path, process_group: None, eta: float, dtype: torch.dtype
) -> None:
    config = make_config("grpo_code", "algorithm.kl=loss", f"algorithm.kl.ref_ema_eta={eta}")
    ranks = dataclasses.replace(RANK, dtype=torch.bfloat16, offload="none")
    models = load_models(config, make_model(tmp_path / "model"), ranks)
    assert isinstance(models.reference, Policy)
    assert {p.dtype for p in models.reference.parameters()} == {dtype}
    assert {p.dtype for p in models.policy.parameters()} == {torch.float32}


NUM_LAYERS = 16
M_MMAP_THRESHOLD = -3


def peak_of_loading(rank: int, world_size: int, model_path: Path, out: Path) -> None:
    """Loads policy, critic and reference as one of the ranks; writes the peak of its memory.

    More than two ranks have a process group that sends nothing: loading needs no other rank.
    """
    torch.set_num_threads(1)
    # Memory of freed tensors goes back at once, as that of large tensors does anyway.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    if world_size > 2:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    else:
        sharding.join(
            dist.FileStore(f"{out}/rendezvous", world_size),  # type: ignore[attr-defined]
            rank,
            world_size,
            host="127.0.0.1",
            device=CPU,
            timeout_s=60,
        )
    config = make_config("ppo_code", "algorithm.kl=loss", "learner.ranks=2")
    ranks = dataclasses.replace(RANK, rank=rank, world_size=world_size, offload="none")
    # What the first tensors, the mesh and the imports of models need is not of this model.
    load_models(config, model_path.with_name("small"), ranks)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    models = load_models(config, model_path, ranks)
    found = {"peak": memory("VmHWM") - before}
    found |= {"share": sum(p.to_local().nbytes for model in models for p in model.parameters())}
    (out / f"{rank}.json").write_text(json.dumps(found))


def memory(key: str) -> int:
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_a_rank_needs_its_share_and_two_layers_to_load(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", hidden=256, layers=NUM_LAYERS)
    make_model(tmp_path / "small")
    context = warm_context()
    processes = {}
    for world_size in (2, 64):
        for rank in (0, world_size - 1):
            out = tmp_path / str(world_size)
            out.mkdir(exist_ok=True)
            processes[world_size, rank] = context.Process(
                target=peak_of_loading, args=(rank, world_size, path, out)
            )
    for process in processes.values():
        process.start()
    size = (path / "model.safetensors").stat().st_size
    for (world_size, rank), process in processes.items():
        process.join(120)
        assert process.exitcode == 0
        found = json.loads((tmp_path / str(world_size) / f"{rank}.json").read_text())
        whole = found["share"] * world_size
        assert whole == pytest.approx(3 * size, rel=0.01), "three models, divided among the ranks"
        assert found["peak"] < found["share"] + 2 * size / NUM_LAYERS + 2**23
