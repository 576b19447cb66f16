"""Small random models, their versions, and the slow obvious oracle of what an engine should have
said.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from async_rl.core.support import Support

END_TOKENS = (2, 3, 4, 5)
"""Four of them, so that samples of a random model end now and then."""


SUPPORTED_PROMPT = list(range(20, 40))
_SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},'
    ' "required": ["a", "b"]}'
)
SUPPORTS = {
    "all": Support(),
    "bias": Support(logit_bias={10: 3.0, 11: -100.0, 12: -2.5}),
    "length": Support(min_tokens=30),
    "schema": Support(grammar=_SCHEMA),
    "regex": Support(grammar="(ab|c){3,40}"),
    "ebnf": Support(grammar='root ::= "[" [a-z]* "]" | "(" root ")"'),
    "tag": Support(
        grammar='{"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content":'
        f' {{"type": "json_schema", "json_schema": {_SCHEMA}}}, "end": "</f>"}}}}'
    ),
    "top_k": Support(top_k=20),
    "top_p": Support(top_k=20, top_p=0.8),
    "mixed": Support(
        top_k=9, top_p=0.95, min_tokens=40, logit_bias={70: 4.0, 12: -3.0}, grammar=_SCHEMA
    ),
    # The grammar ends before the length: the end is all that is left then.
    "short": Support(min_tokens=20, logit_bias={1: -5.0}, grammar="[a-z]{1,6}"),
}
"""Every kind of support, and mixtures."""
SUPPORTED_ENDS = (1, 7)
NEEDS_NO_TOKENS = (
    '{"$defs": {"g": {"items": {"properties": {"k": {"type": "string", "pattern": "^a{1,255}$"}}}'
    '}}, "properties": {"g": {"$ref": "#/$defs/g"}}}'
)
"""A schema that xgrammar 0.2.8 compiles without the tokens of a model only."""
QUANTIZED_ROWS = [list(range(start, start + 48)) for start in (20, 90)]


def make_speaker(path: Path) -> Qwen3ForCausalLM:
    """Write a random model with the tokenizer of the embedded one. One end token is a byte."""
    # Here: scenarios import this file in processes that do not know `benchmarks`.
    from benchmarks.embedded.vocabulary import build_tokenizer

    tokenizer = build_tokenizer(['ab abc (a) [b] {"a": 1, "b": "c"}'] * 3, 512)
    model = make_model(path, is_tied=True, vocab_size=len(tokenizer) + 5, ends=SUPPORTED_ENDS)
    tokenizer.save_pretrained(path)
    return model


def model_from(path: Path) -> Qwen3ForCausalLM:
    """Return the model that make_speaker wrote."""
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def run_scenario(script: str, *arguments: object, out: Path, code: int = 0) -> dict[str, Any]:
    """Play a file of this folder with the path `out` as its last argument; return what it wrote
    there. In a process of its own, since vLLM changes its process for good.

    code: its exit code.
    """
    words = [str(Path(__file__).with_name(script)), *map(str, arguments), str(out)]
    output = out.with_name(f"{out.name}.output")
    output.touch()
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([words, str(output)]) + "\n")
    server.stdin.flush()
    try:
        answer = server.stdout.readline()
    except BaseException:
        # The time of the test is up. The next scenario would read the answer to this one.
        server.kill()
        _server.cache_clear()
        raise
    assert answer == f"{code}\n", f"exit code {answer}: {output.read_text()[-5000:]}"
    said: dict[str, Any] = json.loads(out.read_text()) if out.suffix == ".json" else {}
    return said


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
    path: Path, *, is_tied: bool, vocab_size: int = 200, ends: Sequence[int] = END_TOKENS
) -> Qwen3ForCausalLM:
    """Writes a random Qwen3 whose distributions are far from uniform; two sizes."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=vocab_size if is_tied else 331,
        hidden_size=64 if is_tied else 96,
        intermediate_size=160,
        num_hidden_layers=3 if is_tied else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
        eos_token_id=ends[0],
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
    return model


def weights_of(model: Qwen3ForCausalLM, version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version: those of the model for 0, else moved by noise that depends on the
    version only.
    """
    noise = torch.Generator().manual_seed(version)
    scale = 0.05 if version else 0.0
    return {
        name: p.detach() + scale * torch.randn(p.shape, generator=noise)
        for name, p in model.named_parameters()
    }


def model_of(model: Qwen3ForCausalLM, version: int) -> Qwen3ForCausalLM:
    """A model with the weights of a version."""
    copy = Qwen3ForCausalLM(model.config).float().eval()
    copy.load_state_dict(weights_of(model, version), strict=False)
    copy.tie_weights()
    return copy


@torch.no_grad()
def replay(
    models: Mapping[int, Any],
    prompt: Sequence[int],
    token_ids: Sequence[int],
    versions: Sequence[int],
    temperature: float,
    edits: Any = None,
) -> Any:
    """float32 log-prob of each new token."""
    table = replayed(models, prompt, token_ids, versions, temperature, edits)
    return table.gather(-1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def replayed(
    models: Mapping[int, Any],
    prompt: Sequence[int],
    token_ids: Sequence[int],
    versions: Sequence[int],
    temperature: float,
    edits: Any = None,
) -> torch.Tensor:
    """float32 log-probs of the vocabulary at each new token: the one at t is drawn by
    models[versions[t]], on the keys and values that older ones left.
    """
    inputs = [*prompt, *token_ids[:-1]]
    first = len(prompt) - 1
    cache = DynamicCache()
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


def worst_difference(model: Qwen3ForCausalLM, group: Mapping[str, Any]) -> float:
    """Largest difference in nats between what an engine said of its tokens and what the oracle
    says.
    """
    worst = 0.0
    models: dict[int, Any] = {}
    for sample in group["samples"]:
        for version in set(sample["versions"]) - models.keys():
            models[version] = model_of(model, version)
        expected = replay(
            models, group["prompt"], sample["token_ids"], sample["versions"], group["temperature"]
        )
        worst = max(worst, float(np.abs(expected - np.array(sample["logprobs"], np.float32)).max()))
    return worst


@torch.no_grad()
def recomputed_difference(model: Qwen3ForCausalLM, group: Mapping[str, Any]) -> float:
    """As worst_difference, of an engine that keeps no keys and values of older versions: each token
    is drawn by one model alone.
    """
    worst = 0.0
    for sample in group["samples"]:
        ids = torch.tensor([[*group["prompt"], *sample["token_ids"]]])
        for version in set(sample["versions"]):
            table = (
                model_of(model, version)(ids)
                .logits[0, len(group["prompt"]) - 1 : -1]
                .log_softmax(-1)
            )
            expected = table.gather(-1, torch.tensor(sample["token_ids"])[:, None])[:, 0].numpy()
            drawn = np.array(sample["versions"]) == version
            worst = max(
                worst,
                float(np.abs(expected - np.array(sample["logprobs"], np.float32))[drawn].max()),
            )
    return worst
