from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.algorithms import fused_logprobs
from async_rl.algorithms.logprobs import chosen_logprobs, logprobs_by_rows, token_logprobs


def oracle(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ head.t() / temperature, -1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


@pytest.mark.covers("kl_penalty full")
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 9),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([1.0, 0.7]),
    used=st.sampled_from([1, 2, 3]),
)
def test_values_and_gradients_equal_plain_autograd(
    seed: int, rows: int, chunk: int, temperature: float, used: int
) -> None:
    """Of log-probs; of entropies too; of the exact KL to a reference too."""
    generator = torch.Generator().manual_seed(seed)
    x, w, ref_x, ref_w = (torch.randn(n, 6, generator=generator) for n in (rows, 11, rows, 11))
    targets = torch.randint(0, 11, (rows,), generator=generator)
    pulls = torch.randn(3, rows, generator=generator)[:used]
    x64, w64 = (value.double().requires_grad_() for value in (x, w))
    own = torch.log_softmax(x64 @ w64.t() / temperature, -1)
    other = torch.log_softmax(ref_x.double() @ ref_w.double().t() / temperature, -1)
    kl = (own.exp() * (own - other)).sum(-1)
    expected = [
        *oracle(x64, w64, targets, temperature),
        kl,
        other.gather(1, targets[:, None])[:, 0],
    ]
    found = token_logprobs(
        x.requires_grad_(),
        head=w.requires_grad_(),
        reference=(ref_x, ref_w) if used == 3 else None,
        targets=targets,
        temperature=temperature,
        chunk_tokens=chunk,
    )
    for mine, exact in zip(found if used == 3 else found[:2], expected, strict=False):
        assert mine is not None
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    sum((v * pull).sum() for v, pull in zip(found, pulls, strict=False)).backward()
    sum((v * pull.double()).sum() for v, pull in zip(expected, pulls, strict=False)).backward()
    for mine, exact in ((x.grad, x64.grad), (w.grad, w64.grad)):
        assert mine is not None
        assert exact is not None
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


def test_the_head_of_a_bfloat16_model_is_not_rounded() -> None:
    """Log-probs around -6, where one step of bfloat16 is 0.03."""
    generator = torch.Generator().manual_seed(0)
    x, w, ref = (torch.randn(n, 16, generator=generator).bfloat16() for n in (20, 300, 20))
    targets = torch.randint(0, 300, (20,), generator=generator)
    given = {"targets": targets, "temperature": 0.8, "chunk_tokens": 7}
    pull, push, away = torch.randn(3, 20, generator=generator).double()
    x64, w64 = (value.double().requires_grad_() for value in (x, w))
    logprobs64, entropies64 = oracle(x64, w64, targets, 0.8)
    policy, reference = (torch.log_softmax(h @ w64.t() / 0.8, -1) for h in (x64, ref.double()))
    kl64 = (policy.exp() * (policy - reference.detach())).sum(-1)
    (logprobs64 @ pull + entropies64 @ push + kl64 @ away).backward()
    x, w = x.requires_grad_(), w.requires_grad_()
    logprobs, entropies, kl, _ = token_logprobs(x, head=w, reference=(ref, w.detach()), **given)
    assert kl is not None
    for mine, exact in ((logprobs, logprobs64), (entropies, entropies64), (kl, kl64)):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    (logprobs.double() @ pull + entropies.double() @ push + kl.double() @ away).backward()
    chosen = chosen_logprobs(x, head=w, **{**given, "targets": targets[:, None]})
    torch.testing.assert_close(chosen[:, 0], logprobs, rtol=1e-5, atol=1e-5)
    for mine, exact in ((x.grad, x64.grad), (w.grad, w64.grad)):
        assert mine is not None
        assert exact is not None
        # The gradient of a bfloat16 tensor is rounded once.
        rounding = (exact.bfloat16().double() - exact).norm()
        assert (mine.double() - exact).norm() < 1.001 * rounding


