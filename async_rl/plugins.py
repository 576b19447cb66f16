"""The types of plug-ins: functions of yours that a setting names, without a change of this package.

A setting takes `package.module:function`, `/path/to/file.py:function`, or the name of an entry
point in the group of its kind. The name is checked before a run starts: it must exist and its
parameters must accept the arguments below. Every process of the run imports it, so the package must
be installed on every machine.

| kind | setting | group of entry points |
|---|---|---|
| RewardFunction | reward.terms.NAME | async_rl.rewards |
| RolloutFunction | rollout.fn | async_rl.rollouts |
| EngineOpener | generation.engine | async_rl.engines |
| PolicyLossFunction | algorithm.policy_loss.fn | async_rl.policy_losses |
| AdvantageFunction | algorithm.advantage.fn | async_rl.advantages |
| CorrectionFunction | algorithm.policy_loss.correction.fn | async_rl.corrections |
| GradientFunction | algorithm.step_scale.fn | async_rl.gradients |
| SelectionFunction | data.order | async_rl.selections |
| DataSource | data.train_files, data.val_files | async_rl.data_sources |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from async_rl.algorithms.losses import BehaviorWeights, PolicyLoss
    from async_rl.algorithms.parts import Parts
    from async_rl.buffer.policies import Choice
    from async_rl.config.run import RunConfig
    from async_rl.generation.engine import OpenEngine
    from async_rl.rewards.verifier.protocol import RewardSample
    from async_rl.rollouts.conversation import Conversation


class RewardFunction(Protocol):
    """Scores one sample; plain or async; runs in a process of the verifiers."""

    def __call__(self, sample: RewardSample, /) -> Any:
        """Return a finite number, or a dict of named parts whose "score", or else sum, is the
        reward, in the unit of reward.pass_reward. A call may take timeouts.group_s / 12. An
        exception is a failure of the attempt (RewardError), never a reward.
        """


class RolloutFunction(Protocol):
    """Conducts the turns of one sample; an async function; runs in the generators."""

    async def __call__(self, talk: Conversation, /) -> str | None:
        """Return the text that is scored, or None for the policy's last text. An exception fails
        the attempt of the group, which is then repeated; RolloutEnded must not be caught.
        """


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


class SelectionFunction(Protocol):
    """Selects the prompts of each batch; runs in the buffer, which waits for its result."""

    def __call__(self, choice: Choice, /) -> Sequence[int]:
        """Return `choice.count` rows, which need not be candidates. The result must depend on
        nothing but the choice, or a resumed run would choose other prompts. An exception ends the
        run.
        """


class PolicyLossFunction(Protocol):
    """The loss of each token; runs in the learner, in every pass of every update."""

    def __call__(
        self, log_ratio: Tensor, /, *, advantages: Tensor, behavior_weight: Tensor, sequences: Parts
    ) -> PolicyLoss:
        """Return the loss of R tokens as it is minimised, float32 [R], and the bounded tokens.

        log_ratio: float32 [R], log-probs of the policy (with gradient) minus those of the proximal
        policy, in nats. advantages, behavior_weight: float32 [R], without gradient. sequences: the
        sequence of each token; its mask is the trained tokens. A function with a parameter
        policy_logprobs (with gradient) or behavior_logprobs receives these too: float32 [R]. A loss
        must not depend on other sequences, or it would depend on the packing. An exception ends the
        run; a loss that is not finite drops the batch.
        """


class AdvantageFunction(Protocol):
    """The advantages of a batch; runs in every rank of the learner, on the same whole batch."""

    def __call__(self, rewards: Tensor, /, *, groups: Parts) -> Tensor:
        """Return the advantage of each of B responses: float32 [B] -> float32 [B].

        rewards: after scaling and with the KL subtracted if the reward has one, in units of reward.
        groups: the group of each response; its mask excludes truncated responses that are not
        trained. An exception ends the run.
        """


class CorrectionFunction(Protocol):
    """The behavior weights of a batch; runs in every rank of the learner, once per step."""

    def __call__(self, log_ratio: Tensor, /, *, sequences: Parts) -> BehaviorWeights:
        """Return the weights of R tokens, without gradient.

        log_ratio: float32 [R], log-probs of the proximal minus those of the behavior policy, in
        nats, of the tokens that this rank has. sequences: as for a policy loss. `sequences.sums`
        and `sequences.across` add up the tokens of all ranks, so a weight may depend on the whole
        batch. An exception ends the run.
        """


class GradientFunction(Protocol):
    """Changes the gradient of the policy before it is clipped; runs in every rank of the learner,
    once per update.
    """

    def __call__(self, pieces: Callable[[], Iterator[tuple[list[Tensor], list[Tensor]]]], /) -> Any:
        """Change the gradients in place; the result is ignored.

        pieces: every call yields all gradients with AdamW's first moments of the same parameters, a
        piece at a time, because offloaded moments do not fit on the device together. The tensors
        are shards of this rank (DTensor); the moments are zeros before the first step and must not
        be changed. A gradient that is not finite afterwards drops the batch; an exception ends the
        run.
        """
