"""The table of biases in docs/algorithms.md is what the benchmark computes, and the benchmark is
right.
"""

import itertools

import pytest
import torch
from composing import compose_unchecked

from benchmarks.learning import bias


def test_the_page_has_every_row_and_the_computed_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every fourth row, as all take a minute."""
    page = bias.PAGE.read_text()
    assert all(f"| {row.name} |" in page for row in bias.ROWS)
    monkeypatch.setattr(bias, "ROWS", bias.ROWS[2::4])
    computed = bias.page(bias.table()).splitlines()
    assert {*computed} <= {*page.splitlines()}, (
        "run `python -m benchmarks.learning.bias --page` and commit the page"
    )


def test_the_gradient_over_multisets_is_the_one_over_all_ordered_groups() -> None:
    """A slow oracle in loops: token_tis on old data, RLOO, sums over a constant."""
    settings = (*bias.UNBIASED[:2], "algorithm.policy_loss.correction=token_tis")
    config = compose_unchecked("grpo_code", settings)
    policy = bias.Policy(bias._parameters().requires_grad_())
    old = bias.Policy(bias._moved(bias.OLD, 5))
    actual = bias.gradient(config, bias.Bandit(), behavior=old, proximal=policy, policy=policy)
    total = torch.zeros((), dtype=torch.float64)
    for prompt, rewards in enumerate(bias.REWARDS):
        sampled = [old.logprobs(prompt, r).detach() for r in bias.RESPONSES]
        current = [policy.logprobs(prompt, r) for r in bias.RESPONSES]
        gains = [
            ((c - s).detach().exp().clamp(max=2.0) * c).sum()
            for c, s in zip(current, sampled, strict=True)
        ]
        for group in itertools.product(range(len(rewards)), repeat=bias.GROUP_SIZE):
            probability = torch.stack([sampled[n].sum() for n in group]).sum().exp() / 2
            for index, number in enumerate(group):
                others = [rewards[n] for i, n in enumerate(group) if i != index]
                advantage = rewards[number] - sum(others) / len(others)
                total = total + probability * advantage * gains[number] / (bias.GROUP_SIZE * 2)
    (exact,) = torch.autograd.grad(total, policy.parameters)
    torch.testing.assert_close(actual, exact, rtol=1e-6, atol=1e-9)
