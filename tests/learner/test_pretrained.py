"""Sharded learners read their weights unit by unit: the same values, with the memory of a share."""

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
from async_rl.learner.loading import load_models
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


@pytest.mark.parametrize("change", ["quantised", "expert"])
def test_weights_that_do_not_fit_as_they_are_are_left_to_transformers(
    tmp_path: Path, change: str
) -> None:
    experts = EXPERTS | {"head_dim": 8} if change == "expert" else {}
    path = save(tmp_path / "model", "Qwen3Moe" if experts else "Llama", **experts)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "quantised":  # its scales are in a tensor of another name
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    else:
        del tensors["model.layers.3.mlp.experts.11.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert PretrainedWeights.open(path, trust_remote_code=False) is None


def test_an_architecture_that_cannot_be_trained_is_refused_before_it_is_sharded(
    tmp_path: Path,
) -> None:
    path = save(tmp_path / "model", "Gemma2", head_dim=8, sliding_window=4)
    assert PretrainedWeights.open(path, trust_remote_code=False) is not None
    with pytest.raises(ConfigError, match="caps its logits"):
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


NUM_LAYERS, NUM_RANKS = 16, 64
M_MMAP_THRESHOLD = -3


def peak_of_loading(model_path: Path, out: Path) -> None:
    """Loads policy, critic and reference as the first of 64 ranks; writes the peak of its memory.
    Its process group sends nothing: loading needs no other rank.
    """
    torch.set_num_threads(1)
    # Memory of freed tensors goes back at once, as that of large tensors does anyway.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    config = make_config("ppo_code", "algorithm.kl=loss", "learner.ranks=2")
    ranks = dataclasses.replace(RANK, world_size=NUM_RANKS, offload="none")
    # What the first tensors, the mesh and the imports of models need is not of this model.
    load_models(config, model_path.with_name("small"), ranks)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    models = load_models(config, model_path, ranks)
    share = sum(p.to_local().nbytes for model in models for p in model.parameters())
    out.write_text(json.dumps({"peak": memory("VmHWM") - before, "share": share}))


def memory(key: str) -> int:
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_a_rank_needs_its_share_and_two_layers_to_load(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", hidden=256, layers=NUM_LAYERS)
    make_model(tmp_path / "small")
    out = tmp_path / "found.json"
    process = warm_context().Process(target=peak_of_loading, args=(path, out))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    found, size = json.loads(out.read_text()), (path / "model.safetensors").stat().st_size
    # Three models, divided among the ranks.
    assert found["share"] * NUM_RANKS == pytest.approx(3 * size, rel=0.01)
    assert found["peak"] < found["share"] + 2 * size / NUM_LAYERS + 2**23
