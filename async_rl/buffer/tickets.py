"""The prompts and tickets of groups: a group has an index, a ticket the prompt with this index.

Prompts that are too easy or too hard may leave the training data at the start of a pass over it
(data.filter); the order of prompts changes here, before the first prompt of that pass is read.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from async_rl.buffer.changes import Admitted, PromptsLeft, storable
from async_rl.buffer.checks import check_group
from async_rl.buffer.groups import OpenGroup, Recovered
from async_rl.buffer.policies import Selection
from async_rl.buffer.store.reader import StoreReader
from async_rl.config.run import RunConfig
from async_rl.config.sampling import sampling_of
from async_rl.core.checksums import checksum
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import PackedGroup
from async_rl.core.types import Purpose, Ticket
from async_rl.data.prompt_file import RunPrompts

_log = logging.getLogger(__name__)

_MOST_DRAFT_BYTES = 1 << 16
"""Of the earlier responses with a ticket: 16,384 tokens, which an engine searches in 20 us."""
_PROMPT_END_BYTES = 4 * 8
"""Of the prompt before each of them: the first words of a response follow it."""


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
            drafts = b"" if group is None else drafts_of(group)
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


def drafts_of(group: PackedGroup) -> bytes:
    """Return the responses of a group as `Sampling.drafts`, each after the end of its prompt."""
    numbers = range(len(group.samples))
    responses = [group.member(number).token_ids for number in numbers]
    end = group.prompt[-_PROMPT_END_BYTES:]
    return end.join([b"", *responses])[:_MOST_DRAFT_BYTES]


class ScoreFilter:
    """The scores of the prompts, and the rule for prompts to leave the order of `prompts`.

    At the start of each epoch every active prompt is judged by the mean reward, scaled as the
    learner scales it, of its newest complete group. The filter does not wait for groups in
    generation: such a prompt is judged by its previous group, or an epoch later. Invariants: at
    most floor(active x max_share) prompts are removed at one time, those farthest beyond their
    bound first; a removed prompt never returns; a decision is returned to the caller, which stores
    it before it takes effect.
    """

    def __init__(self, config: RunConfig, prompts: RunPrompts) -> None:
        self._filter = config.data.filter
        self._reward = config.reward
        self._prompts = prompts
        self._order = prompts.order
        self._scores: dict[int, tuple[int, float]] = {}

    def note(self, position: int, rewards: Sequence[float]) -> None:
        """The group at this position of the order came back with these rewards."""
        reward = self._reward
        index = self._order.index(position)
        # As the objective scales them, so that the bounds mean the numbers that a person sees.
        scaled = (np.array(rewards) - reward.bias) * reward.scale
        clipped = scaled.clip(-reward.clip, reward.clip)
        newest, _ = self._scores.get(index, (-1, 0.0))
        # Groups come back in any order; an older one must not replace a newer score.
        if position > newest:
            self._scores[index] = position, float(clipped.mean())

    def before(self, position: int) -> list[PromptsLeft]:
        """Remove the prompts that leave before this position is issued, if it starts a pass over
        the data; they are out of the order when this returns.
        """
        if not self._order.may_lose_at(position):
            return []
        active = self._order.active
        scored = [index for index in active.tolist() if index in self._scores]
        excess = {index: self._excess(self._scores[index][1]) for index in scored}
        # The sort is stable: equals stay ordered by index, so that a resumed run decides the same.
        beyond = [index for index in scored if excess[index] > 0]
        worst = sorted(beyond, key=excess.__getitem__, reverse=True)
        # Without a prompt there would be no next step: the one nearest to its bound stays.
        chosen = worst[: min(int(len(active) * self._filter.max_share), len(active) - 1)]
        if not chosen:
            return []
        self._order.remove(chosen, position)
        leavers = []
        for index in chosen:
            last_position, score = self._scores[index]
            prompt = self._prompts.prompt(Purpose.TRAIN, last_position)
            leavers.append((prompt.prompt_id, index, score))
        _log.info(
            "%d prompts left the training data because of their mean reward (data.filter); %d"
            " remain",
            len(leavers),
            len(active) - len(chosen),
        )
        return [PromptsLeft(position=position, leavers=leavers)]

    def _excess(self, score: float) -> float:
        """Return how far the score is beyond a bound; at most 0 if it is within both."""
        above = math.inf if self._filter.above is None else self._filter.above
        below = -math.inf if self._filter.below is None else self._filter.below
        return max(score - above, below - score)
