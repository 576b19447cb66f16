"""The tickets of groups, and the check of the groups that come back for them.

A group has an index, and its ticket the prompt with this index. The codec checks the types of
fields only. A group that passes `check_group` keeps everything that core/types.py promises: it can
be summarized, stored and trained without a further check.
"""

import itertools
import math

import numpy as np
from msgspec.structs import replace

from async_rl.buffer.changes import Admitted, storable
from async_rl.buffer.groups import OpenGroup, Recovered
from async_rl.buffer.policies import ScoreFilter, Selection
from async_rl.buffer.store.reader import StoreReader
from async_rl.config.run import RunConfig
from async_rl.config.sampling import sampling_of
from async_rl.core.checksums import checksum
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import PackedGroup, PackedSample
from async_rl.core.types import NO_VERSION, IntArray, Purpose, Ticket
from async_rl.data.prompt_file import RunPrompts

_MOST_DRAFT_BYTES = 1 << 16
"""Of the earlier responses with a ticket: 16,384 tokens, which an engine searches in 20 us."""
_PROMPT_END_BYTES = 4 * 8
"""Of the prompt before each of them: the first words of a response follow it."""
_LOGPROB_ROUNDING = 1e-3
"""A log-softmax in bfloat16 may exceed 0 by rounding."""
_LARGEST_SCORE = 1e30
"""The learner computes in float32, and sums over a batch must not overflow there."""
_TOKEN_BYTES = 4
_CLOCK = (0, 3)
"""Numbers in a clock: none, or the moments of first token, last token and score."""


class Tickets:
    """The prompts of one run. Raises ProtocolError if open groups had other prompts.

    rule: decides on the prompts from results; None without data.filter and such a data.order.
    """

    def __init__(self, config: RunConfig, prompts: RunPrompts, recovered: Recovered) -> None:
        self._config = config
        self._prompts = prompts
        prompts.order.restore(recovered.left, recovered.chosen)
        self.rule: ScoreFilter | Selection | None = None
        if config.data.filter.is_on:
            self.rule = ScoreFilter(config, prompts)
        elif config.data.selects:
            self.rule = Selection(config, prompts)
        if self.rule is not None:
            for position, rewards in recovered.rewards:
                self.rule.note(position, rewards)
        # Otherwise a group would be generated for one prompt and trained as another one.
        for group in recovered.open:
            expected = recovered.prompt_ids[group.group_id]
            prompt_id = storable(prompts.prompt(group.purpose, group.index).prompt_id)
            if prompt_id != expected:
                raise ProtocolError(
                    f"group {group.group_id} was issued for prompt {expected}, but the data now has"
                    f" {prompt_id} at its position; resume with the data and the seed that the run"
                    " started with"
                )

    def admitted(self, group: OpenGroup) -> Admitted:
        """The change that records a new group."""
        prompt = self._prompts.prompt(group.purpose, group.index)
        prompt_id = storable(prompt.prompt_id)
        data_source = storable(prompt.data_source)
        text = storable(prompt.text)
        return Admitted(
            group=group,
            prompt_id=prompt_id,
            data_source=data_source,
            text=text,
            checksum=checksum(prompt_id, group.purpose, data_source, text),
            num_samples=self._num_samples(group.purpose),
        )

    def ticket(self, group: OpenGroup) -> Ticket:
        """The ticket of a generating group."""
        num_samples = self._num_samples(group.purpose)
        if group.purpose is Purpose.TRAIN:
            # More may be drawn than are trained: the generator keeps the best (generation_size).
            num_samples = self._config.generation.num_drawn
        return Ticket(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            prompt=self._prompts.prompt(group.purpose, group.index),
            num_samples=num_samples,
            sampling=sampling_of(self._config, group.purpose),
            admitted_version=group.version,
        )

    async def with_drafts(self, tickets: list[Ticket], reader: StoreReader) -> list[Ticket]:
        """Return the tickets with earlier responses to their prompts, if the engine looks there."""
        if not self._config.generation.has_drafts:
            return tickets
        found = []
        for ticket in tickets:
            prompt_id = storable(ticket.prompt.prompt_id)
            group = await reader.newest_of_prompt(prompt_id, ticket.purpose)
            drafts = b"" if group is None else _drafts_of(group)
            found.append(replace(ticket, sampling=replace(ticket.sampling, drafts=drafts)))
        return found

    def check(self, group: PackedGroup, known: OpenGroup, *, newest_version: int) -> None:
        """Raise ProtocolError if the group is not a valid result of its ticket.

        newest_version: as in `check_group`.
        """
        prompt = self._prompts.prompt(known.purpose, known.index)
        expected = (known.purpose, prompt.prompt_id, self._num_samples(known.purpose))
        actual = (group.purpose, group.prompt_id, len(group.samples))
        if actual != expected:
            raise ProtocolError(f"purpose, prompt and samples are {actual} instead of {expected}")
        # A group that waits again may still come from the generator that was given up.
        if known.generator not in ("", group.generator):
            raise ProtocolError(f"its ticket is with {known.generator}")
        check_group(
            group,
            prompt.token_ids,
            newest_version=newest_version,
            vocabulary_size=self._prompts.vocabulary_size,
        )

    def _num_samples(self, purpose: Purpose) -> int:
        """Samples of a complete group; more may be drawn for a training prompt."""
        if purpose is Purpose.TRAIN:
            return self._config.generation.group_size
        return self._config.evaluation.num_samples


def _drafts_of(group: PackedGroup) -> bytes:
    """Return the responses of a group as `Sampling.drafts`, each after the end of its prompt."""
    numbers = range(len(group.samples))
    responses = [group.member(number).token_ids for number in numbers]
    end = group.prompt[-_PROMPT_END_BYTES:]
    return end.join([b"", *responses])[:_MOST_DRAFT_BYTES]


