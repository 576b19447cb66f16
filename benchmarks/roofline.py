"""Compute the time of one learner pass on a GPU from the kernels that it launches. Needs no GPU.

    python -m benchmarks.roofline [--model 0.6b|1.7b|8b|DIRECTORY] [--gpu h100|h200] [--groups N]

A decoder block, eager and compiled, and the head run on tensors without storage. Each kernel takes
max(bytes / bandwidth, FLOPs / rate) and 5 us more. The kernels of the compiled block are the ones
that torch's inductor would schedule, here for a CPU, whose rules of fusion are nearly those of a
GPU. For the steps of docs/performance.md the times are 12 percent below those in which the GPU
worked. Added by hand: the copies of FSDP on one rank, and the optimizer, shared by --passes passes.
Utilisation counts the FLOPs that the model needs, over the rate of a large product.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from async_rl.algorithms import fused_logprobs
from async_rl.algorithms.logprobs import logprobs_by_rows
from async_rl.learner.attention import VarlenPlan, use_segments

SHAPES = {
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "8b": (4096, 12_288, 36, 32, 8, False),
}
LOGITS_BYTES = 512 * 2**20
_NO_KERNEL = ("detach", "_unsafe_view", "empty", "empty_like", "alias")


class Gpu(NamedTuple):
    """Ceilings as measured: bytes read and written per second, FLOPs per second of a large
    bfloat16 product and of attention, and the seconds that every kernel adds.
    """

    bandwidth: float
    product: float
    attention: float
    launch: float = 5e-6


# The kernels of varlen_attn, forward and backward, over the rate of a large product: 168 TFLOP/s on
# an H200 for 64 sequences of mixed lengths.  An H100 has the same arithmetic.
ATTENTION_SHARE = 0.21
GPUS = {"h100": Gpu(3.0e12, 798e12, 168e12), "h200": Gpu(4.25e12, 790e12, 168e12)}


def healthy(device: str) -> Gpu | None:
    """Return the ceilings of a device by its name, None for a device without a measurement."""
    return next((gpu for name, gpu in GPUS.items() if name in device.lower()), None)


class Kernel(NamedTuple):
    """One launch, or several of one operation."""

    kind: str
    size_bytes: float
    flops: float = 0.0
    launches: int = 1

    def seconds(self, gpu: Gpu) -> float:
        """Return the time on the GPU."""
        rate = gpu.attention if self.kind == "attention" else gpu.product
        work = max(self.size_bytes / gpu.bandwidth, self.flops / rate)
        return work + self.launches * gpu.launch


class Row(NamedTuple):
    """A packed row of whole groups."""

    segments: np.ndarray
    tokens: int
    responses: int
    pairs: float

    @classmethod
    def of(cls, groups: int, *, samples: int = 8, prompt: int = 128, response: int = 512) -> Row:
        """Return a row of groups, each with one prompt and some responses of that many tokens."""
        table, start = [], 0
        for _ in range(groups):
            # The first response is in the segment of the prompt that it continues.
            last = start + prompt - 1
            table.append((start, prompt + response, -1))
            start += prompt + response
            for _ in range(samples - 1):
                table.append((start, response, last))
                start += response
        own = prompt * (prompt + 1) / 2
        others = samples * (response * prompt + response * (response + 1) / 2)
        return cls(np.array(table), start, groups * samples * response, groups * (own + others))


def tensor_bytes(values: Any) -> int:
    """The bytes of all tensors in a tree of arguments; an expanded tensor counts once."""
    found = [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor)]
    return sum(min(x.numel() * x.itemsize, x.untyped_storage().nbytes()) for x in found)


class Recorder(TorchDispatchMode):
    """Records each operation that launches a kernel."""

    def __init__(self, attention_flops: float) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._attention_flops = attention_flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "prim" or func.is_view or name in _NO_KERNEL:
            return out
        size = tensor_bytes((args, kwargs)) + tensor_bytes(out)
        if "_varlen_attn" in name:
            self.kernels.append(attention(name, size, self._attention_flops))
        elif func.overloadpacket in flop_registry:
            count = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
            self.kernels.append(Kernel("product", size, count))
        else:
            self.kernels.append(Kernel("rest", size))
        return out


def attention(name: str, size: float, flops: float) -> Kernel:
    """The kernels of attention: backward has five products for two, and sums of shared heads."""
    return (
        Kernel("attention", size, flops * 2.5, 5)
        if "backward" in name
        else Kernel("attention", size, flops)
    )


def scheduled(graph: Any, inputs: Sequence[Any], kernels: list[Kernel], flops: float) -> Any:
    """Append the kernels that inductor would launch for a graph; return the graph itself."""
    from torch._inductor import ir
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    mode = torch._guards.detect_fake_mode(inputs)
    assert mode is not None
    with V.set_fake_mode(mode):
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, inputs, shape_env=mode.shape_env)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            lowering._update_scheduler()
            for node in lowering.scheduler.nodes:
                # Neither launches anything.
                is_nothing = isinstance(node, NopKernelSchedulerNode)
                if is_nothing or isinstance(node.node, ir.MultiOutput):
                    continue
                size = float(node.get_read_write_buffers_sizes())
                called = str(getattr(node.node, "op_overload", ""))
                if "_varlen_attn" in called:
                    kernels.append(attention(called, size, flops))
                elif node.is_extern() and "index_put" in called:
                    # Sums of shared prompts: sorted by token first.
                    kernels.append(Kernel("rest", 2 * size, 0, 6))
                else:
                    count = float(node.estimate_flops() or 0) if node.is_extern() else 0.0
                    kernels.append(Kernel("product" if count else "rest", size, count))
    return graph


class Block(nn.Module):
    """A decoder layer with the plan of a row."""

    def __init__(self, layer: nn.Module, plan: VarlenPlan) -> None:
        super().__init__()
        self.layer = layer
        self._plan = plan

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        out = self.layer(hidden, position_embeddings=(cos, sin), segments=self._plan)
        whole: Tensor = out[0] if isinstance(out, tuple) else out
        return whole


def block_kernels(config: Any, row: Row, *, is_compiled: bool) -> list[Kernel]:
    """The kernels of forward and backward pass of one layer."""
    heads, width = config.num_attention_heads, config.head_dim
    flops = 4.0 * heads * width * row.pairs
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    kernels: list[Kernel] = []
    plan = VarlenPlan(row.segments, torch.device("cpu"))
    with mode:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        use_segments(model)
        block: Any = Block(model.base_model.layers[0], plan)
        hidden = torch.empty(1, row.tokens, config.hidden_size, dtype=torch.bfloat16)
        places = [torch.empty(1, row.tokens, width, dtype=torch.bfloat16) for _ in range(2)]
        hidden.requires_grad_()
        if is_compiled:
            from torch._inductor.decomposition import select_decomp_table

            compiler = functools.partial(scheduled, kernels=kernels, flops=flops)
            parameters = dict(block.named_parameters())
            run = aot_function(
                lambda weights, *given: torch.func.functional_call(block, weights, given),
                fw_compiler=compiler,
                bw_compiler=compiler,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )
            out = run(parameters, hidden, *places)
            pull = torch.empty_like(out)
        else:
            recorder = Recorder(flops)
            with recorder:
                out = block(hidden, *places)
                out.backward(torch.empty_like(out))
            return recorder.kernels
    # Outside of the mode, because the graph is copied with the constants of the plan.
    out.backward(pull)
    return kernels


def head_kernels(config: Any, row: Row, *, is_fused: bool) -> list[Kernel]:
    """The kernels of the log-probs of all response tokens, forward and backward."""
    recorder = Recorder(0)
    hidden = torch.empty(row.responses, config.hidden_size, device="meta", dtype=torch.bfloat16)
    head = torch.empty(config.vocab_size, config.hidden_size, device="meta", dtype=torch.bfloat16)
    targets = torch.empty(row.responses, device="meta", dtype=torch.int64)
    hidden.requires_grad_()
    head.requires_grad_()

    def as_one_kernel(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes():
                out = function(*args)
            # The second pass over a row of logits finds them in the cache.
            recorder.kernels.append(Kernel("rest", tensor_bytes(args) + tensor_bytes(out)))
            return out

        return call

    plain = fused_logprobs._run
    fused_logprobs._run = as_one_kernel
    try:
        with recorder:
            if is_fused:
                logprobs, _ = fused_logprobs.fused_logprobs(
                    hidden, head, targets, 1.0, LOGITS_BYTES // 4
                )
            else:
                chunk_tokens = LOGITS_BYTES // 4 // config.vocab_size
                logprobs, *_ = logprobs_by_rows(
                    hidden, head, targets, 1.0, chunk_tokens, None, None, None
                )
            logprobs.backward(torch.empty_like(logprobs))
    finally:
        fused_logprobs._run = plain
    return recorder.kernels


def gathering(parameters: int, tensors: int) -> list[Kernel]:
    """FSDP's copies of one unit on one rank: each parameter is cast, and copied to its place."""
    return [Kernel("rest", size * parameters, 0.0, tensors) for size in (6, 4)]


