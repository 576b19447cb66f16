"""The tests behind a certificate: exact where that can be counted, and as rarely wrong as their
limit says.
"""

import itertools

import numpy as np
import pytest

from async_rl.runs.certificate import selection
from async_rl.runs.certificate.selection import LIMIT, excess_p_value, rank_test


@pytest.mark.parametrize("is_one_sided", [True, False])
def test_permutations_agree_with_all_subsets(is_one_sided: bool) -> None:
    for chosen, others in (
        ([9.0, 8.0, 7.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        ([1.0, 2.0, 2.0], [2.0, 2.0, 3.0, 4.0, 1.0]),
    ):
        every = np.array([*chosen, *others])
        ranks = np.array([(every < x).sum() + ((every == x).sum() + 1) / 2 for x in every])
        ranks -= ranks.mean()
        sums = np.array([sum(s) for s in itertools.combinations(ranks, len(chosen))])
        observed = ranks[: len(chosen)].sum()
        if not is_one_sided:
            sums, observed = abs(sums), abs(observed)
        p = rank_test(np.array(chosen), np.array(others), is_one_sided=is_one_sided)
        assert p == pytest.approx(float((sums >= observed - 1e-9).mean()), abs=0.015)


def test_a_large_selection_is_thinned_and_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "NUM_PERMUTATIONS", 1_999)
    rng = np.random.default_rng(2)
    lengths = rng.lognormal(3, 1, 50_000)
    is_long = lengths > np.quantile(lengths, 0.9)
    assert rank_test(lengths[is_long], lengths[~is_long]) < LIMIT
    is_any = rng.random(50_000) < 0.1
    assert rank_test(lengths[is_any], lengths[~is_any]) > LIMIT


def test_equal_responses_by_chance_are_no_shared_seed() -> None:
    """Peaked policies: each group of 8 has its own share of a certain answer."""
    rng = np.random.default_rng(3)

    def excess(shared: bool) -> float:
        top = rng.uniform(0.05, 0.95)
        draws = rng.random(8) < top
        answers = [0 if draw else 1 + n for n, draw in enumerate(draws)]
        if shared:
            answers = [answers[0]] * 8
        chances = [top if answer == 0 else (1 - top) * 1e-3 for answer in answers]
        pairs = list(itertools.combinations(range(8), 2))
        equal = sum(answers[a] == answers[b] for a, b in pairs)
        return equal - sum((chances[a] + chances[b]) / 2 for a, b in pairs)

    alarms = [excess_p_value([excess(False) for _ in range(40)]) < LIMIT for _ in range(200)]
    assert sum(alarms) <= 1
    assert excess_p_value([excess(True) for _ in range(40)]) < LIMIT
    assert excess_p_value([]) == excess_p_value([0.0, 0.0]) == 1.0
