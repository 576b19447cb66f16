"""AdamW for one model: schedule, global clipping, no step on values that are not finite.

Moments may be in page-locked host memory between steps, because copies from and to it do not block.

Invariant: after an exception neither parameters nor moments have changed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from async_rl.config.base import replace
from async_rl.config.learner import MOMENTS_PIECE_BYTES, OptimizerConfig
from async_rl.config.plugins import GRADIENT, load_once
from async_rl.config.policy_losses import EffectiveStepScale, PluginStepScale, StepScale
from async_rl.config.run import RunConfig
from async_rl.core.errors import NonFiniteError
from async_rl.core.sequences import divided
from async_rl.learner.host_memory import Owned
from async_rl.learner.models import LearnerModels
from async_rl.learner.sharding import full_tensor, local, reshard

MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENT_BYTES = 8  # two float32 values for each parameter


class Moments:
    """The moments of one optimizer's parameters.

    They are zeros from the start, so that a checkpoint is read to where they are: offloaded
    moments are never allocated on the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        *,
        is_offloaded: bool,
    ) -> None:
        self._states = optimizer.state
        self._is_offloaded = is_offloaded
        self._device = local(parameters[0]).device
        sized = ((p, _MOMENT_BYTES * local(p).numel()) for p in parameters)
        pieces = list(divided(sized, MOMENTS_PIECE_BYTES))
        self._pieces = pieces if is_offloaded else [list(parameters)]
        where: dict[str, Any] = {}
        if is_offloaded:
            where = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        for parameter in parameters:
            homes = {name: torch.zeros_like(parameter, **where) for name in MOMENTS}
            # AdamW counts the steps on the device.
            self._states[parameter] = {"step": torch.zeros((), device=parameter.device), **homes}

    def pieces(self) -> Iterator[list[nn.Parameter]]:
        """Yield lists of parameters whose moments are on the device until the next list is
        requested.

        The changes of a step are in host memory when the iterator is exhausted.
        """
        if not self._is_offloaded:
            yield from self._pieces
            return
        for piece in self._pieces:
            homes = [
                (self._states[p], name, self._states[p][name]) for p in piece for name in MOMENTS
            ]
            # In the order of the current stream: a copy to the host follows the step before it.
            for state, name, home in homes:
                state[name] = home.to(self._device, non_blocking=True)
            yield piece
            for state, name, home in homes:
                state[name] = home.copy_(state[name], non_blocking=True)
        module: Any = torch.get_device_module(self._device)
        module.synchronize()

    def on_device(self) -> Iterator[Owned]:
        """Yield the moments that are not offloaded."""
        if not self._is_offloaded:
            for parameter, state in self._states.items():
                yield from (Owned(parameter, state, name) for name in MOMENTS)


class Applied(NamedTuple):
    """One optimizer step: the norm of the gradient, and the factor that `StepScale` gave it."""

    norm: float
    scale: float


