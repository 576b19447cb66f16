"""The effect of results on the prompts that follow: policies select them (data.order), to which
plug-ins may add, and a filter removes prompts from the training data (data.filter).

Invariants
- A policy is pure: the same arguments and the same state of `rng` give the same rows.
- A choice is stored before it takes effect, and depends on nothing but the seed, its position and
  the newest complete groups; so a resumed run issues the prompts that were chosen, and continues to
  choose as the run that was stopped.
"""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from async_rl.buffer.changes import PromptsChosen, PromptsLeft
from async_rl.config.plugins import SELECTION, load_function
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import Prompt, Purpose
from async_rl.data.prompt_file import RunPrompts

_log = logging.getLogger(__name__)

CANDIDATES = 8
"""Prompts that a policy may choose from, for each prompt of a batch."""
WINDOW = 512
"""Results that a policy sees: the newest."""
_MOST = 1024
"""Candidates of a large batch: the buffer answers nobody while a policy computes."""
_GAP = 4
"""Batches until a prompt may be used again: its last group is trained and its update pushed."""
_BITS = 10  # of the hash of a word or a pair of words
# How much alike prompts are, by their words and by their data source.
_WORDS = 1.2
_SOURCE = 0.4
# Batches after which a result says e times less about prompts like its own, and about all prompts.
_LASTING = 32
_PASSING = 4
EXPONENT = 2
"""Of the predicted spread of rewards, by which `priority` draws."""
_LEAST = 0.15  # nothing is certain: every prompt may come again


@frozen
class Result:
    """A complete group: the row of its prompt, its position in the order, its samples' rewards."""

    row: int
    position: int
    rewards: Sequence[float]


@frozen
class Choice:
    """The inputs of a policy, which selects the prompts of a batch as rows of the run's prompts.

    candidates: rows in the shuffled order, eight for each prompt of the batch, at most 1,024.
    count: prompts of the batch. results: the newest 512 complete groups by position, oldest first.
    prompt: returns the prompt of a row. rng: seeded by `seed` and the position of the batch.
    """

    candidates: Sequence[int]
    count: int
    results: Sequence[Result]
    prompt: Callable[[int], Prompt]
    rng: np.random.Generator


