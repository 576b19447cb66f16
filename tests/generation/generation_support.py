"""Small random models, their versions, and the slow obvious oracle of what an engine should have
said.
"""

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
import yaml

from async_rl.core.calls import Support
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec

END_TOKENS = (2, 3, 4, 5)
"""Four of them, so that samples of a random model end now and then."""
SUPPORTED_PROMPT = list(range(20, 40))
_FIELDS = yaml.safe_load(Path(__file__).with_name("supports.yaml").read_text())
SUPPORTS = {name: Support(**fields) for name, fields in _FIELDS.items()}
"""Every kind of support, and mixtures."""
KIND = "$kind"
"""The key of a map that stands for a value that MessagePack does not have."""
SUPPORTED_ENDS = (1, 7)
NEEDS_NO_TOKENS = (
    '{"$defs": {"g": {"items": {"properties": {"k": {"type": "string", "pattern": "^a{1,255}$"}}}'
    '}}, "properties": {"g": {"$ref": "#/$defs/g"}}}'
)
"""A schema that xgrammar 0.2.8 compiles without the tokens of a model only."""
RANK, SCALING = 8, 2.0
SLOTS = 6
PROMPT = np.arange(20, 32, dtype=np.int32)
_PREFIX = "base_model.model."
QUANTIZED_ROWS = [list(range(start, start + 48)) for start in (20, 90)]


def make_speaker(path: Path) -> Any:
    """Write a random model with the tokenizer of the embedded one. One end token is a byte."""
    # Here: scenarios import this file in processes that do not know `benchmarks`.
    from benchmarks.embedded.vocabulary import build_tokenizer

    tokenizer = build_tokenizer(['ab abc (a) [b] {"a": 1, "b": "c"}'] * 3, 512)
    model = make_model(path, vocab_size=len(tokenizer) + 5, ends=SUPPORTED_ENDS)
    tokenizer.save_pretrained(path)
    return model


