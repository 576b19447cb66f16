"""Attention of packed rows equals dense attention of separate sequences, in linear memory."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_support import varlen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.batching.packing import Indices
from async_rl.learner import attention
from async_rl.learner.attention import VarlenPlan, plan

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def table(rng: np.random.Generator, num_prompts: int, longest: int) -> Indices:
    """Segments of a row: prompts, whole sequences, and what continues any token before."""
    rows: list[tuple[int, int, int]] = []
    start = 0
    for index in range(4 * num_prompts):
        is_root = index < num_prompts or rng.random() < 0.3
        parent = -1 if is_root else int(rng.integers(start))
        rows.append((start, int(rng.integers(1, longest)), parent))
        start += rows[-1][1]
    return np.array(rows, dtype=np.int64)


def seen_by(segments: Indices) -> list[list[int]]:
    """The tokens that each token sees: itself, and what the token that it follows sees."""
    seen: list[list[int]] = []
    for start, length, parent in segments.tolist():
        for at in range(start, start + length):
            before = at - 1 if at > start else parent
            seen.append([*(seen[before] if before >= 0 else ()), at])
    return seen


def dense(segments: Indices, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention with the definition, one token at a time."""
    out = torch.empty_like(q)
    groups = q.shape[1] // k.shape[1]
    for at, seen in enumerate(seen_by(segments)):
        seen = seen if window is None else seen[-window:]
        keys, values = (x[seen].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[at], keys) * q.shape[-1] ** -0.5
        out[at] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out


def inputs(segments: Indices, dtype: torch.dtype, *, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    num_tokens = int(segments[:, 1].sum())
    return [
        torch.randn(num_tokens, heads, WIDTH, generator=generator, dtype=torch.float64)
        .mul_(scale)
        .to(dtype)
        .requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, given, pull.to(out.dtype))]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_prompts=st.integers(1, 3),
    longest=st.sampled_from([3, 12, 60]),
    window=st.sampled_from([None, 1, 2, 5, 17, 40]),
    num_queries=st.sampled_from([1, 7, 128]),
    scale=st.sampled_from([1.0, 12.0]),
)
def test_rows_have_the_outputs_and_gradients_of_dense_attention(
    seed: int, num_prompts: int, longest: int, window: int | None, num_queries: int, scale: float
) -> None:
    segments = table(np.random.default_rng(seed), num_prompts, longest)
    given_ = inputs(segments, torch.float64, scale=scale)
    expected = with_gradients(dense(segments, *given_, window), given_)
    with mock.patch.object(attention, "_BLOCK_QUERIES", num_queries):
        out = plan(segments, CPU).attend(*given_, None, window)
    for mine, theirs in zip(with_gradients(out, given_), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of a result, of a view those of its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                size = x.untyped_storage().nbytes() // x.element_size()
                self.num_elements = max(self.num_elements, size)
        return result


def largest_and_kept(tokens: int, window: int | None) -> tuple[int, int]:
    """The elements of the largest tensor, and the bytes that the backward pass keeps, of a row with
    a prompt, two responses and a whole sequence.
    """
    part = tokens // 4
    segments = np.array(
        [(0, part, -1), (part, part, part - 1), (2 * part, part, part - 1), (3 * part, part, -1)]
    )
    given_ = inputs(segments, torch.float32)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with LargestTensor() as seen:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = plan(segments, CPU).attend(*given_, None, window)
        with_gradients(out, given_)
    return seen.num_elements, sum(kept.values())


@pytest.mark.parametrize("window", [None, 64])
def test_no_tensor_grows_faster_than_the_row_nor_all_that_are_kept(window: int | None) -> None:
    with mock.patch.object(attention, "_BLOCK_QUERIES", 128):
        (few, few_kept), (many, many_kept) = (largest_and_kept(n, window) for n in (512, 2048))
    assert many <= 4 * few
    # The first block of a segment has no keys of a window before it.
    assert many_kept <= 4.6 * few_kept
    # The mask of a block: the keys of a response and of its prompt, half of the row.
    assert many <= 128 * 2048 // 2


@pytest.mark.parametrize("window", [None, 7])
def test_on_a_gpu_each_response_has_its_prompt_and_itself_as_keys(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    segments = table(np.random.default_rng(3), 2, 20)
    given_ = inputs(segments, torch.float64)
    expected = with_gradients(dense(segments, *given_, window), given_)
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    out = VarlenPlan(segments, CPU).attend(*given_, None, window)
    for mine, theirs in zip(with_gradients(out, given_), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 7])
def test_the_kernels_of_a_gpu_accept_what_they_are_given(
    dtype: torch.dtype, window: int | None
) -> None:
    """On tensors without storage, whose kernels check types and shapes only."""
    segments = table(np.random.default_rng(3), 2, 20)
    given_ = [x.detach().to("meta").requires_grad_() for x in inputs(segments, dtype)]
    out = VarlenPlan(segments, torch.device("meta")).attend(*given_, None, window)
    assert (out.shape, out.dtype) == (given_[0].shape, dtype)
