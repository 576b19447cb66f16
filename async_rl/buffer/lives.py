"""The lives of the learner: the newest one may act, all earlier ones are refused.

A learner that cannot be reached is replaced while it may still run, for example behind a broken
network. Without this rule it could commit steps of weights that the run no longer uses.
"""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.buffer.changes import LifeBegan
from async_rl.core.errors import Superseded


class Lives:
    """The numbers of the lives that have started, by incarnation; they grow."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = dict(numbers)
        self.newest = max(self._numbers.values(), default=0)

    def begin(self, incarnation: str, version: int) -> list[LifeBegan]:
        """Begin a life, or return nothing if it is the newest already.

        Raises Superseded for an earlier one, whose request was delayed.
        """
        if incarnation in self._numbers:
            self.check(self._numbers[incarnation])
            return []
        # The order of arrival decides: a learner is started only after the supervisor gave up the
        # previous one.
        self.newest += 1
        self._numbers[incarnation] = self.newest
        return [LifeBegan(life=self.newest, incarnation=incarnation, version=version)]

    def check(self, life: int) -> None:
        """Raise Superseded unless this is the newest life."""
        if life != self.newest:
            raise Superseded(
                f"life {life} of the learner is refused, because life {self.newest} has"
                " started; end the older process"
            )
