"""Rewards of `verifiers`, which prime-rl trains on.

    class MyTask(vf.Task[MyData]):
        passed_tests = vf.reward(weight=1.0)(passed_tests)

With `verifiers` before 0.2: `vf.Rubric(funcs=[passed_tests_of_info])` with the row's columns in
`info`. A response that cannot be judged raises: the rollout has an error and no reward.
"""

from __future__ import annotations

from typing import Any, Protocol

from async_rl.adapters.grader import Grader


class _Data(Protocol):
    def model_dump(self) -> dict[str, Any]: ...


class _Task(Protocol):
    @property
    def data(self) -> _Data: ...


class _Trace(Protocol):
    @property
    def last_reply(self) -> str: ...


async def passed_tests(self: _Task, trace: _Trace) -> float:
    """The share of passed tests of the last reply; the tests are fields of the task's data."""
    row = {key: value for key, value in self.data.model_dump().items() if value is not None}
    (score,) = await Grader().scores_async([trace.last_reply], [row])
    return score


async def passed_tests_of_info(completion: Any, info: dict[str, Any], **_: Any) -> float:
    """As `passed_tests`, for a rubric."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    (score,) = await Grader().scores_async([text], [info])
    return score