class ModelOptimizer:
    """Steps one model. Matrices have weight decay, vectors (norms, biases) have none."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        parameters: Iterable[nn.Parameter],
        num_steps: int,
        is_offloaded: bool,
        rule: StepScale | None = None,
    ) -> None:
        """Create the optimizer of some parameters of a model.

        name: for error messages; model: the sharded root module; parameters: those to train;
        is_offloaded: the moments are in host memory between steps; rule: what shortens a step.
        """
        self._name = name
        self._model = model
        self._rule = rule
        self._config = config
        self._num_steps = num_steps
        self._lr = config.lr
        self.num_updates = 0
        self._parameters = [p for p in parameters if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.torch_optimizer = torch.optim.AdamW(
            # fused: one kernel per piece; the loop over parameters would dominate on a GPU.
            groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.moments = Moments(self.torch_optimizer, self._parameters, is_offloaded=is_offloaded)

    def set_step(self, step: int) -> float:
        """Set and return the learning rate of learner step `step` (0 is the first)."""
        self._lr = learning_rate(step, self._config, num_steps=self._num_steps)
        self._scale_rate(1.0)
        return self._lr

    def _scale_rate(self, factor: float) -> None:
        for group in self.torch_optimizer.param_groups:
            group["lr"] = factor * self._lr

    def apply(self, loss: float, *, effective_share: float = 1.0) -> Applied:
        """Clip the gradients, step, and clear the gradients.

        loss: the minibatch's loss over all ranks; effective_share: of its sequences.  Raises
        NonFiniteError before any change, on every rank alike.
        """
        for parameter in self._parameters:
            # Without a gradient AdamW would skip the parameter, but its moments must decay.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = changed = self._gradient_norm()
        if isinstance(self._rule, PluginStepScale):
            load_once("algorithm.step_scale.fn", self._rule.fn, GRADIENT)(self._pieces)
            changed = self._gradient_norm()
        norm_value = float(norm)
        changed_value = float(changed)
        if not all(map(math.isfinite, (loss, norm_value, changed_value))):
            self.torch_optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(
                f"{self._name}: loss {loss}, gradient norm {changed_value}; no parameter was"
                " changed."
                " Look at the batch's log-probs and rewards; a lower learning rate or a lower"
                " grad_clip may prevent it"
            )
        scale = changed_value / norm_value if norm_value else 1.0
        if isinstance(self._rule, EffectiveStepScale):
            # As in VCPO (arXiv 2602.17616): the step of AdamW-style optimizers grows with the
            # square root of the batch. Rounding may raise the share of equal weights above 1.
            scale = min(1.0, effective_share) ** 0.5
            self._scale_rate(scale)
        # Read once: on a GPU a comparison for each piece would wait for its arrival.
        is_clipped = bool(changed > self._config.grad_clip)
        # Gathered copies have the values from before the step, and their memory is needed.
        reshard(self._model)
        # AdamW steps every parameter with a gradient, so each piece gets its gradients in turn.
        waiting = {parameter: parameter.grad for parameter in self._parameters}
        self.torch_optimizer.zero_grad(set_to_none=True)
        for parameters in self.moments.pieces():
            # AdamW passes over parameters without a gradient.
            for parameter in parameters:
                parameter.grad = waiting.pop(parameter)
            if is_clipped:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._config.grad_clip, changed)
            self.torch_optimizer.step()
            self.torch_optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        return Applied(norm_value, scale)

    def _gradient_norm(self) -> Tensor:
        """Return the global norm of the gradients of all shards (collective): float32 []."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return full_tensor(torch.nn.utils.get_total_norm(gradients))

    def _pieces(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield all gradients and first moments, some at a time."""
        states = self.torch_optimizer.state
        for parameters in self.moments.pieces():
            gradients = [p.grad for p in parameters if p.grad is not None]
            yield gradients, [states[p]["exp_avg"] for p in parameters]

    def discard(self) -> None:
        """Clear the gradients without a step."""
        self.torch_optimizer.zero_grad(set_to_none=True)
        reshard(self._model)


Trained = dict[str, tuple[nn.Module, ModelOptimizer]]
"""The trained modules and their optimizers, by their names in checkpoints and errors."""


def model_optimizers(config: RunConfig, models: LearnerModels) -> Trained:
    """Create the optimizers of "policy" and, if there are values, "critic"."""
    critic_config = config.algorithm.critic
    policy = models.policy
    optimizer_config = config.learner.optimizer
    is_offloaded = config.learner.offload == "optimizer"
    num_warmup = 0 if critic_config is None else critic_config.warmup_steps
    of_policy = ModelOptimizer(
        "policy",
        policy,
        optimizer_config,
        parameters=policy.lm.parameters(),
        # The policy's schedule starts after the critic's warm-up, but also finishes with the run.
        num_steps=config.num_steps - num_warmup,
        is_offloaded=is_offloaded,
        rule=config.algorithm.step_scale,
    )
    trained: Trained = {"policy": (policy, of_policy)}
    # On a shared backbone the critic's optimizer trains the head alone.
    module = models.critic or policy.value_head
    if critic_config is None or module is None:
        return trained
    span = optimizer_config.schedule_span
    settings = replace(
        optimizer_config,
        lr=critic_config.lr,
        schedule=critic_config.schedule,
        # The policy's steps start after the critic's warm-up, so the same end is a later step.
        schedule_span=[*span[:1], *(end + num_warmup for end in span[1:])],
    )
    of_critic = ModelOptimizer(
        "critic",
        models.critic or policy,
        settings,
        parameters=module.parameters(),
        num_steps=config.num_steps,
        is_offloaded=is_offloaded,
    )
    return {**trained, "critic": (module, of_critic)}


def learning_rate(step: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Return the learning rate of step 0, 1, ...

    Linear warm-up from lr / warmup_steps at step 0 to lr at step warmup_steps - 1.  Then either lr
    ("constant"), or a cosine from lr at the first step of schedule_span to min_lr_ratio * lr at its
    last, which stays there (arXiv 1608.03983 eq. 5, one period).  Without a span it is from the end
    of the warm-up to num_steps.
    """
    lr = config.lr
    # (step + 1): a first step with rate 0 would train nothing.
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return lr
    begin, end = config.schedule_span or (config.warmup_steps, num_steps)
    passed = min(1.0, max(0.0, (step - begin) / max(1.0, end - begin)))
    cosine = math.cos(math.pi * passed)
    least = config.min_lr_ratio
    return lr * (least + (1 - least) * 0.5 * (1 + cosine))
