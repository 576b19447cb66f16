"""Rewards of `verifiers`, which prime-rl trains on.

    class MyTask(vf.Task[MyData]):
        passed_tests = vf.reward(weight=1.0)(passed_tests)

A response that cannot be judged raises: the rollout has an error and no reward.
"""

from typing import Any

from async_rl.adapters.grader import scores_of


async def passed_tests(self: Any, trace: Any) -> float:
    """The share of passed tests of the last reply; the tests are fields of the data of the vf.Task
    whose method this is.
    """
    # Fields without a value would hide the layouts that a row may have instead.
    row = {key: value for key, value in self.data.model_dump().items() if value is not None}
    (score,) = await scores_of([trace.last_reply], [row])
    return score
