"""From the stored samples of one evaluation to its report: held-out metrics with their confidence,
and a page of samples.

Samples that failed for a reason outside the policy count neither as right nor as wrong.
Invariant: a finished evaluation gives the figures that were reported of it, whatever became of its
trajectories. Called by processes/buffer.py when the last group of an evaluation is in, and by
standalone.py (`async-rl eval`).
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from async_rl.buffer.store.store import KEPT_SAMPLES, Store
from async_rl.core.types import NO_VERSION, Group, Prompt
from async_rl.rewards.votes import vote_of

_NUM_SHOWN = 4
_Z95 = 1.96
_READ_AT_ONCE = 32
"""Groups whose trajectories are in memory at one time."""

Decode = Callable[[Sequence[int]], str]
Extraction = Literal["auto", "fenced", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What people see of one evaluation; num_failed: prompts without a sample."""

    scalars: dict[str, float]
    texts: dict[str, str]
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """What the samples of one prompt are worth: one entry per sample.

    votes: the answer that a sample gives, None where it gives none.  greedy: whether the greedy
    answer passes, None if none was written.
    version: mean over the sampled tokens, None without any.
    """

    passed: tuple[bool, ...]
    rewards: tuple[float, ...]
    votes: tuple[str | None, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    greedy: bool | None
    version: float | None


def result_of(prompt: Prompt, group: Group, decode: Decode, extraction: Extraction) -> PromptResult:
    """The result of a complete group."""
    samples = group.trajectories
    written = [version for s in samples for version in s.versions.tolist() if version != NO_VERSION]
    return PromptResult(
        passed=tuple(s.score.is_passed for s in samples),
        rewards=tuple(s.score.reward for s in samples),
        votes=tuple(
            vote_of(prompt.problem, decode(s.token_ids[s.prompt_length :].tolist()), extraction)
            for s in samples
        ),
        lengths=tuple(s.response_length for s in samples),
        truncated=tuple(s.is_truncated for s in samples),
        greedy=None if group.baseline is None else group.baseline.score.is_passed,
        version=statistics.fmean(written) if written else None,
    )


def evaluation_scalars(results: Sequence[PromptResult]) -> dict[str, float]:
    """Means over the prompts; only the number of samples if there are none."""
    if not results:
        return {"eval/num_samples": 0.0}
    per_prompt = {
        ("pass_at_1", "pass_at_1_error"): [statistics.fmean(r.passed) for r in results],
        ("pass_at_k", "pass_at_k_error"): [float(any(r.passed)) for r in results],
        ("maj_at_k", "maj_at_k_error"): [majority(r.passed, r.votes) for r in results],
        ("reward_mean", "reward_mean_error"): [statistics.fmean(r.rewards) for r in results],
    }
    if greedy := [float(r.greedy) for r in results if r.greedy is not None]:
        per_prompt["greedy_pass", "greedy_pass_error"] = greedy
    scalars = {f"eval/{name}": statistics.fmean(values) for (name, _), values in per_prompt.items()}
    scalars |= {f"eval/{error}": interval(values) for (_, error), values in per_prompt.items()}
    scalars["eval/num_samples"] = float(sum(len(r.passed) for r in results))
    scalars["eval/length_mean"] = statistics.fmean(statistics.fmean(r.lengths) for r in results)
    scalars["eval/truncated_share"] = statistics.fmean(
        statistics.fmean(r.truncated) for r in results
    )
    if versions := [r.version for r in results if r.version is not None]:
        scalars["eval/version_mean"] = statistics.fmean(versions)
    return scalars


def majority(passed: Sequence[bool], votes: Sequence[str | None]) -> float:
    """Whether the answer with the most votes passes: the share of passes among the samples that
    give it, or one that ties with it.

    0 where nobody votes.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    winners = [
        is_right
        for is_right, vote in zip(passed, votes, strict=True)
        if vote is not None and counts[vote] == most
    ]
    return statistics.fmean(winners) if winners else 0.0


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of the mean: 1.96 s / sqrt(n), s the unbiased
    spread; 0 for a single value.

    One value per prompt: samples of one prompt are alike, so they must not count as independent.
    """
    return _Z95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def sample_text(prompt: Prompt, group: Group, decode: Decode) -> str:
    """One sample as Markdown: prompt, response, reward with its parts, what the tests said, which
    versions wrote it.
    """
    sample = group.trajectories[0]
    response = decode(sample.token_ids[sample.prompt_length :].tolist())
    verdicts = ", ".join(v.value for v in sample.score.verdicts) or "no test was run"
    versions = sorted(set(sample.versions[sample.prompt_length :].tolist()))
    parts = "".join(f", {name} {value:g}" for name, value in sorted(sample.score.parts.items()))
    head = (
        f"**{prompt.prompt_id}**: reward {sample.score.reward:g}{parts} ({verdicts}), written by"
        f" version {', '.join(map(str, versions))}"
    )
    return f"{head}\n\n{prompt.text}\n\n```\n{response}\n```"


async def report_of(
    store: Store,
    version: int,
    held_out: Sequence[Prompt],
    decode: Decode,
    *,
    extraction: Extraction,
) -> EvaluationReport:
    """The report of a complete evaluation, from the store. held_out: the prompts in their order."""
    rows = await store.evaluation_groups(version)
    complete = [
        (group_id, index) for index, (group_id, is_complete) in enumerate(rows) if is_complete
    ]
    scalars = await store.evaluation_figures(version)
    if scalars is None:
        results: list[PromptResult] = []
        for start in range(0, len(complete), _READ_AT_ONCE):
            part = complete[start : start + _READ_AT_ONCE]
            groups = await store.read_groups([group_id for group_id, _ in part])
            for (_, index), group in zip(part, groups, strict=True):
                results.append(
                    await asyncio.to_thread(result_of, held_out[index], group, decode, extraction)
                )
        scalars = evaluation_scalars(results)
    shown = [(group_id, held_out[index]) for group_id, index in complete if index < KEPT_SAMPLES][
        :_NUM_SHOWN
    ]
    groups = await store.read_groups([group_id for group_id, _ in shown])
    texts = [
        sample_text(prompt, group, decode) for (_, prompt), group in zip(shown, groups, strict=True)
    ]
    return EvaluationReport(
        scalars=scalars,
        texts={"samples/evaluation": "\n\n---\n\n".join(texts)} if texts else {},
        num_failed=len(rows) - len(complete),
    )
