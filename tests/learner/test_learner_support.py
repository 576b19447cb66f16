"""The learner's side of a support: log-probs, entropies and KL over what could be drawn."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner_support import make_groups
from torch import Tensor

from async_rl.algorithms.logits import Edits
from async_rl.algorithms.logprobs import token_logprobs
from async_rl.batching.batch import collate_part, whole
from async_rl.batching.packing import pack
from async_rl.batching.support import Grammars, edits_of, kept_of, spans_of, truncate
from async_rl.core.calls import Span, Support
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import Score, Trajectory

CPU = torch.device("cpu")
V = 30
STOPS = (1,)
NO_TEXT = Grammars(vocab_size=V)


def sample(ids: list[int], spans: tuple[Span, ...]) -> Trajectory:
    """An answer to a prompt of one token."""
    row = np.array([0, *ids], np.int32)
    is_written = np.arange(len(row)) >= 1
    return Trajectory(
        token_ids=row,
        prompt_length=1,
        loss_mask=is_written,
        behavior_logprobs=np.zeros(len(row), np.float32),
        versions=np.where(is_written, 0, -1).astype(np.int32),
        is_truncated=False,
        score=Score(reward=1.0, parts={}, verdicts=(), latency_s=0.0),
        spans=tuple(msgspec.structs.replace(s, start=s.start + 1, end=s.end + 1) for s in spans),
    )


def changes(trajectories: list[Trajectory]) -> Edits:
    edits, is_outside = edits_of(trajectories, NO_TEXT, temperature=0.5, device=CPU)
    assert edits is not None
    assert not is_outside.any()
    return edits


KEPT = [np.array(ids, np.int32) for ids in ([2, 3, 9], [4], [0, 5, 28, 29])]
MIXED = [
    sample([3, 4, 29], spans_of(Support(top_k=4, logit_bias={9: 2.0, 29: -1.0}), 3, STOPS, KEPT)),
    sample([5, 6, 7], ()),
    sample([5, 6, 1], spans_of(Support(min_tokens=2, logit_bias={6: 1.5}), 3, STOPS, [])),
]


def dense() -> Tensor:
    """What is added to the logits of the nine tokens of MIXED, at temperature 0.5."""
    added = torch.zeros(9, V, dtype=torch.float64)
    for position, kept in enumerate(KEPT):
        closed = torch.full((V,), -torch.inf, dtype=torch.float64)
        closed[kept.tolist()] = 0
        added[position] = closed
    added[0, 9] += 4
    added[2, 29] -= 2
    added[6:, 6] += 3
    added[6:8, 1] = -torch.inf
    return added


def test_kept_tokens_survive_the_record_and_a_cut() -> None:
    (span,) = spans_of(Support(top_k=4), 3, STOPS, KEPT)
    assert [ids.tolist() for ids in kept_of(span)] == [[2, 3, 9], [4], [0, 5, 28, 29]]
    cut = Span(start=7, end=9, support=span.support, stop_ids=STOPS, kept=span.kept)
    assert [ids.tolist() for ids in kept_of(cut)] == [[2, 3, 9], [4]]


@pytest.mark.parametrize("chunk_tokens", [2, 9])
def test_logprobs_entropies_and_kl_are_those_of_the_changed_logits(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, ref_hidden = torch.randn(2, 9, 8, generator=generator)
    head, ref_head = torch.randn(2, V, 8, generator=generator)
    targets = torch.tensor([t for s in MIXED for t in s.token_ids[1:].tolist()])
    weights = torch.randn(3, 9, generator=generator)
    kwargs: Any = {"temperature": 0.5, "chunk_tokens": chunk_tokens, "edits": changes(MIXED)}
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    logprobs, entropies, kl, _ = token_logprobs(
        hidden, head=head, reference=(ref_hidden, ref_head), targets=targets, **kwargs
    )
    assert kl is not None
    found = torch.autograd.grad((weights * torch.stack([logprobs, entropies, kl])).sum(), leaves)

    def table(states: Tensor, matrix: Tensor) -> Tensor:
        # Finite, so that the slow form has a gradient.
        return ((states @ matrix.t()).double() / 0.5 + dense().clamp_min(-1e9)).log_softmax(-1)

    p, q = table(hidden, head), table(ref_hidden, ref_head)
    own = torch.stack(
        [p.gather(1, targets[:, None])[:, 0], -(p.exp() * p).sum(1), (p.exp() * (p - q)).sum(1)]
    )
    assert torch.allclose(torch.stack([logprobs, entropies, kl]).double(), own, atol=1e-5)
    expected = torch.autograd.grad((weights.double() * own).sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        assert torch.allclose(one, other, atol=1e-4)


def test_passes_have_the_changes_of_their_tokens() -> None:
    (group,) = make_groups(num_groups=1)
    group = msgspec.structs.replace(group, trajectories=MIXED)
    # As the buffer stores it.
    stored = read_group(pack_group(group)).unpacked()
    assert [t.spans for t in stored.trajectories] == [t.spans for t in MIXED]
    batch = collate_part(whole([stored]), device=CPU, temperature=0.5, grammars=NO_TEXT)
    row = pack(batch, [2, 0], device=CPU)
    assert row.edits is not None
    logits = torch.zeros(6, V)
    row.edits.apply(logits, slice(0, 6))
    assert torch.allclose(
        logits.clamp_min(-1e6), dense()[[6, 7, 8, 0, 1, 2]].float().clamp_min(-1e6)
    )


def test_a_token_outside_its_support_is_not_trained_and_is_counted() -> None:
    wrong = [
        sample([8, 4, 29], spans_of(Support(top_k=4), 3, STOPS, KEPT)),
        sample([5, 1, 1], spans_of(Support(min_tokens=2), 3, STOPS, [])),
    ]
    _, is_outside = edits_of(wrong, NO_TEXT, temperature=1.0, device=CPU)
    assert is_outside.tolist() == [True, False, False, False, True, True]


def test_the_likeliest_tokens_with_the_mass_remain_and_of_equal_ones_exactly_k() -> None:
    assert (truncate(torch.ones(2, V), 7, 1.0) > -torch.inf).sum(1).tolist() == [7, 7]
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert (truncate(probs.log(), 0, 0.8) > -torch.inf).tolist() == [[True, True, False, False]]
    assert (truncate(probs.log(), 0, 0.81) > -torch.inf).tolist() == [[True, True, True, False]]
    # Of the two likeliest the first has 0.625.
    assert (truncate(probs.log(), 2, 0.6) > -torch.inf).tolist() == [[True, False, False, False]]
