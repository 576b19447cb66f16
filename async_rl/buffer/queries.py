"""The questions that the state of the buffer answers: what is open, and why a request must wait.

They change nothing. The commands are in `state.py`, on the same admission and replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from async_rl.buffer.admission import Admission, Gate
from async_rl.buffer.groups import OpenGroup, Recovered
from async_rl.buffer.outage import Outage
from async_rl.buffer.replay import Replay
from async_rl.config.run import RunConfig
from async_rl.core.errors import ProtocolError
from async_rl.core.types import GroupState, Purpose


class BufferQueries:
    """The groups of one run, for those who ask. recovered: the content of the store."""

    def __init__(self, config: RunConfig, recovered: Recovered, *, now_s: float) -> None:
        buffer = config.buffer
        self.outage = Outage()
        self._replay = Replay(
            groups_per_step=buffer.groups_per_step,
            max_staleness_versions=buffer.max_staleness_versions,
            over_age=buffer.over_age,
            exact_until=config.num_steps if buffer.exact_age else 0,
            learner_version=recovered.learner_version,
            ready=recovered.ready,
            leased=recovered.leased,
        )
        gate = Gate(
            groups_per_step=buffer.groups_per_step,
            max_staleness_versions=buffer.max_staleness_versions,
            num_steps=config.num_steps,
        )
        self._admission = Admission(
            gate,
            self._replay,
            max_attempts=config.generation.max_attempts,
            groups=[replace(group, issued_s=now_s) for group in recovered.open],
            next_group_id=recovered.next_group_id,
            next_index=recovered.next_index,
        )

    @property
    def learner_version(self) -> int:
        """The version that the learner committed last."""
        return self._replay.learner_version

    def check_leased(self, train_version: int, group_ids: Iterable[int]) -> None:
        """Raise ProtocolError unless all groups are of the leased batch of this version."""
        leased = {group.group_id for group in self._replay.leases.get(train_version, ())}
        unknown = sorted(set(group_ids) - leased)
        if unknown:
            raise ProtocolError(f"groups {unknown} are not leased for version {train_version}")

    @property
    def last_start(self) -> int:
        """The last version that the learner may start from."""
        return self._replay.last_start

    @property
    def open(self) -> Collection[OpenGroup]:
        """The admitted, unfinished groups."""
        return self._admission.open.values()

    def num_free(self, purpose: Purpose, now_s: float) -> int:
        """Tickets of this purpose that could be handed out now, at most."""
        return self.outage.num_allowed(
            self._admission.num_free(purpose),
            is_generating=bool(self._admission.generators()),
            now_s=now_s,
        )

    def num_of_generator(self, generator: str) -> int:
        """The number of groups that this generator works on."""
        return self._admission.num_of_generator(generator)

    def refusal(self, version: int, purposes: Collection[Purpose]) -> str:
        """Return why a generator at this version gets no ticket, or an empty string."""
        return self.outage.refusal or self._admission.refusal(version, purposes)

    def waiting_evaluation(self) -> int | None:
        """The version of the first evaluation group that waits for a generator."""
        return self._admission.waiting_evaluation()

    @property
    def is_evaluating(self) -> bool:
        """Return whether a generator works on an evaluation."""
        return any(
            group.purpose is Purpose.EVAL and group.state is GroupState.GENERATING
            for group in self.open
        )

    def queue(self) -> dict[str, int]:
        """The current number of training groups in each state."""
        num_generating = self._admission.num_generating
        return {
            "issued": self._admission.num_training - num_generating,
            "generating": num_generating,
            "ready": len(self._replay.ready),
            "leased": self._replay.num_leased,
        }
