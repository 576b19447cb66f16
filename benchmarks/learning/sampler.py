"""A sampler of small Qwen3 models in this process: a whole batch at once, with a KV cache.

Use it where the engine's process, its start and its queue would cost more than the model.
Log-probs belong to the distribution sampled from, at temperature 1 over the whole
vocabulary, in float32: `tests/learner/test_staleness_cell.py` compares them with the learner's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Finished rows stay until they are this share of the batch: to take them out copies the cache.
_FINISHED_SHARE = 0.25


class Response(NamedTuple):
    """Sampled token ids with their log-probs; is_truncated: no end of sequence in the limit."""

    token_ids: list[int]
    logprobs: list[float]
    is_truncated: bool


class Sampler:
    """Samples from the weights that `load` copied last."""

    def __init__(self, model_path: Path) -> None:
        """Read the shape of the model. Raises ValueError for another architecture."""
        fields = json.loads((model_path / "config.json").read_text())
        if fields["model_type"] != "qwen3" or not fields["tie_word_embeddings"]:
            raise ValueError(f"{model_path}: only Qwen3 with tied embeddings can be sampled here")
        self._num_heads: int = fields["num_attention_heads"]
        self._head_size: int = fields["head_dim"]
        self._num_layers: int = fields["num_hidden_layers"]
        self._eps: float = fields["rms_norm_eps"]
        self._end: int = fields["eos_token_id"]
        if fields["num_key_value_heads"] != self._num_heads:
            raise ValueError(f"{model_path}: heads that share keys cannot be sampled here")
        positions = torch.arange(fields["max_position_embeddings"], dtype=torch.float64)
        base = float(fields["rope_parameters"]["rope_theta"])
        powers = torch.arange(0, self._head_size, 2, dtype=torch.float64) / self._head_size
        angles = positions[:, None] / base**powers
        self._cos, self._sin = (
            torch.cat([table, table], -1).float() for table in (angles.cos(), angles.sin())
        )
        self._weights: dict[str, Tensor] = {}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights under their Hugging Face names."""
        self._weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        for layer in range(self._num_layers):
            for whole, parts in (
                ("self_attn.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj")),
            ):
                # One large product instead of several small ones.
                self._weights[f"model.layers.{layer}.{whole}.weight"] = torch.cat(
                    [self._weights.pop(f"model.layers.{layer}.{part}.weight") for part in parts]
                )

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: Sequence[int],
        max_tokens: int,
        generator: torch.Generator,
    ) -> list[list[Response]]:
        """Return num_samples[i] responses to prompts[i]."""
        longest = max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts])
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        cache = torch.zeros(
            2 * self._num_layers,
            len(prompts),
            self._num_heads,
            longest + max_tokens,
            self._head_size,
        )
        hidden = self._forward(ids, pads, cache, 0)[:, -1]
        repeats = torch.tensor(num_samples)
        owner = torch.repeat_interleave(torch.arange(len(prompts)), repeats)
        cache, pads, hidden = cache[:, owner], pads[owner], hidden[owner]
        rows = torch.arange(len(owner))
        tokens = torch.full((len(owner), max_tokens), -1)
        logprobs = torch.zeros(len(owner), max_tokens)
        is_live = torch.ones(len(owner), dtype=torch.bool)
        for step in range(max_tokens):
            found = torch.log_softmax(self._linear(hidden, "model.embed_tokens"), -1)
            # One uniform number per row: noise for every token would cost a fifth of the time.
            sums = found.exp().cumsum(-1)
            # In (0, 1], so that the first sum that reaches the point is always of a token that
            # has a probability.
            share = 1 - torch.rand(len(found), 1, generator=generator)
            drawn = torch.searchsorted(sums, share * sums[:, -1:])[:, 0]
            live_rows = rows[is_live]
            tokens[live_rows, step] = drawn[is_live]
            logprobs[live_rows, step] = found.gather(1, drawn[:, None])[:, 0][is_live]
            is_live &= drawn != self._end
            num_live = int(is_live.sum())
            if num_live == 0 or step == max_tokens - 1:
                break
            if num_live < (1 - _FINISHED_SHARE) * len(rows):
                cache, pads = cache[:, is_live], pads[is_live]
                rows, drawn = rows[is_live], drawn[is_live]
                is_live = torch.ones(num_live, dtype=torch.bool)
            hidden = self._forward(drawn[:, None], pads, cache, longest + step)[:, -1]
        return self._responses(tokens, logprobs, owner, len(prompts))

    def _responses(
        self, tokens: Tensor, logprobs: Tensor, owner: Tensor, num_prompts: int
    ) -> list[list[Response]]:
        found: list[list[Response]] = [[] for _ in range(num_prompts)]
        for prompt, ids, values in zip(
            owner.tolist(), tokens.tolist(), logprobs.tolist(), strict=True
        ):
            length = ids.index(-1) if -1 in ids else len(ids)
            is_truncated = ids[length - 1] != self._end
            found[prompt].append(Response(ids[:length], values[:length], is_truncated))
        return found

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return F.linear(values, self._weights[f"{name}.weight"])

    def _norm(self, values: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(values, (len(weight),), weight, self._eps)

    def _forward(self, ids: Tensor, pads: Tensor, cache: Tensor, start: int) -> Tensor:
        """Run the model on columns from start on, and add their keys and values to the cache.

        ids: int64 [B, L]; pads: int64 [B], empty columns before each prompt -> float32 [B, L, H].
        """
        stop = start + ids.shape[1]
        columns = torch.arange(start, stop)
        positions = (columns - pads[:, None]).clamp(min=0)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        seen = torch.arange(stop)
        is_seen = (seen <= columns[:, None]) & (seen >= pads[:, None, None])
        # A padding column sees itself, so that its softmax is defined; nothing else sees it.
        is_seen |= seen == columns[:, None]
        hidden = self._weights["model.embed_tokens.weight"][ids]
        for layer in range(self._num_layers):
            name = f"model.layers.{layer}"
            keys, values = cache[2 * layer], cache[2 * layer + 1]
            mixed = self._linear(
                self._norm(hidden, f"{name}.input_layernorm"), f"{name}.self_attn.qkv"
            )
            query, key, value = (
                part.view(*ids.shape, self._num_heads, self._head_size).transpose(1, 2)
                for part in mixed.chunk(3, -1)
            )
            query = _rotated(self._norm(query, f"{name}.self_attn.q_norm"), cos, sin)
            keys[:, :, start:stop] = _rotated(self._norm(key, f"{name}.self_attn.k_norm"), cos, sin)
            values[:, :, start:stop] = value
            read = F.scaled_dot_product_attention(
                query, keys[:, :, :stop], values[:, :, :stop], attn_mask=is_seen[:, None]
            )
            read = read.transpose(1, 2).flatten(2)
            hidden = hidden + self._linear(read, f"{name}.self_attn.o_proj")
            mixed = self._linear(
                self._norm(hidden, f"{name}.post_attention_layernorm"), f"{name}.mlp.gate_up"
            )
            gate, up = mixed.chunk(2, -1)
            hidden = hidden + self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        return self._norm(hidden, "model.norm")


def _rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return values * cos + torch.cat([-second, first], -1) * sin
