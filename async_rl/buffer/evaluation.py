"""Evaluations: how many of their groups are open, and the report of a complete one from its stored
samples: held-out metrics with their confidence.

Samples that failed for a reason outside the policy count neither as right nor as wrong.
Invariant: an evaluation that was reported once is reported again with the same metrics, even if its
trajectories are deleted since.
"""

import asyncio
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from async_rl.buffer.groups import Recovered
from async_rl.buffer.store.reader import StoreReader
from async_rl.config.rewards import Extraction
from async_rl.core.heads import means_by_name
from async_rl.core.types import NO_VERSION, Group, Prompt, Trajectory
from async_rl.rewards.responses import vote_of

_Z95 = 1.96
_ERRORS = (
    "pass_at_1_error",
    "pass_at_k_error",
    "maj_at_k_error",
    "reward_mean_error",
    "greedy_pass_error",
)
"""Confidences of metrics, each named by its metric."""

Decode = Callable[[Sequence[int]], str]


class EvaluationProgress:
    """The evaluations of the surviving history. finished: versions to report, oldest first."""

    def __init__(self, recovered: Recovered) -> None:
        self.finished: deque[int] = deque()
        self._num_open: dict[int, int] = {}
        num_open = Counter(group.evaluation for group in recovered.open)
        for version, is_reported in recovered.evaluations.items():
            self._num_open[version] = num_open[version]
            # The buffer stopped between the last group and the report.
            if not is_reported:
                self.report_closed(version)

    def start(self, version: int, num_prompts: int) -> bool:
        """Start an evaluation; False if it was started before. One that is finished is reported
        again, because a learner that requests it twice may have lost its metrics.
        """
        self.report_closed(version)
        if version in self._num_open:
            return False
        self._num_open[version] = num_prompts
        return True

    def end_group(self, version: int) -> None:
        """A group of this evaluation is complete or dropped."""
        # The last group decides, in whatever order they come.
        self._num_open[version] -= 1
        self.report_closed(version)

    def forget_after(self, version: int) -> None:
        """Later versions will be other weights, so their evaluations start again."""
        self._num_open = {v: number for v, number in self._num_open.items() if v <= version}
        self.finished = deque(v for v in self.finished if v <= version)

    def report_closed(self, version: int) -> None:
        """Report an evaluation if no group of it is open, unless it was forgotten."""
        if self._num_open.get(version) == 0:
            self.finished.append(version)


def result_of(
    prompt: Prompt, group: Group, decode: Decode, extraction: Extraction
) -> dict[str, float]:
    """The metrics of one prompt: means over the samples of its complete group. Without a greedy
    answer, or without tokens of a version, the metrics of these are missing.
    """
    samples = group.trajectories
    passed = [s.score.is_passed for s in samples]
    votes = [vote_of(prompt.problem, _response(s, decode), extraction) for s in samples]
    sampled = [version for s in samples for version in s.versions.tolist() if version != NO_VERSION]
    result = {
        "eval/num_samples": len(samples),
        "eval/pass_at_1": statistics.fmean(passed),
        "eval/pass_at_k": float(any(passed)),
        "eval/maj_at_k": majority(passed, votes),
        "eval/reward_mean": statistics.fmean(s.score.reward for s in samples),
        "eval/length_mean": statistics.fmean(s.response_length for s in samples),
        "eval/truncated_share": statistics.fmean(s.is_truncated for s in samples),
    }
    if group.baseline is not None:
        result["eval/greedy_pass"] = float(group.baseline.score.is_passed)
    if sampled:
        result["eval/version_mean"] = statistics.fmean(sampled)
    return result


def evaluation_scalars(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the prompts; only the number of samples if there are none."""
    scalars = means_by_name(results)
    scalars["eval/num_samples"] = float(sum(result["eval/num_samples"] for result in results))
    for error in _ERRORS:
        name = f"eval/{error.removesuffix('_error')}"
        values = [result[name] for result in results if name in result]
        if values:
            scalars[f"eval/{error}"] = interval(values)
    return scalars


def majority(passed: Sequence[bool], votes: Sequence[str | None]) -> float:
    """Return whether the answer with the most votes passes: the share of passes among the samples
    with that answer, or with one that ties with it. 0 without votes.
    """
    # A sample without an answer has no vote; otherwise silence could win.
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
    if len(values) < 2:
        return 0.0
    return _Z95 * statistics.stdev(values) / math.sqrt(len(values))


async def report_of(
    store: StoreReader,
    version: int,
    held_out: Sequence[Prompt],
    decode: Decode,
    *,
    extraction: Extraction,
) -> tuple[dict[str, float], int]:
    """Return the metrics of a complete evaluation, from the store, and the number of prompts
    without a sample. held_out: the prompts in their order.
    """
    rows = await store.evaluation_groups(version)
    complete = {
        group_id: held_out[index]
        for index, (group_id, is_complete) in enumerate(rows)
        if is_complete
    }
    # The stored figures first: most trajectories are deleted once an evaluation was reported.
    scalars = await store.evaluation_figures(version)
    if scalars is None:
        results = []
        # One by one: the trajectories of a large evaluation are gigabytes.
        for group_id, prompt in complete.items():
            (group,) = await store.groups([group_id])
            # In a thread: decoding thousands of samples would hold up requests for work.
            result = await asyncio.to_thread(
                result_of, prompt, group.unpacked(), decode, extraction
            )
            results.append(result)
        scalars = evaluation_scalars(results)
    return scalars, len(rows) - len(complete)


def _response(sample: Trajectory, decode: Decode) -> str:
    return decode(sample.token_ids[sample.prompt_length :].tolist())
