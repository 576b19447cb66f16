"""The selection of prompts by their results (data.order): which prompts the next batch has.

Invariants: a choice is stored before it takes effect, and depends on nothing but the seed, its
position and the newest complete groups; so a resumed run issues the prompts that were chosen, and
continues to choose as the run that was stopped.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from async_rl.buffer.changes import PromptsChosen
from async_rl.buffer.policies import CANDIDATES, POLICIES, WINDOW, Result
from async_rl.config.plugins import SELECTION, load_once
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.data.prompt_file import RunPrompts

_MOST = 1024
"""Candidates of a large batch: the buffer answers nobody while a policy computes."""


class Selection:
    """The results of a run, and the choices that follow from them. chosen: (position, row) that
    were chosen before; rewards: as in `Recovered`.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: RunPrompts,
        chosen: Iterable[tuple[int, int]],
        rewards: Iterable[tuple[int, Sequence[float]]],
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._results: dict[int, Result] = {}
        self._end = 0
        self._is_on = config.data.selects
        for position, row in chosen:
            prompts.order.choose(position, [row])
            self._end = max(self._end, position + 1)
        if self._is_on:
            for position, values in rewards:
                self.note(position, values)

    def note(self, position: int, rewards: Sequence[float]) -> None:
        """The group at this position of the order came back with these rewards."""
        if not self._is_on:
            return
        row = self._prompts.order.index(position)
        self._results[position] = Result(row=row, position=position, rewards=rewards)
        if len(self._results) > WINDOW:
            del self._results[min(self._results)]

    def choose_at(self, position: int) -> list[PromptsChosen]:
        """Choose the prompts of the next batch, if this position, which is issued next, has none.
        Raises ConfigError if a plug-in returns no such rows.
        """
        if not self._is_on or position < self._end:
            return []
        order = self._prompts.order
        count = self._config.buffer.groups_per_step
        number = min(CANDIDATES * count, _MOST)
        number = max(number, count)
        first = position // count * number
        candidates = [order.drawn(k) for k in range(first, first + number)]
        name = self._config.data.order
        policy = POLICIES.get(name) or load_once("data.order", name, SELECTION)
        positions = sorted(self._results)
        rows = policy(
            candidates,
            count=count,
            results=[self._results[k] for k in positions],
            prompt=self._prompts.train,
            rng=np.random.default_rng([self._config.seed, position]),
        )
        rows = [int(row) for row in rows]
        are_rows = all(0 <= row < order.num_rows for row in rows)
        if len(rows) != count or not are_rows:
            raise ConfigError(
                f"data.order={name}: returned {rows} for a batch of {count} prompts; return a row"
                f" for each, of 0 to {order.num_rows - 1}"
            )
        order.choose(position, rows)
        self._end = position + count
        return [PromptsChosen(position=position, rows=rows)]
