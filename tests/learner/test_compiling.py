"""Compiled decoder blocks against eager ones, with the attention of a GPU."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_support import relative_difference, varlen
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from async_rl.algorithms import compiling
from async_rl.algorithms.compiling import Compilation
from async_rl.batching.packing import Pass, pack_rows
from async_rl.config.generation import LoraAdapter
from async_rl.learner import attention, models
from async_rl.learner.attention import VarlenPlan, use_segments
from async_rl.learner.loading import compile_blocks
from async_rl.learner.models import Policy
from async_rl.learner.sharding import Ranks
from async_rl.weights.lora import add_adapter

# torch's own compiler warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    plain = torch.compile
    monkeypatch.setattr(
        compiling.torch, "compile", lambda f, **named: plain(f, backend=backend, **named)
    )


@pytest.fixture
def gpu_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(models, "plan", VarlenPlan)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_policy(model_path: Path, *, has_adapter: bool = False) -> tuple[Policy, list[nn.Module]]:
    """One block, in float64, as the flash kernels have no float32 (a model's norms compute in
    float32 all the same).
    """
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM.from_pretrained(model_path, num_hidden_layers=1).eval()
    use_segments(lm)
    if has_adapter:
        add_adapter(lm, LoraAdapter(kind="lora", rank=2, alpha=4, targets=["q_proj"], slots=1))
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return Policy(lm.double()), [*lm.model.layers]


def rows() -> Iterator[Pass]:
    """Rows of different sizes, all with shared prompts, of 2 to 5 responses."""
    rng = np.random.default_rng(0)
    for count in (3, 5, 2):
        prompt = rng.integers(0, 50, 4)
        tails = [rng.integers(0, 50, rng.integers(2, 20)) for _ in range(count)]
        whole = [np.concatenate([prompt, tail]).astype(np.int32) for tail in tails]
        yield pack_rows(whole, prompt_length=4, device=CPU)


def outputs(policy: Policy, row: Pass) -> list[Tensor]:
    """The log-probs of a row, and the gradients of their sum and of the entropies."""
    policy.zero_grad()
    output = policy(row, temperature=0.9, chunk_tokens=1024)
    (output.logprobs.sum() + output.entropies.sum()).backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    return [output.logprobs.detach(), *(p.grad.clone() for p in trained if p.grad is not None)]


@pytest.mark.slow
def test_compiled_blocks_compute_as_eager_ones_with_one_graph_for_rows_of_all_sizes(
    model_path: Path, gpu_plan: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graphs are those of the learner; the code that inductor writes for them is torch's.
    compile_with(monkeypatch, "aot_eager")
    eager, _ = make_policy(model_path, has_adapter=True)
    compiled, blocks = make_policy(model_path, has_adapter=True)
    compile_blocks(blocks)
    for row in rows():
        mine, theirs = (outputs(policy, row) for policy in (compiled, eager))
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-5)
        assert relative_difference(mine[1:], theirs[1:]) < 1e-5
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_block_that_cannot_be_compiled_runs_eagerly_and_is_reported_once(
    model_path: Path,
    gpu_plan: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise FileNotFoundError("there is no C compiler")

    compile_with(monkeypatch, no_compiler)
    eager, _ = make_policy(model_path)
    compiled, blocks = make_policy(model_path)
    compile_blocks(blocks)
    row = next(rows())
    with caplog.at_level(logging.WARNING):
        for mine, theirs in zip(outputs(compiled, row), outputs(eager, row), strict=True):
            assert torch.equal(mine, theirs)
    [record] = [r for r in caplog.records if r.name == compiling.__name__]
    assert "no C compiler" in record.getMessage()


def test_an_error_of_the_block_itself_is_not_taken_for_one_of_the_compiler() -> None:
    def fails(x: Tensor) -> Tensor:
        return x @ torch.ones(7)

    torch._dynamo.reset()
    compilation = Compilation()
    with pytest.raises(RuntimeError, match="size"):
        compilation.of(fails)(torch.ones(3))


def test_experts_and_divided_blocks_are_left_as_they_are(
    model_path: Path, process_group: None
) -> None:
    config = Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_experts=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=10,
        mlp_only_layers=[1],
    )
    with torch.device("meta"):
        with_experts, dense = Qwen3MoeForCausalLM(config).model.layers
    policy, (divided,) = make_policy(model_path)
    sizes: Any = {"rank": 0, "world_size": 1, "device": CPU, "dtype": torch.float32}
    ranks = Ranks(**sizes, min_shard_params=1000, offload="parameters")
    ranks.shard(policy.float(), [], fill=None)
    blocks = [with_experts, dense, divided]
    compile_blocks(blocks)
    assert ["forward" in vars(block) for block in blocks] == [False, True, False]
