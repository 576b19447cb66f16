"""The changes of the buffer's state, as values with the SQL that records them: `BufferState`
decides them, the store executes their SQL in one transaction, in the order of the decisions.

In the SQL `:name` is a field of the change, a list as JSON, and `:now_s` the Unix time. The SQL
becomes a trigger (store/writer.py). Each change of a group's state adds a row to `transitions`.
Tables in store/schema.py.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from async_rl.buffer.groups import OpenGroup
from async_rl.core.calls import AgentCall
from async_rl.core.checksums import checksum
from async_rl.core.frozen import Value
from async_rl.core.heads import PackedGroup, means_by_name
from async_rl.core.types import NO_VERSION

_ONE = "= :group_id"
# A list is one parameter: the statement is the same for any number of groups, so SQLite keeps it
# compiled, and no limit of parameters applies.
_ALL = "IN (SELECT value FROM json_each(:group_ids))"


def _update(groups: str, values: str) -> str:
    return f"UPDATE groups SET {values}, changed_s=:now_s WHERE group_id {groups}"


def _note(groups: str, *, version: str = ":version", reason: str = "''") -> str:
    # From the row that was just changed, so that history and row cannot disagree.
    return (
        "INSERT INTO transitions (group_id, attempt, state, at_s, generator, version, reason)"
        f" SELECT group_id, attempt, state, :now_s, generator, {version}, {reason} FROM groups"
        f" WHERE group_id {groups} ORDER BY group_id"
    )


def _make_ready(groups: str, reason: str) -> tuple[str, str]:
    """The SQL by which leased or trained groups are ready again."""
    return (
        _update(groups, "state='ready', reason='', message=''"),
        _note(groups, reason=reason),
    )


def storable(text: str) -> str:
    """Return the text as the store keeps it: with a replacement character for each NUL."""
    return text.replace("\0", "\ufffd")


class Change(Value):
    """Base of all changes."""

    statements: ClassVar[tuple[str, ...]]

    @property
    def row(self) -> Value:
        """The fields that the SQL names."""
        return self


class Admitted(Change):
    """A new group, in the state that it has. num_samples: trajectories of a complete group."""

    statements = (
        # Each epoch issues a prompt again, and its row is the same. Not OR IGNORE, which the
        # statement that fires a trigger overrides.
        "INSERT INTO prompts VALUES (:prompt_id, :group.purpose, :data_source, :text, :checksum)"
        " ON CONFLICT DO NOTHING",
        "INSERT INTO groups (group_id, purpose, prompt_id, position, evaluation, num_samples,"
        " state, attempt, generator, incarnation, version, admitted_s, changed_s) VALUES"
        " (:group.group_id, :group.purpose, :prompt_id, :group.index,"
        f" nullif(:group.evaluation, {NO_VERSION}), :num_samples, :group.state, :group.attempt,"
        " :group.generator, :group.incarnation, :group.version, :now_s, :now_s)",
        _note("= :group.group_id", version=":group.version"),
    )
    group: OpenGroup
    prompt_id: str
    data_source: str
    # People read the text of a prompt in the ledger after the data file has changed.
    text: str
    checksum: int
    num_samples: int


class HandedOut(Change):
    """A generator received the ticket of a group that had waited."""

    statements = (
        _update(
            "= :group.group_id",
            "state='generating', attempt=:group.attempt, generator=:group.generator,"
            " incarnation=:group.incarnation, version=:group.version",
        ),
        _note("= :group.group_id", version=":group.version"),
    )
    group: OpenGroup


class Returned(Change):
    """An attempt has no result; the group waits for its next attempt."""

    statements = (
        _update(_ONE, "state='issued', reason=:reason, message=:message"),
        _note(_ONE, version="NULL", reason=":reason"),
    )
    group_id: int
    reason: str
    message: str


class Dropped(Change):
    """The group will not be trained; its trajectories, if any, are deleted."""

    statements = (
        _update(_ONE, "state='dropped', reason=:reason, message=:message"),
        _note(_ONE, version="NULL", reason=":reason"),
        f"DELETE FROM blobs WHERE group_id {_ONE}",
    )
    group_id: int
    reason: str
    message: str


class Facts(Value):
    """What a complete group adds to its row. Versions are of the trained tokens, NO_VERSION without
    any. pass_rate: share of samples that passed every test. parts: the mean of each part of the
    reward. calls: of each sample, empty without agents.
    """

    group_id: int
    oldest_version: int
    newest_version: int
    num_tokens: int
    num_trained_tokens: int
    reward_mean: float
    pass_rate: float
    response_length_mean: float
    truncated_share: float
    generation_s: float
    rewards: Sequence[float]
    parts: Mapping[str, float]
    calls: Sequence[Sequence[AgentCall]]


class Completed(Change):
    """All samples of the group arrived. In the SQL `:name` is a field of the facts. payload: the
    group, encoded; checksum: of it and the group's id; times: moments of its samples (schema.py).
    """

    statements = (
        _update(
            _ONE,
            "state='ready', oldest_version=:oldest_version, newest_version=:newest_version,"
            " num_tokens=:num_tokens, num_trained_tokens=:num_trained_tokens,"
            " reward_mean=:reward_mean, pass_rate=:pass_rate,"
            " response_length_mean=:response_length_mean, truncated_share=:truncated_share,"
            " generation_s=:generation_s, times=:times, rewards=:rewards, parts=:parts,"
            " calls=:calls",
        ),
        _note(_ONE, version=":oldest_version"),
    )
    facts: Facts
    group: PackedGroup
    payload: memoryview
    checksum: int
    times: bytes

    @property
    def row(self) -> Facts:
        """As `Change.row`."""
        return self.facts


class LifeBegan(Change):
    """A life of the learner started at `version`."""

    statements = ("INSERT INTO lives VALUES (:life, :incarnation, :version, :now_s)",)
    life: int
    incarnation: str
    version: int


class Leased(Change):
    """These groups are the batch for `train_version`."""

    statements = (
        _update(_ALL, "state='leased', train_version=:train_version"),
        _note(_ALL, version=":train_version"),
    )
    train_version: int
    group_ids: Sequence[int]


class Trained(Change):
    """Step `version` trained these groups, and the reused ones once more."""

    statements = (
        # A new row each time: a step that is trained again after it was undone has two rows.
        "INSERT INTO steps (version, committed_s) VALUES (:version, :now_s)",
        _update(_ALL, "state='trained', reason='', message=''"),
        # After the step's row, which it refers to.
        "INSERT INTO trained (step_id, group_id) SELECT step_id, value FROM steps,"
        " json_each(:group_ids) WHERE version=:version AND undone_s IS NULL",
        "INSERT INTO reused (step_id, group_id) SELECT step_id, value FROM steps,"
        " json_each(:reused) WHERE version=:version AND undone_s IS NULL",
        _note(_ALL),
    )
    version: int
    group_ids: Sequence[int]
    reused: Sequence[int]


class Undone(Change):
    """The learner started at `version` again: later steps are undone, these groups are ready."""

    statements = (
        "UPDATE steps SET undone_s=:now_s WHERE version>:version AND undone_s IS NULL",
        # Later versions will be other weights, so their evaluations do not count.
        "UPDATE groups SET evaluation=NULL WHERE evaluation>:version",
        "DELETE FROM evaluations WHERE version>:version",
        "UPDATE groups SET version=:version WHERE state IN ('issued', 'generating') AND"
        " version>:version",
        *_make_ready(_ALL, "'learner started at version ' || :version"),
    )
    version: int
    group_ids: Sequence[int]


class BatchDropped(Change):
    """The learner at `version` cannot train these groups; the groups of later leases are ready."""

    statements = (
        _update(_ALL, "state='dropped', reason='untrainable', message=:message"),
        f"DELETE FROM blobs WHERE group_id {_ALL}",
        _note(_ALL, reason="'untrainable'"),
        *_make_ready(
            "IN (SELECT value FROM json_each(:returned))", "'the batch before it was dropped'"
        ),
    )
    version: int
    group_ids: Sequence[int]
    message: str
    returned: Sequence[int]


class EvaluationStarted(Change):
    """Version `version` is evaluated on this number of prompts."""

    statements = ("INSERT INTO evaluations VALUES (:version, :num_prompts, :now_s, NULL, NULL)",)
    version: int
    num_prompts: int


class PromptsLeft(Change):
    """These training prompts are not issued from this position on. leavers: the id of each, its
    index among the training prompts and its mean reward.
    """

    statements = (
        "INSERT INTO left_prompts SELECT value->>0, value->>1, :position, value->>2, :now_s FROM"
        " json_each(:leavers)",
    )
    position: int
    leavers: Sequence[tuple[str, int, float]]


class PromptsChosen(Change):
    """The training prompts from this position on are these rows of the run's prompts."""

    statements = ("INSERT INTO chosen_prompts SELECT :position + key, value FROM json_each(:rows)",)
    position: int
    rows: Sequence[int]


