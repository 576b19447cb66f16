"""The published off-policy methods against slow float64 oracles in loops, on parts with masked
tokens.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_rl.algorithms.off_policy import (
    dppo_loss,
    drpo_loss,
    effective_sequences,
    oapl_loss,
    repeated_part,
    sapo_loss,
    second_moment_bound,
    soft_advantages,
    step_scale,
    vespo_loss,
    vetoed_tokens,
)
from async_rl.algorithms.parts import Across, Parts

TOKENS = 24
T = TypeVar("T")


class Case:
    """Random tokens of four sequences in two batches; some are not trained."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.index = rng.integers(0, 4, TOKENS)
        self.mask = rng.random(TOKENS) < 0.8
        self.log_ratio = torch.tensor(rng.normal(size=TOKENS) * 0.7)
        self.logprobs = torch.tensor(-rng.uniform(0.05, 3, TOKENS), requires_grad=True)
        self.advantages = torch.tensor(rng.normal(size=4))[self.index]
        self.sequences = Parts(
            index=torch.tensor(self.index), count=4, mask=torch.tensor(self.mask)
        )

    def members(self, token: int) -> list[int]:
        """The trained tokens of the token's sequence."""
        return [i for i in range(TOKENS) if self.index[i] == self.index[token] and self.mask[i]]


def weights_of(loss: Tensor, case: Case) -> list[float]:
    """The factor of each token's score function."""
    (gradient,) = torch.autograd.grad(-loss.sum(), case.logprobs)
    result: list[float] = gradient.tolist()
    return result


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_sapo_is_the_gate_of_the_paper_and_the_policy_gradient_at_ratio_1(seed: int) -> None:
    case = Case(seed)
    behavior_weight = torch.rand(TOKENS, dtype=torch.float64)
    moved = case.log_ratio.clone().requires_grad_()
    loss = sapo_loss(
        moved,
        advantages=case.advantages,
        behavior_weight=behavior_weight,
        tau_positive=1.0,
        tau_negative=1.05,
    ).loss
    for t in range(TOKENS):
        a, w = case.advantages[t].item(), behavior_weight[t].item()
        tau = 1.0 if a > 0 else 1.05
        u = math.exp(case.log_ratio[t].item())
        assert loss[t].item() == pytest.approx(-w * a * 4 / tau / (1 + math.exp(-tau * (u - 1))))
    zero = torch.zeros(TOKENS, dtype=torch.float64, requires_grad=True)
    start = sapo_loss(
        zero,
        advantages=case.advantages,
        behavior_weight=behavior_weight,
        tau_positive=1.0,
        tau_negative=1.05,
    ).loss
    (gradient,) = torch.autograd.grad(start.sum(), zero)
    torch.testing.assert_close(gradient, -behavior_weight * case.advantages)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_dppo_stops_tokens_whose_probability_moved_too_far_towards_their_advantage(
    seed: int,
) -> None:
    case = Case(seed)
    case.log_ratio[0] = 5.0
    loss, is_low, is_high = dppo_loss(
        case.logprobs, log_ratio=case.log_ratio, advantages=case.advantages, max_shift=0.1
    )
    for t, weight in enumerate(weights_of(loss, case)):
        a, ratio = case.advantages[t].item(), math.exp(case.log_ratio[t].item())
        p = math.exp(case.logprobs[t].item())
        shift = p - p / ratio
        is_stopped = shift > 0.1 if a > 0 else shift < -0.1
        assert weight == pytest.approx(0.0 if is_stopped else min(ratio, 20.0) * a)
        assert bool(is_low[t] or is_high[t]) == is_stopped


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_drpo_weighs_a_token_less_the_further_its_probability_moved_with_its_advantage(
    seed: int,
) -> None:
    case = Case(seed)
    behavior = (case.logprobs - case.log_ratio).detach()
    loss = drpo_loss(
        case.logprobs, log_ratio=case.logprobs - behavior, advantages=case.advantages
    ).loss
    for t, weight in enumerate(weights_of(loss, case)):
        a, p, q = case.advantages[t].item(), math.exp(case.logprobs[t].item()), behavior[t].exp()
        shift = (p - q.item()) * math.copysign(1, a)
        assert weight == pytest.approx(p / q.item() * a * (1 - shift / 12.5))
        assert loss[t].item() == pytest.approx(
            -p / q.item() * a + abs(a) * (p - q.item()) ** 2 / q.item() / 25
        )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_vespo_weighs_each_token_by_the_kernel_of_its_sequence(seed: int) -> None:
    case = Case(seed)
    loss = vespo_loss(
        case.logprobs,
        log_ratio=case.log_ratio,
        advantages=case.advantages,
        sequences=case.sequences,
        positive=(2.0, 3.0),
        negative=(3.0, 2.0),
    ).loss
    for t, weight in enumerate(weights_of(loss, case)):
        a = case.advantages[t].item()
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        w = math.exp(sum(case.log_ratio[i].item() for i in case.members(t)))
        phi = w**k * math.exp(rate * (1 - w))
        assert weight == pytest.approx(phi * a, rel=1e-9, abs=1e-12)


