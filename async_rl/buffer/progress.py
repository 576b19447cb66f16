"""The progress of evaluations: how many groups of each are still open."""

from __future__ import annotations

from collections import Counter, deque

from async_rl.buffer.groups import Recovered


class EvaluationProgress:
    """The evaluations of the surviving history. finished: versions to report, oldest first."""

    def __init__(self, recovered: Recovered) -> None:
        self.finished: deque[int] = deque()
        self._num_open: dict[int, int] = {}
        num_open = Counter(group.evaluation for group in recovered.open)
        for version, is_reported in recovered.evaluations.items():
            self._num_open[version] = num_open[version]
            # The buffer stopped between the last group and the report.
            if num_open[version] == 0 and not is_reported:
                self.finished.append(version)

    def start(self, version: int, num_prompts: int) -> bool:
        """Start an evaluation; False if it was started before. One that is finished is reported
        again, because a learner that requests it twice may have lost its metrics.
        """
        if self._num_open.get(version) == 0:
            self.finished.append(version)
        if version in self._num_open:
            return False
        self._num_open[version] = num_prompts
        return True

    def end_group(self, version: int) -> None:
        """A group of this evaluation is complete or dropped."""
        self._num_open[version] -= 1
        if self._num_open[version] == 0:
            self.finished.append(version)

    def forget_after(self, version: int) -> None:
        """Later versions will be other weights, so their finished evaluations do not count."""
        for evaluated, num_open in list(self._num_open.items()):
            if evaluated > version and num_open == 0:
                del self._num_open[evaluated]
