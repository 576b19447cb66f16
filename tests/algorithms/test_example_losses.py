"""The losses in async_rl/examples/losses/ against slow float64 oracles in loops, on parts with
masked tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from off_policy_cases import TOKENS, Case, over_two_ranks, weights_of

from async_rl.algorithms.losses import PolicyLoss
from async_rl.algorithms.parts import Parts
from async_rl.examples.losses import drpo, geometric, m2po, mu_grpo, oapl, sapo
from async_rl.examples.losses.gac import repeated_part
from async_rl.examples.losses.geometric import geometric_outliers
from async_rl.examples.losses.m2po import second_moment_bound
from async_rl.examples.losses.mu_grpo import vetoed_tokens


def to_behavior(loss: Callable[..., PolicyLoss], case: Case) -> PolicyLoss:
    """Call a loss whose ratio is to the behavior policy; its other ratio is of no use to it."""
    return loss(
        torch.full((TOKENS,), torch.nan),
        advantages=case.advantages,
        behavior_weight=torch.full((TOKENS,), torch.nan, dtype=torch.float64),
        sequences=case.sequences,
        policy_logprobs=case.logprobs,
        behavior_logprobs=(case.logprobs - case.log_ratio).detach(),
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_sapo_is_the_gate_of_the_paper_and_the_policy_gradient_at_ratio_1(seed: int) -> None:
    case = Case(seed)
    behavior_weight = torch.rand(TOKENS, dtype=torch.float64)
    moved = case.log_ratio.clone().requires_grad_()
    arguments = {
        "advantages": case.advantages,
        "behavior_weight": behavior_weight,
        "sequences": case.sequences,
    }
    loss = sapo.loss(moved, **arguments).loss
    for t in range(TOKENS):
        a, w = case.advantages[t].item(), behavior_weight[t].item()
        tau = 1.0 if a > 0 else 1.05
        u = math.exp(case.log_ratio[t].item())
        assert loss[t].item() == pytest.approx(-w * a * 4 / tau / (1 + math.exp(-tau * (u - 1))))
    zero = torch.zeros(TOKENS, dtype=torch.float64, requires_grad=True)
    start = sapo.loss(zero, **arguments).loss
    (gradient,) = torch.autograd.grad(start.sum(), zero)
    torch.testing.assert_close(gradient, -behavior_weight * case.advantages)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_drpo_weighs_a_token_less_the_further_its_probability_moved_with_its_advantage(
    seed: int,
) -> None:
    case = Case(seed)
    behavior = (case.logprobs - case.log_ratio).detach()
    loss = to_behavior(drpo.loss, case).loss
    for t, weight in enumerate(weights_of(loss, case)):
        a, p, q = case.advantages[t].item(), math.exp(case.logprobs[t].item()), behavior[t].exp()
        shift = (p - q.item()) * math.copysign(1, a)
        assert weight == pytest.approx(p / q.item() * a * (1 - shift / 12.5))
        assert loss[t].item() == pytest.approx(
            -p / q.item() * a + abs(a) * (p - q.item()) ** 2 / q.item() / 25
        )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_oapl_is_the_gradient_of_the_papers_square(seed: int) -> None:
    case, beta = Case(seed), 0.3
    behavior = (case.logprobs - case.log_ratio).detach()
    trained = case.sequences.mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oapl, "BETA", beta)
        loss = to_behavior(oapl.loss, case).loss
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oapl, "TEMPERATURE", beta)
        actual = oapl.advantages(torch.tensor(rewards), groups=groups)
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


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_mask_the_tokens_that_one_rank_masks(seed: int) -> None:
    case = Case(seed)
    log_ratio = case.log_ratio * 0.4
    case.log_ratio = log_ratio
    weights, raw, is_bounded = m2po.weights(log_ratio, sequences=case.sequences)
    assert 0 < int((is_bounded & case.sequences.mask).sum()) < TOKENS
    torch.testing.assert_close(weights, torch.where(is_bounded, 0.0, log_ratio.exp()))
    torch.testing.assert_close(raw, log_ratio.exp())
    halves = over_two_ranks(case, lambda own, parts: m2po.weights(own, sequences=parts).weights)
    torch.testing.assert_close(torch.cat(halves), weights)
    bound = second_moment_bound(log_ratio, batches=case.sequences, limit=0.03)
    bounds = over_two_ranks(
        case, lambda own, parts: second_moment_bound(own, batches=parts, limit=0.03)
    )
    torch.testing.assert_close(torch.cat(bounds), bound)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_mu_grpo_clips_the_ratio_to_the_behavior_policy_and_vetoes(seed: int) -> None:
    case = Case(seed)
    loss, is_low, is_high = to_behavior(mu_grpo.loss, case)
    vetoed = vetoed_tokens(
        case.log_ratio, advantages=case.advantages, sequences=case.sequences, max_ratio=2.0
    )
    for t in range(TOKENS):
        a, u = case.advantages[t].item(), math.exp(case.log_ratio[t].item())
        surrogate = min(u * a, min(max(u, 0.2), 5.0) * a)
        assert loss[t].item() == pytest.approx(0.0 if vetoed[t] else -surrogate)
        assert bool(is_low[t]) == (u < 0.2 and a < 0)
        assert bool(is_high[t]) == ((u > 5.0 and a > 0) or bool(vetoed[t]))


def test_the_geometric_mask_looks_at_the_mean_and_not_at_the_length() -> None:
    # sequence 0: ratios 2 and 1/2, mean 1; sequence 1: 1.2 throughout, mean 1.2 although the
    # product is 1.2^4 = 2.1
    log_ratio = torch.tensor([2.0, 0.5, 1.2, 1.2, 1.2, 1.2]).log()
    index, mask = torch.tensor([0, 0, 1, 1, 1, 1]), torch.ones(6, dtype=torch.bool)
    sequences = Parts(index=index, count=2, mask=mask)
    assert not geometric_outliers(log_ratio, sequences=sequences, maximum=1.3, minimum=0.8).any()
    assert (
        geometric_outliers(log_ratio, sequences=sequences, maximum=1.1, minimum=0.0).tolist()
        == [False] * 2 + [True] * 4
    )
    assert (
        geometric_outliers(-log_ratio, sequences=sequences, maximum=math.inf, minimum=0.9).tolist()
        == [False] * 2 + [True] * 4
    )


def test_a_sequence_outside_the_geometric_bounds_has_no_weight_and_the_others_are_capped() -> None:
    # Geometric means 2, 1.2 (the product 1.2^4 = 2.07 is capped at 2), 0.5 and 0.9.
    log_ratio = torch.tensor([2.0, *4 * [1.2], 0.5, 0.9]).log()
    index = torch.tensor([0, 1, 1, 1, 1, 2, 3])
    sequences = Parts(index=index, count=4, mask=torch.ones(7, dtype=torch.bool))
    weights, raw, is_bounded = geometric.weights(log_ratio, sequences=sequences)
    torch.testing.assert_close(weights, torch.tensor([0.0, *4 * [2.0], 0.0, 0.9]))
    torch.testing.assert_close(raw, torch.tensor([2.0, *4 * [1.2**4], 0.5, 0.9]))
    assert is_bounded.tolist() == [*6 * [True], False]
