"""The kernels of a layer, counted without a GPU, and the rate that follows from them."""

from transformers import Qwen3Config

from benchmarks.roofline import Row, block_kernels

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


def test_the_products_of_a_layer_have_six_flops_per_parameter_and_token() -> None:
    kernels = block_kernels(CONFIG, ROW, is_compiled=False)
    products = [k for k in kernels if k.kind == "product"]
    assert len(products) == 3 * 7
    assert sum(k.flops for k in products) == 6 * PARAMETERS * ROW.tokens
    attention = [k for k in kernels if k.kind == "attention"]
    # 2 products forward, 5 backward, 2 FLOPs per pair and element of a head.
    assert sum(k.flops for k in attention) == 7 * 2 * 4 * 64 * ROW.pairs
