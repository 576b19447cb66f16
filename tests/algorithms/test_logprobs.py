from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_rl.algorithms.logprobs import token_logprobs


def oracle(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ head.t() / temperature, -1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 9),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([1.0, 0.7]),
    with_entropy=st.booleans(),
)
def test_values_and_gradients_equal_plain_autograd(
    seed: int, rows: int, chunk: int, temperature: float, with_entropy: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=generator, requires_grad=True)
    head = torch.randn(11, 6, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (rows,), generator=generator)
    pull, push = torch.randn(2, rows, generator=generator).double()
    found = token_logprobs(
        hidden, head=head, targets=targets, temperature=temperature, chunk_tokens=chunk
    )
    hidden64, head64 = (
        hidden.detach().double().requires_grad_(),
        head.detach().double().requires_grad_(),
    )
    expected = oracle(hidden64, head64, targets, temperature)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    for (logprobs, entropies), dtype in ((found, torch.float32), (expected, torch.float64)):
        loss = (logprobs * pull.to(dtype)).sum()
        if with_entropy:
            loss = loss + (entropies * push.to(dtype)).sum()
        loss.backward()
    for x, y in ((hidden, hidden64), (head, head64)):
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)


def test_only_one_chunk_of_logits_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import async_rl.algorithms.logprobs as module

    sizes: list[int] = []
    plain = module._Chunk.fill

    def spy(self: module._Chunk, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return plain(self, hidden)

    monkeypatch.setattr(module._Chunk, "fill", spy)
    hidden = torch.randn(10, 4, requires_grad=True)
    logprobs, _ = token_logprobs(
        hidden,
        head=torch.randn(7, 4),
        targets=torch.zeros(10, dtype=torch.int64),
        temperature=1.0,
        chunk_tokens=4,
    )
    logprobs.sum().backward()
    assert sizes == [4, 4, 2, 4, 4, 2]