def check_group(
    group: PackedGroup, prompt: IntArray, *, newest_version: int, vocabulary_size: int
) -> None:
    """Raise ProtocolError unless the samples answer `prompt` and keep the promises of their type.

    newest_version: the newest one that any generator can have.  vocabulary_size: of the model,
    whose embedding has no row for a larger token id.
    """
    issued = prompt.tobytes()
    if group.prompt[: len(issued)] != issued or len(group.prompt) % _TOKEN_BYTES:
        raise ProtocolError(
            f"its prompt of {group.prompt_length} tokens does not begin with the {len(prompt)} that"
            " were issued"
        )
    if not 0 <= group.generation_s < math.inf:
        raise ProtocolError(f"its generation took {group.generation_s} s")
    length = group.prompt_length
    branches = {tuple(b for b in sample.branches if b[0] < length) for sample in group.members}
    if len(branches) > 1:
        raise ProtocolError("its samples have different branches in their prompt")
    for number, sample in enumerate(group.members):
        try:
            _check_runs(sample, newest_version)
            _check_score(sample)
            if sample.branches:
                _check_branches(sample, len(prompt), group.prompt_length)
            if sample.calls:
                _check_calls(sample)
            if len(sample.clock) not in _CLOCK:
                raise ProtocolError(f"its clock has {len(sample.clock)} moments")
        except ProtocolError as error:
            raise ProtocolError(f"sample {number}: {error}") from error
    sizes = len(group.token_ids), len(group.behavior_logprobs)
    num_tokens = sum([sample.response_length for sample in group.members])
    num_written = sum([sample.num_written for sample in group.members])
    expected = _TOKEN_BYTES * num_tokens, _TOKEN_BYTES * num_written
    if sizes != expected:
        raise ProtocolError(f"its tokens and log-probs have {sizes} bytes instead of {expected}")
    _check_tokens(group, vocabulary_size)


def _check_tokens(group: PackedGroup, vocabulary_size: int) -> None:
    # One array for all samples: the time of the checks limits the groups per second.
    # Unsigned, so that one comparison finds negative ids too.
    arrays = [np.frombuffer(ids, "<u4") for ids in (group.prompt, group.token_ids)]
    largest = max(ids.max(initial=0) for ids in arrays)
    if largest >= vocabulary_size:
        raise ProtocolError(
            f"token id {largest.astype(np.int32)} is not one of 0 to {vocabulary_size - 1}"
        )
    logprobs = np.frombuffer(group.behavior_logprobs, "<f4")
    # Both are NaN if one of the values is, and a comparison with NaN is false.
    if not (logprobs.max(initial=0) <= _LOGPROB_ROUNDING and logprobs.min(initial=0) > -math.inf):
        largest = logprobs.max(initial=0)
        raise ProtocolError(f"a log-prob is not finite or above 0; the largest is {largest}")


def _check_runs(sample: PackedSample, newest_version: int) -> None:
    num_tokens = 0
    for length, version, is_trained in sample.runs:
        num_tokens += length
        if length < 1:
            raise ProtocolError(f"a run has {length} tokens")
        if not NO_VERSION <= version <= newest_version:
            raise ProtocolError(
                f"version {version} is not one of 0 to {newest_version}, the known ones"
            )
        if is_trained and version == NO_VERSION:
            raise ProtocolError("a trained token has no version")
    if num_tokens != sample.response_length:
        raise ProtocolError(
            f"its runs have {num_tokens} tokens, its response {sample.response_length}"
        )


def _check_branches(sample: PackedSample, num_issued: int, num_prompt: int) -> None:
    end = num_prompt + sample.response_length
    starts = [start for start, _ in sample.branches]
    # A start just after the issued prompt: the tokens need not continue it. Each has a token.
    is_ordered = _ascends(num_issued - 1, *starts, end)
    if not is_ordered or any(not -1 <= parent < start for start, parent in sample.branches):
        raise ProtocolError(f"branches start at {sample.branches} of {num_issued} to {end}")
    lengths, _, is_trained = zip(*sample.runs, strict=True)
    # Tokens of the prompt are not trained.
    roots = [start - num_prompt for start, parent in sample.branches if parent < 0]
    roots = [root for root in roots if root >= 0]
    if np.repeat(is_trained, lengths)[roots].any():
        raise ProtocolError("a token that follows nothing is marked as trained")


def _check_calls(sample: PackedSample) -> None:
    ends = sorted(call.end_tokens for call in sample.calls if call.end_tokens)
    if not _ascends(0, *ends, sample.response_length + 1):
        raise ProtocolError(f"its calls end after {ends} of {sample.response_length} tokens")


def _ascends(*numbers: int) -> bool:
    return all(first < then for first, then in itertools.pairwise(numbers))


def _is_score(value: float) -> bool:
    """Return whether the value can be a reward or a part of one."""
    return abs(value) <= _LARGEST_SCORE  # false for NaN


def _check_score(sample: PackedSample) -> None:
    score = sample.score
    values = [score.reward, *score.parts.values()]
    values += [step.reward for step in score.steps]
    values += [call.reward for call in sample.calls]
    if not all(map(_is_score, values)):
        raise ProtocolError(
            f"one of the rewards {values} is not a finite number of at most {_LARGEST_SCORE:g}"
        )
    if not 0 <= score.latency_s < math.inf:
        raise ProtocolError(f"the scoring took {score.latency_s} s")
    ends = [0, *(step.end_tokens for step in score.steps), sample.response_length]
    if ends != sorted(ends):
        raise ProtocolError(f"scored steps end after {ends[1:-1]} of {ends[-1]} tokens")