def both_ways(rows: int, largest: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Values and gradients of the form for GPUs, and of the form for CPUs."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 8, generator=generator)
    head = torch.randn(300, 8, generator=generator)
    targets = torch.randint(0, 300, (rows,), generator=generator)
    pull, push = torch.randn(2, rows, generator=generator)

    def of(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logprobs, entropies = function(x, w)
        ((logprobs * pull).sum() + (entropies * push).sum()).backward()
        assert x.grad is not None
        assert w.grad is not None
        return logprobs.detach(), entropies.detach(), x.grad, w.grad

    mine = of(lambda x, w: fused_logprobs.fused_logprobs(x, w, targets, 0.7, largest))
    theirs = of(
        lambda x, w: token_logprobs(x, head=w, targets=targets, temperature=0.7, chunk_tokens=4)[:2]
    )
    return mine, theirs


# A block of one tile and of two, and a rank without tokens.
@pytest.mark.parametrize(("rows", "largest"), [(9, 1), (9, 9 * 256), (0, 5)])
def test_blocks_of_the_vocabulary_give_the_same_values_and_gradients(
    rows: int, largest: int
) -> None:
    for mine, theirs in zip(*both_ways(rows, largest), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


def test_a_target_outside_the_vocabulary_has_no_finite_logprob() -> None:
    hidden, head = torch.ones(1, 4), torch.ones(300, 4)
    logprobs, _ = fused_logprobs.fused_logprobs(hidden, head, torch.tensor([300]), 1.0, 128)
    assert logprobs.item() == -torch.inf


@pytest.mark.parametrize("form", ["fused", "rows", "chosen"])
def test_a_gpu_has_float32_logits_and_bfloat16_gradients(form: str) -> None:
    """On tensors without storage: a CPU has no product of bfloat16 with a float32 result."""
    hidden, head = (
        torch.randn(size, 8, device="meta", dtype=torch.bfloat16).requires_grad_()
        for size in (9, 300)
    )
    targets = torch.zeros(9, device="meta", dtype=torch.int64)
    with LargeResults(9 * 300, torch.bfloat16) as low:
        if form == "fused":
            values = fused_logprobs.fused_logprobs(hidden, head, targets, 1.0, 9 * 300)
        elif form == "rows":
            values = logprobs_by_rows(hidden, head, targets, 1.0, 9, None, hidden, head)[:3]
        else:
            given = {"temperature": 1.0, "chunk_tokens": 9}
            values = (chosen_logprobs(hidden, head=head, targets=targets[:, None], **given),)
    assert low.count == 0
    assert {value.dtype for value in values} == {torch.float32}
    sum(value.sum() for value in values).backward()
    for x in (hidden, head):
        assert x.grad is not None
        assert (x.grad.dtype, x.grad.shape) == (torch.bfloat16, x.shape)


class LargeResults(TorchDispatchMode):
    """Counts the operations whose result has this many numbers of a dtype."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._size = size
        self._dtype = dtype
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_large = isinstance(result, Tensor) and result.numel() == self._size
        self.count += is_large and result.dtype is self._dtype
        return result


def test_one_chunk_of_logits_exists_and_an_entropy_that_no_loss_uses_costs_no_pass_over_it() -> (
    None
):
    counts = []
    for uses_entropy in (False, True):
        hidden = torch.randn(4, 6, requires_grad=True)
        head = torch.randn(11, 6, requires_grad=True)
        with LargeResults(4 * 11) as whole:
            logprobs, entropies, *_ = token_logprobs(
                hidden, head=head, targets=torch.arange(4), temperature=0.7, chunk_tokens=2
            )
            loss = logprobs.sum() + (entropies.sum() if uses_entropy else 0.0)
            with LargeResults(2 * 11) as large:
                loss.backward()
        assert whole.count == 0
        counts.append(large.count)
    assert counts[0] < counts[1]