def test_the_kernel_of_vespo_is_finite_for_any_ratio() -> None:
    logprobs = torch.zeros(4, requires_grad=True)
    loss = vespo_loss(
        logprobs,
        log_ratio=torch.tensor([-500.0, -30.0, 30.0, 500.0]),
        advantages=torch.ones(4),
        sequences=Parts(index=torch.arange(4), count=4, mask=torch.ones(4, dtype=torch.bool)),
        positive=(2.0, 3.0),
        negative=(3.0, 2.0),
    ).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.abs().max() < 1e-12


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_oapl_is_the_gradient_of_the_papers_square(seed: int) -> None:
    case, beta = Case(seed), 0.3
    behavior = (case.logprobs - case.log_ratio).detach()
    trained = case.sequences.mask
    loss = oapl_loss(
        case.logprobs,
        log_ratio=case.logprobs - behavior,
        advantages=case.advantages,
        sequences=case.sequences,
        beta=beta,
    ).loss
    (actual,) = torch.autograd.grad(loss[trained].sum(), case.logprobs)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in range(4):
        own = trained & torch.tensor(case.index == sequence)
        if own.any():
            s = (case.logprobs - behavior)[own].sum()
            total = total + (beta * s - case.advantages[own][0]) ** 2
    (square,) = torch.autograd.grad(total, case.logprobs)
    torch.testing.assert_close(actual, square / (2 * beta))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), beta=st.sampled_from([0.05, 0.5, 20.0]))
def test_soft_advantages_compare_with_the_soft_maximum_of_the_counted_members(
    seed: int, beta: float
) -> None:
    rng = np.random.default_rng(seed)
    rewards, index = rng.uniform(0, 1, 12), rng.integers(0, 3, 12)
    mask = rng.random(12) < 0.8
    groups = Parts(index=torch.tensor(index), count=3, mask=torch.tensor(mask))
    actual = soft_advantages(torch.tensor(rewards), groups=groups, beta=beta)
    for i in range(12):
        members = [rewards[j] for j in range(12) if mask[j] and index[j] == index[i]]
        expected = 0.0
        if mask[i]:
            value = beta * math.log(np.mean([math.exp(r / beta) for r in members]))
            expected = rewards[i] - value
        assert actual[i].item() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([1e-6, 0.04, 0.3, 100.0]))
def test_m2po_drops_the_largest_until_the_mean_square_is_below_the_limit(
    seed: int, limit: float
) -> None:
    case = Case(seed)
    batch = torch.tensor(case.index % 2)
    batches = Parts(index=batch, count=2, mask=case.sequences.mask)
    bound = second_moment_bound(case.log_ratio, batches=batches, limit=limit)
    for number in range(2):
        trained = [i for i in range(TOKENS) if batch[i] == number and case.mask[i]]
        kept = sorted(trained, key=lambda i: case.log_ratio[i].item() ** 2)
        while kept and np.mean([case.log_ratio[i].item() ** 2 for i in kept]) >= limit:
            kept.pop()
        found = [i for i in trained if abs(case.log_ratio[i].item()) <= bound[i].item()]
        assert sorted(found) == sorted(kept)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_effective_share_counts_sequences_with_a_trained_token(seed: int) -> None:
    case = Case(seed)
    weights = []
    for sequence in range(4):
        own = [i for i in range(TOKENS) if case.index[i] == sequence and case.mask[i]]
        if own:
            weights.append(math.exp(sum(case.log_ratio[i].item() for i in own)))
    expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert effective_sequences(case.log_ratio, sequences=case.sequences) == pytest.approx(expected)


def test_the_effective_share_survives_weights_that_no_float_holds() -> None:
    sequences = Parts(index=torch.arange(4), count=4, mask=torch.ones(4, dtype=torch.bool))
    old = torch.tensor([900.0, -900.0, 0.0, 5.0])
    assert effective_sequences(old, sequences=sequences) == pytest.approx(0.25)
    empty = Parts(index=torch.arange(4), count=4, mask=torch.zeros(4, dtype=torch.bool))
    assert effective_sequences(old, sequences=empty) == 1.0


