"""From the stored samples of one evaluation to its report: held-out metrics and a page of samples.

Samples that failed for a reason outside the policy count neither as right nor as wrong.
Called by processes/buffer.py when the last group of an evaluation is in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_rl.store import KEPT_SAMPLES, Store
from async_rl.summary import Summary
from async_rl.types import Group, Prompt

_NUM_SHOWN = 4
_Z95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What people see of one evaluation; num_failed: prompts without a sample."""

    scalars: dict[str, float]
    texts: dict[str, str]
    num_failed: int


def evaluation_scalars(groups: Sequence[Summary], *, num_samples: int) -> dict[str, float]:
    """Means over the prompts' groups, each of num_samples samples; only their number if there are none."""
    num = len(groups)
    if num == 0:
        return {"eval/num_samples": 0.0}
    first = [group.pass_rate for group in groups]
    any_passes = [float(group.pass_rate > 0) for group in groups]
    return {
        "eval/pass_at_1": sum(first) / num,
        "eval/pass_at_1_error": interval(first),
        "eval/pass_at_k": sum(any_passes) / num,
        "eval/pass_at_k_error": interval(any_passes),
        "eval/reward_mean": sum(group.reward_mean for group in groups) / num,
        "eval/num_samples": float(num * num_samples),
        "eval/length_mean": sum(group.response_length_mean for group in groups) / num,
        "eval/truncated_share": sum(group.truncated_share for group in groups) / num,
    }


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of the mean: 1.96 s / sqrt(n), s the unbiased spread; 0 for a single value.

    One value per prompt: samples of one prompt are alike, so they must not count as independent.
    """
    return _Z95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def sample_text(prompt: Prompt, group: Group, decode: Callable[[Sequence[int]], str]) -> str:
    """One sample as Markdown: prompt, response, reward with its parts, what the tests said, which versions wrote it."""
    sample = group.trajectories[0]
    response = decode(sample.token_ids[sample.prompt_length :].tolist())
    verdicts = ", ".join(v.value for v in sample.score.verdicts) or "no test was run"
    versions = sorted(set(sample.versions[sample.prompt_length :].tolist()))
    parts = "".join(f", {name} {value:g}" for name, value in sorted(sample.score.parts.items()))
    head = f"**{prompt.prompt_id}**: reward {sample.score.reward:g}{parts} ({verdicts}), written by version {', '.join(map(str, versions))}"
    return f"{head}\n\n{prompt.text}\n\n```\n{response}\n```"


async def report_of(
    store: Store, version: int, held_out: Sequence[Prompt], decode: Callable[[Sequence[int]], str], *, num_samples: int
) -> EvaluationReport:
    """The report of a complete evaluation, from the store. num_samples: of each prompt."""
    rows = await store.evaluation_groups(version)
    samples = [summary for _, summary in rows if summary is not None]
    kept = zip(rows[:KEPT_SAMPLES], held_out, strict=False)
    shown = [(group_id, prompt) for (group_id, summary), prompt in kept if summary is not None][:_NUM_SHOWN]
    groups = await store.read_groups([group_id for group_id, _ in shown])
    texts = [sample_text(prompt, group, decode) for (_, prompt), group in zip(shown, groups, strict=True)]
    return EvaluationReport(
        scalars=evaluation_scalars(samples, num_samples=num_samples),
        texts={"samples/evaluation": "\n\n---\n\n".join(texts)} if texts else {},
        num_failed=len(rows) - len(samples),
    )
