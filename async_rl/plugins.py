"""The types of plug-ins: functions of yours that a setting names, without a change of this package.

A setting takes `package.module:function`, `/path/to/file.py:function`, or the name of an entry
point in the group of its kind. The name is checked before a run starts: it must exist and its
parameters must accept the arguments below. Every process of the run imports it, so the package must
be installed on every machine.

| kind | setting | group of entry points |
|---|---|---|
| RewardFunction | reward.fn, reward.fns, reward.by_source | async_rl.rewards |
| RolloutFunction | rollout.fn | async_rl.rollouts |
| EngineOpener | generation.engine | async_rl.engines |
| DataSource | data.train_files, data.val_files | async_rl.data_sources |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from async_rl.config.run import RunConfig
    from async_rl.generation.engine import OpenEngine
    from async_rl.rewards.verifier.protocol import RewardSample
    from async_rl.rollouts.conversation import Conversation


class RewardFunction(Protocol):
    """Scores one sample; plain or async; runs in a process of the verifiers."""

    def __call__(self, sample: RewardSample, /) -> Any:
        """Return a finite number, or a dict of named parts whose "score", or else sum, is the
        reward. An exception is a failure of the attempt, never a reward.
        """


class RolloutFunction(Protocol):
    """Conducts the turns of one sample; an async function; runs in the generators."""

    async def __call__(self, talk: Conversation, /) -> str | None:
        """Return the text that is scored, or None for the policy's last text."""


class EngineOpener(Protocol):
    """Prepares a generation engine; runs once in each generator and may take seconds."""

    def __call__(self, config: RunConfig, model_path: Path, /, *, seed: int) -> OpenEngine:
        """Return the async function that starts the engine, an async_rl.generation.engine.Engine.

        model_path: a Hugging Face model directory. seed: differs between generators. Raises
        ConfigError if the engine refuses the settings or the model.
        """


class DataSource(Protocol):
    """Provides the rows of a data set in place of a file; runs in the buffer and in commands."""

    def __call__(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows as dicts with the columns of docs/data.md.

        Every call must return the same rows in the same order: a resumed run finds its prompts by
        their number.
        """