def test_the_step_is_lowered_only_below_the_bound() -> None:
    assert step_scale(1.0, bound=1.0) == 1.0
    assert step_scale(0.25, bound=1.0) == 0.5
    assert step_scale(0.6, bound=0.5) == 1.0
    assert step_scale(0.125, bound=0.5) == 0.5


def over_two_ranks(case: Case, compute: Callable[[Tensor, Parts], T]) -> list[T]:
    """The results of two ranks, each with half of the tokens."""
    barrier, slots, halves = threading.Barrier(2), [torch.zeros(0)] * 2, (0, TOKENS // 2, TOKENS)

    def rank(number: int) -> T:
        def exchange(x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            slots[number] = x
            barrier.wait(10)
            combined = combine(*slots)
            barrier.wait(10)
            return combined

        across = Across(
            sum=lambda x: exchange(x, torch.add), maximum=lambda x: exchange(x, torch.maximum)
        )
        own = slice(halves[number], halves[number + 1])
        parts = Parts(
            index=case.sequences.index[own], count=4, mask=case.sequences.mask[own], across=across
        )
        return compute(case.log_ratio[own], parts)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_find_the_bound_and_the_share_that_one_rank_finds(seed: int) -> None:
    case = Case(seed)
    share = effective_sequences(case.log_ratio, sequences=case.sequences)
    assert over_two_ranks(
        case, lambda log_ratio, parts: effective_sequences(log_ratio, sequences=parts)
    ) == pytest.approx([share, share])
    bound = second_moment_bound(case.log_ratio, batches=case.sequences, limit=0.3)
    halves = over_two_ranks(
        case, lambda log_ratio, parts: second_moment_bound(log_ratio, batches=parts, limit=0.3)
    )
    torch.testing.assert_close(torch.cat(halves), bound)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_veto_ends_a_bad_sequence_at_its_first_token_that_became_likely(seed: int) -> None:
    case = Case(seed)
    # In a pass the tokens of a sequence are consecutive, as they were written.
    order = torch.tensor(np.argsort(case.index, kind="stable"))
    sequences = Parts(index=case.sequences.index[order], count=4, mask=case.sequences.mask[order])
    log_ratio, advantages = case.log_ratio[order], case.advantages[order]
    found = vetoed_tokens(log_ratio, advantages=advantages, sequences=sequences, max_ratio=1.5)
    ended: set[int] = set()
    for t, sequence in enumerate(sequences.index.tolist()):
        is_large = bool(sequences.mask[t]) and math.exp(log_ratio[t]) > 1.5
        if is_large and advantages[t] < 0:
            ended.add(sequence)
        assert bool(found[t]) == (sequence in ended)


def test_no_token_is_vetoed_in_a_pass_without_tokens() -> None:
    nothing = torch.zeros(0)
    sequences = Parts(index=torch.zeros(0, dtype=torch.long), count=1, mask=nothing > 0)
    found = vetoed_tokens(nothing, advantages=nothing, sequences=sequences, max_ratio=2.0)
    assert found.tolist() == []


@pytest.mark.parametrize("bound", [0.05, 0.5, 0.9])
def test_a_gradient_keeps_its_own_part_and_the_bound_as_its_cosine(bound: float) -> None:
    rng = np.random.default_rng(0)
    before = rng.normal(size=50)
    for share in (-1.0, 0.0, 0.1, 2.0, 30.0):
        gradient = share * before + rng.normal(size=50)
        cosine = gradient @ before / np.linalg.norm(gradient) / np.linalg.norm(before)
        part, kept = repeated_part(
            gradient @ gradient, gradient @ before, before @ before, bound=bound
        )
        cut = gradient - part * before
        assert np.linalg.norm(cut) == pytest.approx(kept * np.linalg.norm(gradient))
        now = cut @ before / np.linalg.norm(cut) / np.linalg.norm(before)
        assert now == pytest.approx(min(cosine, bound))
        # What is orthogonal to the direction before is untouched.
        own = np.linalg.norm(gradient) * (1 - cosine**2) ** 0.5
        assert np.linalg.norm(cut) * (1 - now**2) ** 0.5 == pytest.approx(own)


def test_without_a_direction_before_a_gradient_is_whole_and_its_copy_is_cut_away() -> None:
    assert repeated_part(4.0, 0.0, 0.0, bound=0.1) == (0.0, 1.0)
    assert repeated_part(0.0, 0.0, 4.0, bound=0.1) == (0.0, 1.0)
    assert repeated_part(4.0, 8.0, 16.0, bound=0.1) == (0.5, 0.0)
    assert repeated_part(4.0, 8.000001, 16.0, bound=1.0) == (0.0, 1.0)