def pools(choice: Choice) -> list[int]:
    """Half of the batch from the prompts whose newest samples have different rewards, those that
    were used longest ago; the rest, and what this pool lacks, in the order of the candidates.
    """
    newest = {result.row: result for result in choice.results}
    young = choice.results[-_GAP * choice.count :]
    again = [
        result.row
        for result in sorted(newest.values(), key=lambda result: result.position)
        if len(set(result.rewards)) > 1 and result not in young
    ]
    again = again[: choice.count // 2]
    fresh = [row for row in choice.candidates if row not in again]
    # The candidates again: there may be fewer prompts than a batch has.
    return [*again, *fresh, *choice.candidates][: choice.count]


def priority(choice: Choice) -> list[int]:
    """Candidates drawn by the square of the predicted spread of the rewards of their group: without
    one a group has no gradient, and rewards that differ only by the form of wrong answers have a
    small one.

    A Gaussian process predicts it: prompts with the same words or the same data source are alike,
    and recent results count more. Sources: prioritized replay (arXiv 1511.05952), selection by
    predicted results (arXiv 2510.01135).
    """
    rows = list(dict.fromkeys(choice.candidates))
    spreads = expected_spreads(
        [choice.prompt(row) for row in rows],
        count=choice.count,
        results=choice.results,
        prompt=choice.prompt,
    )
    # Keys of this kind draw without replacement, each row by its weight (Gumbel's trick).
    keys = EXPONENT * np.log(spreads) + choice.rng.gumbel(size=len(rows))
    places = np.argsort(-keys, kind="stable")
    chosen = [rows[place] for place in places]
    return [*chosen, *choice.candidates][: choice.count]


def expected_spreads(
    prompts: Sequence[Prompt],
    *,
    count: int,
    results: Sequence[Result],
    prompt: Callable[[int], Prompt],
) -> NDArray[np.float64]:
    """Return the standard deviation of the rewards that a group of each prompt is expected to have,
    in units of the largest one of the results; 1 for all before a batch is complete. count: prompts
    of a batch; prompt: returns the prompt of a result.
    """
    spreads = np.array([np.std(result.rewards) for result in results])
    if len(results) < count or not spreads.any():
        return np.ones(len(prompts))
    spreads /= spreads.max()
    positions = np.array([result.position for result in results])
    ages = (positions[-1] - positions) / count
    known = [prompt(result.row) for result in results]
    all_prompts = [*known, *prompts]
    words = np.array([_words(each) for each in all_prompts])
    words -= words.mean(0)  # what all prompts share says nothing
    lengths = np.linalg.norm(words, axis=1, keepdims=True)
    words /= np.maximum(lengths, 1e-6)
    sources = np.array([each.data_source for each in all_prompts])
    # Covariances of all prompts with the prompts of the results; the noise of a result is 1.
    number = len(results)
    alike = _WORDS * words @ words[:number].T
    alike += _SOURCE * (sources[:, None] == sources[:number])
    times = np.concatenate([ages, np.zeros(len(prompts))])
    apart = np.abs(times[:, None] - ages)
    covariance = alike * np.exp(-apart / _LASTING)
    covariance += _SOURCE * np.exp(-apart / _PASSING)
    mean = spreads[-number // 8 :].mean()
    weights = np.linalg.solve(covariance[:number] + np.eye(number), spreads - mean)
    predicted: NDArray[np.float64] = mean + covariance[number:] @ weights
    return predicted.clip(_LEAST, 1.0)


POLICIES = {"pools": pools, "priority": priority}


class Selection:
    """The results of a run and the choices that follow from them. Raises ConfigError if the plug-in
    cannot be loaded.
    """

    def __init__(self, config: RunConfig, prompts: RunPrompts) -> None:
        self._config = config
        self._prompts = prompts
        name = config.data.order
        self._policy = POLICIES.get(name) or load_function("data.order", name, SELECTION)
        self._results: dict[int, Result] = {}

    def note(self, position: int, rewards: Sequence[float]) -> None:
        """As `ScoreFilter.note`."""
        row = self._prompts.order.index(position)
        self._results[position] = Result(row=row, position=position, rewards=rewards)
        if len(self._results) > WINDOW:
            del self._results[min(self._results)]

    def before(self, position: int) -> list[PromptsChosen]:
        """Choose the prompts of the next batch, if this position, which is issued next, has none.
        Raises ValueError if a plug-in returns no such rows.
        """
        if self._prompts.order.is_chosen(position):
            return []
        order = self._prompts.order
        count = self._config.buffer.groups_per_step
        number = min(CANDIDATES * count, _MOST)
        number = max(number, count)
        first = position // count * number
        candidates = [order.drawn(k) for k in range(first, first + number)]
        positions = sorted(self._results)
        choice = Choice(
            candidates=candidates,
            count=count,
            results=[self._results[k] for k in positions],
            prompt=self._prompts.train,
            rng=np.random.default_rng([self._config.seed, position]),
        )
        rows = [int(row) for row in self._policy(choice)]
        are_rows = all(0 <= row < order.num_rows for row in rows)
        if len(rows) != count or not are_rows:
            # Not an error of this project: it would be the reply to a generator, and the run would
            # wait for groups that no generator gets. With this error the buffer exits.
            raise ValueError(
                f"data.order={self._config.data.order}: returned {rows} for a batch of {count}"
                f" prompts; return a row for each, of 0 to {order.num_rows - 1}"
            )
        order.choose(position, rows)
        return [PromptsChosen(position=position, rows=rows)]


class ScoreFilter:
    """The scores of the prompts, and the rule for prompts to leave the order of `prompts`.

    At the start of each epoch every active prompt is judged by the mean reward, scaled as the
    learner scales it, of its newest complete group. The filter does not wait for groups in
    generation: such a prompt is judged by its previous group, or an epoch later. Invariants: at
    most floor(active x max_share) prompts are removed at one time, those farthest beyond their
    bound first; a removed prompt never returns; a decision is returned to the caller, which stores
    it before it takes effect.
    """

    def __init__(self, config: RunConfig, prompts: RunPrompts) -> None:
        self._filter = config.data.filter
        self._reward = config.reward
        self._prompts = prompts
        self._order = prompts.order
        self._scores: dict[int, tuple[int, float]] = {}

    def note(self, position: int, rewards: Sequence[float]) -> None:
        """The group at this position of the order came back with these rewards."""
        reward = self._reward
        index = self._order.index(position)
        # As the objective scales them, so that the bounds mean the numbers that a person sees.
        scaled = (np.array(rewards) - reward.bias) * reward.scale
        clipped = scaled.clip(-reward.clip, reward.clip)
        newest, _ = self._scores.get(index, (-1, 0.0))
        # Groups come back in any order; an older one must not replace a newer score.
        if position > newest:
            self._scores[index] = position, float(clipped.mean())

    def before(self, position: int) -> list[PromptsLeft]:
        """Remove the prompts that leave before this position is issued, if it starts a pass over
        the data; they are out of the order when this returns.
        """
        if not self._order.may_lose_at(position):
            return []
        active = self._order.active
        scored = [index for index in active.tolist() if index in self._scores]
        excess = {index: self._excess(self._scores[index][1]) for index in scored}
        # The sort is stable: equals stay ordered by index, so that a resumed run decides the same.
        beyond = [index for index in scored if excess[index] > 0]
        worst = sorted(beyond, key=excess.__getitem__, reverse=True)
        # Without a prompt there would be no next step: the one nearest to its bound stays.
        chosen = worst[: min(int(len(active) * self._filter.max_share), len(active) - 1)]
        if not chosen:
            return []
        self._order.remove(chosen, position)
        leavers = []
        for index in chosen:
            last_position, score = self._scores[index]
            prompt = self._prompts.prompt(Purpose.TRAIN, last_position)
            leavers.append((prompt.prompt_id, index, score))
        _log.info(
            "%d prompts left the training data because of their mean reward (data.filter); %d"
            " remain",
            len(leavers),
            len(active) - len(chosen),
        )
        return [PromptsLeft(position=position, leavers=leavers)]

    def _excess(self, score: float) -> float:
        """Return how far the score is beyond a bound; at most 0 if it is within both."""
        above = math.inf if self._filter.above is None else self._filter.above
        below = -math.inf if self._filter.below is None else self._filter.below
        return max(score - above, below - score)


def _words(prompt: Prompt) -> NDArray[np.float32]:
    """Return which hashes the tokens and pairs of tokens of a prompt have."""
    ids = prompt.token_ids.astype(np.uint64)
    pairs = ids[:-1] * np.uint64(1_000_003) + ids[1:]
    both = np.concatenate([ids, pairs])
    hashes = both * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - _BITS)
    found = np.zeros(2**_BITS, np.float32)
    found[hashes] = 1
    return found
