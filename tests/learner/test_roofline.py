"""The kernels of a layer, counted without a GPU, and the rate that follows from them."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from benchmarks.roofline import GPUS, Gpu, Kernel, Row, block_kernels, estimate, head_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own compiler warns about itself
CONFIG = Qwen3Config(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1024,
    tie_word_embeddings=True,
)
ROW = Row.of(1)
# Query, key, value and output, gate, up and down: parameters of the products of one layer.
PARAMETERS = 256 * (4 + 2 + 2 + 4) * 64 + 3 * 256 * 768


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_products_of_a_layer_have_six_flops_per_parameter_and_token(is_compiled: bool) -> None:
    kernels = block_kernels(CONFIG, ROW, is_compiled=is_compiled)
    products = [k for k in kernels if k.kind == "product"]
    assert len(products) == 3 * 7
    assert sum(k.flops for k in products) == 6 * PARAMETERS * ROW.tokens
    attention = [k for k in kernels if k.kind == "attention"]
    # 2 products forward, 5 backward, 2 FLOPs per pair and element of a head.
    assert sum(k.flops for k in attention) == 7 * 2 * 4 * 64 * ROW.pairs


def test_a_compiled_layer_launches_at_most_70_kernels() -> None:
    eager, compiled = (
        estimate(CONFIG, GPUS["h100"], ROW, is_compiled=way, passes=1) for way in (False, True)
    )
    assert compiled["kernels"] <= 70 < 170 <= eager["kernels"]
    # FSDP copies the eleven parameters of a layer, in the compiled run once for all passes.
    assert (compiled["sharding_kernels"], eager["sharding_kernels"]) == (2 * 11 + 13, 4 * 11 + 13)
    assert compiled["mfu"] > 1.5 * eager["mfu"]


def test_the_fused_head_moves_a_third_of_the_bytes() -> None:
    plain, fused = (head_kernels(CONFIG, ROW, is_fused=way) for way in (False, True))
    assert sum(k.size_bytes for k in fused) < sum(k.size_bytes for k in plain) / 3
    head = 6 * 256 * 1024 * ROW.responses
    assert sum(k.flops for k in fused) == head


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_flops() -> None:
    gpu = Gpu(bandwidth=10, product=100, attention=50, launch=1)
    assert Kernel("rest", 30).seconds(gpu) == 3 + 1
    assert Kernel("product", 30, 500).seconds(gpu) == 5 + 1
    assert Kernel("attention", 30, 500, 2).seconds(gpu) == 10 + 2