def model_from(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def run_scenario(name: str, *arguments: object, is_killed: bool = False) -> Any:
    """Return what `file:function` of this folder returns, in a process of its own, since vLLM
    changes its process for good. is_killed: that process ends as a generator that is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request").write_bytes(encode([name, arguments, is_killed]))
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{folder}\n")
        server.stdin.flush()
        try:
            code = server.stdout.readline()
        except BaseException:
            # The time of the test is up. The next scenario would read the answer to this one.
            server.kill()
            _server.cache_clear()
            raise
        expected = -signal.SIGKILL if is_killed else 0
        assert code == f"{expected}\n", (code, Path(folder, "output").read_text()[-5000:])
        return decode(Path(folder, "answer").read_bytes())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose end of the pipe it reads."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("scenario_server.py"))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def make_model(
    path: Path,
    *,
    is_tied: bool = True,
    has_experts: bool = False,
    ends: Sequence[int] = END_TOKENS,
    **sizes: int,
) -> Any:
    """Write a random Qwen3 whose distributions are far from uniform."""
    torch.manual_seed(7)
    kinds: tuple[Any, Any] = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
    values = {
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    if has_experts:
        kinds = (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM)
        # All of them compute each token: a rounding cannot decide between two.
        values |= {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    config = kinds[0](
        **(values | sizes), tie_word_embeddings=is_tied, initializer_range=0.2, eos_token_id=ends[0]
    )
    model = kinds[1](config).float().eval()
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
    return model


def weights_of(model: Any, version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version: those of the model for 0, else moved by noise that depends on the
    version only.
    """
    noise = torch.Generator().manual_seed(version)
    scale = 0.05 if version else 0.0
    return {
        name: p.detach() + scale * torch.randn(p.shape, generator=noise)
        for name, p in model.named_parameters()
    }


def publisher_of(tensors: Mapping[str, torch.Tensor]) -> SharedTensors:
    return SharedTensors([tensor_spec(name, tensor) for name, tensor in tensors.items()])


def with_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    copy = type(model)(model.config).float().eval()
    copy.load_state_dict(tensors, strict=False)
    copy.tie_weights()
    return copy


@functools.cache
def model_of(model: Any, version: int) -> Any:
    return with_weights(model, weights_of(model, version))


def replay(
    models: Mapping[int, Any],
    prompt: Sequence[int],
    token_ids: Sequence[int],
    *rest: Any,
    **how: Any,
) -> Any:
    """float32 log-prob of each new token. rest, how: of `replayed`."""
    table = replayed(models, prompt, token_ids, *rest, **how)
    return table.gather(-1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


@torch.no_grad()
def replayed(
    models: Mapping[int, Any],
    prompt: Sequence[int],
    token_ids: Sequence[int],
    versions: Sequence[int],
    temperature: float,
    edits: Any = None,
    *,
    keeps_cache: bool = True,
) -> torch.Tensor:
    """float32 log-probs of the vocabulary at each new token: the one at t is drawn by
    models[versions[t]], on the keys and values that older ones left, or by that model alone.
    """
    if not keeps_cache and len(set(versions)) > 1:
        num = len(versions)
        alone = {
            version: replayed(models, prompt, token_ids, [version] * num, temperature, edits)
            for version in set(versions)
        }
        return torch.stack([alone[version][t] for t, version in enumerate(versions)])
    inputs = [*prompt, *token_ids[:-1]]
    first = len(prompt) - 1
    cache = transformers.DynamicCache()
    rows = []
    start = 0
    while start < len(inputs):
        version = versions[max(0, start - first)]
        end = start + 1
        while end < len(inputs) and versions[max(0, end - first)] == version:
            end += 1
        logits = models[version](
            torch.tensor([inputs[start:end]]), past_key_values=cache, use_cache=True
        ).logits[0]
        rows.append(logits[max(0, first - start) :] if end > first else logits[:0])
        start = end
    table = torch.cat(rows).float() / temperature
    if edits is not None:
        edits.apply(table, slice(None))
    return table.log_softmax(-1)


def worst_difference(
    at: Callable[[int], Any], group: Mapping[str, Any], *, keeps_cache: bool = True
) -> float:
    """Largest difference in nats between what an engine said of its tokens and what the models of
    their versions say. keeps_cache: else each token is drawn by one model alone.
    """
    worst = 0.0
    for sample in group["samples"]:
        versions = sample.versions.tolist()
        expected = replay(
            {version: at(version) for version in versions},
            group["prompt"],
            sample.token_ids.tolist(),
            versions,
            group["temperature"],
            keeps_cache=keeps_cache,
        )
        worst = max(worst, float(np.abs(expected - sample.logprobs).max()))
    return worst


def versions_in(groups: Sequence[Mapping[str, Any]]) -> set[int]:
    return {v for it in groups for sample in it["samples"] for v in sample.versions.tolist()}


def adapter_of(
    model: Any, policy: str, version: int, *, rank: int = RANK
) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(zlib.crc32(f"{policy} {version}".encode()))
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            down = 0.1 * torch.randn(rank, module.in_features, generator=noise)
            up = 0.1 * torch.randn(module.out_features, rank, generator=noise)
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = down
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = up
    return tensors


@functools.cache
def merged_model(model: Any, policy: str, version: int, *, rank: int = RANK) -> Any:
    tensors = adapter_of(model, policy, version, rank=rank)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name in state:
        layer = _PREFIX + name.removesuffix("weight")
        if layer + "lora_A.weight" in tensors:
            up, down = tensors[layer + "lora_B.weight"], tensors[layer + "lora_A.weight"]
            state[name] += SCALING * (up @ down)
    return with_weights(model, state)


def encode(value: Any) -> bytes:
    """Return MessagePack of what scenarios ask and answer: plain values, arrays and structs of
    the product. Nothing that is read can run code.
    """
    return msgspec.msgpack.encode(_plain(value))


def decode(data: bytes) -> Any:
    return _whole(msgspec.msgpack.decode(data))


def _plain(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            fields = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
            kind = type(value)
            return {KIND: f"{kind.__module__}:{kind.__name__}", "fields": fields}
        case np.ndarray():
            content = {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
            return {KIND: "array", **content}
        case np.generic():
            return value.item()
        case Path():
            return {KIND: "path", "text": str(value)}
        case dict():
            return {KIND: "dict", "items": [[_plain(k), _plain(v)] for k, v in value.items()]}
        case tuple() | set():
            return {KIND: type(value).__name__, "items": [_plain(each) for each in value]}
        case list():
            return [_plain(each) for each in value]
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(each) for each in value]
    match value:
        case {"fields": fields}:
            module, _, name = value[KIND].partition(":")
            kind: Any = getattr(importlib.import_module(module), name)
            assert issubclass(kind, msgspec.Struct), kind
            return kind(**{name: _whole(each) for name, each in fields.items()})
        case {"dtype": dtype, "shape": shape, "data": data}:
            return np.frombuffer(data, dtype).reshape(shape).copy()
        case {"text": text}:
            return Path(text)
        case {"items": items}:
            kinds: dict[str, Any] = {"dict": dict, "tuple": tuple, "set": set}
            return kinds[value[KIND]](map(_whole, items))
    return value
