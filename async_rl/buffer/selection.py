"""The selection of prompts by their results (data.order): which prompts the next batch has.

Invariants: a choice is stored before it takes effect, and depends on nothing but the seed, its
position and the newest complete groups; so a resumed run issues the prompts that were chosen, and
continues to choose as the run that was stopped.
"""

from collections.abc import Sequence

import numpy as np

from async_rl.buffer.changes import PromptsChosen
from async_rl.buffer.policies import CANDIDATES, POLICIES, WINDOW, Choice, Result
from async_rl.config.plugins import SELECTION, load_function
from async_rl.config.run import RunConfig
from async_rl.data.prompt_file import RunPrompts

_MOST = 1024
"""Candidates of a large batch: the buffer answers nobody while a policy computes."""


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