def facts_of(group: PackedGroup) -> Facts:
    """Return the facts about a complete group that passed `checks.check_group`."""
    samples = group.samples
    # Masked tokens, such as replies of tools, do not age a group: they have no gradient.
    trained = [run for sample in samples for run in sample.runs if run[2]]
    versions = [version for _, version, _ in trained]
    num_written = sum([sample.response_length for sample in samples])
    rewards = [sample.score.reward for sample in samples]
    # Lists and not generators, which take several times as long for a few samples.
    return Facts(
        group_id=group.group_id,
        oldest_version=min(versions, default=NO_VERSION),
        newest_version=max(versions, default=NO_VERSION),
        num_tokens=num_written + len(samples) * group.prompt_length,
        num_trained_tokens=sum([length for length, _, _ in trained]),
        reward_mean=statistics.fmean(rewards),
        pass_rate=sum([s.score.is_passed for s in samples]) / len(samples),
        response_length_mean=num_written / len(samples),
        truncated_share=sum([s.is_truncated for s in samples]) / len(samples),
        generation_s=group.generation_s,
        rewards=rewards,
        parts=means_by_name(sample.score.parts for sample in samples),
        calls=[sample.calls for sample in samples if sample.calls],
    )


def completed(group: PackedGroup, payload: memoryview) -> Completed:
    """Return the change by which a group that passed `checks.check_group` is complete."""
    samples = group.samples
    times = b""
    if all(sample.clock for sample in samples):
        rows = [(sample.response_length, *sample.clock) for sample in samples]
        # float32 of seconds since the start of the group: precise to some microseconds.
        times = np.array(rows, "<f4").tobytes()
    return Completed(
        facts=facts_of(group),
        group=group,
        payload=payload,
        # In the event loop: zlib releases Python's lock, for which the writer's thread would wait.
        checksum=checksum(payload, group.group_id),
        times=times,
    )
