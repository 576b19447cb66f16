"""verl's custom reward function.

    custom_reward_function.path=pkg://async_rl.adapters.verl
    custom_reward_function.name=compute_score

A response that cannot be judged raises, which stops verl's step; it is never scored.
"""

from typing import Any

from async_rl.adapters.grader import scores_of


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    verifier_url: str | None = None,
    **_: Any,
) -> float:
    """The share of passed tests, 0 to 1.

    The tests are in `extra_info` (`tests`, `test_list`, ...), or else of `ground_truth` by
    the data_source, as in verl's own rows. verifier_url: from `reward_kwargs`.
    """
    row = {**(extra_info or {}), "data_source": data_source}
    # verl's rows have their tests there, in a form that the data source decides.
    row.setdefault("reward_model", {"ground_truth": ground_truth})
    (score,) = await scores_of([solution_str], [row], url=verifier_url)
    return score