def adding(parameters: int, tensors: int) -> list[Kernel]:
    """The gradients of one unit, added in float32 to those of other passes."""
    return [Kernel("rest", 10 * parameters, 0.0, tensors)]


def joining(parameters: int) -> list[Kernel]:
    """The gradients of one unit, joined and copied."""
    return [Kernel("rest", 8 * parameters), Kernel("rest", 8 * parameters)]


def needed_flops(config: Any, row: Row, layer_parameters: int) -> float:
    """The FLOPs that the model needs for one pass: 6 per parameter and token, and attention."""
    width = config.num_attention_heads * config.head_dim
    linear = config.num_hidden_layers * layer_parameters * row.tokens
    linear += config.vocab_size * config.hidden_size * row.responses
    return 6.0 * linear + 12.0 * config.num_hidden_layers * width * row.pairs


def load(model: str) -> Any:
    """Return the configuration of a named shape, or of a directory with a config.json."""
    if model not in SHAPES:
        return AutoConfig.from_pretrained(model)
    hidden, inner, layers, heads, kv_heads, is_tied = SHAPES[model]
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=is_tied,
    )


def estimate(
    config: Any, gpu: Gpu, row: Row, *, is_compiled: bool, passes: int
) -> dict[str, float]:
    """Return the figures of one pass of forward and backward, with its share of the step."""
    fields = {**config.to_dict(), "num_hidden_layers": 1}
    if "layer_types" in fields:
        fields["layer_types"] = config.layer_types[:1]
    one = type(config)(**fields)
    layers = config.num_hidden_layers
    block = block_kernels(one, row, is_compiled=is_compiled)
    head = head_kernels(config, row, is_fused=is_compiled)
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(one).base_model.layers[0]
    parameters = sum(p.numel() for p in layer.parameters())
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    # Compiled as the product runs: the weights are gathered, and the gradients joined, once for all
    # passes of a step; eager as FSDP does by itself, in each pass, the weights in each direction.
    gathers, joins = (1 / passes, 1 / passes) if is_compiled else (2.0, 1.0)
    tensors = len(list(layer.parameters()))
    copies = gathering(parameters, tensors)
    sums = adding(parameters, tensors)
    joined = joining(parameters)
    root = [*gathering(vocabulary, 2), *adding(vocabulary, 2), *joining(vocabulary)]
    # AdamW reads four values and writes three; the norm reads one more, clipping two.
    step = 40.0 * (layers * parameters + vocabulary) / gpu.bandwidth

    def seconds(kernels: Sequence[Kernel], kind: str = "") -> float:
        return sum(k.seconds(gpu) for k in kernels if kind in ("", k.kind))

    sharding = gathers * seconds(copies) + seconds(sums) + joins * seconds(joined)
    total = layers * (seconds(block) + sharding) + seconds([*head, *root]) + step / passes
    kinds_of_use = ("product", "attention")
    used = [layers * seconds(block, kind) + seconds(head, kind) for kind in kinds_of_use]
    needed = needed_flops(config, row, parameters)
    return {
        "kernels": float(sum(k.launches for k in block)),
        "sharding_kernels": gathers * 2 * tensors + tensors + joins * 2,
        "block_ms": 1e3 * seconds(block),
        "sharding_ms": 1e3 * sharding,
        "head_ms": 1e3 * seconds(head),
        "pass_ms": 1e3 * total,
        "products_and_attention": sum(used) / total,
        "mfu": needed / total / gpu.product,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="*", default=list(SHAPES))
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--groups", type=int, default=4, help="of 8 responses of 512 tokens")
    parser.add_argument("--passes", type=int, default=4, help="passes of one optimizer step")
    for name in Gpu._fields:
        parser.add_argument(f"--{name}", type=float, help="a ceiling, in units of one per second")
    given = parser.parse_args()
    chosen = {name: value for name in Gpu._fields if (value := vars(given)[name]) is not None}
    gpu = GPUS[given.gpu]._replace(**chosen)
    row = Row.of(given.groups)
    print("| model | run | kernels, FSDP's | block | FSDP | head | pass | products | MFU |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in given.model:
        for is_compiled in (False, True):
            found = estimate(load(model), gpu, row, is_compiled=is_compiled, passes=given.passes)
            run = "compiled" if is_compiled else "eager"
            print(
                f"| {model} | {run} | {found['kernels']:.0f}, {found['sharding_kernels']:.0f} |"
                f" {found['block_ms']:.2f} ms | {found['sharding_ms']:.2f} ms |"
                f" {found['head_ms']:.1f} ms | {found['pass_ms']:.0f} ms |"
                f" {found['products_and_attention']:.2f} | {found['mfu']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
