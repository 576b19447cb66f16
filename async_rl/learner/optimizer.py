"""AdamW of one model: schedule, global clipping, and the refusal to step on anything that is not
finite.

Invariant: after an exception neither parameters nor moments have changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from async_rl.algorithms.schedule import learning_rate
from async_rl.config.learner import OptimizerConfig
from async_rl.core.errors import NonFiniteError
from async_rl.learner.sharding import gradient_norm, reshard


class ModelOptimizer:
    """Steps one model. `name` is how errors call it. Matrices decay, vectors (norms, biases) do
    not.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        parameters: Iterable[nn.Parameter],
        num_steps: int,
        is_offloaded: bool,
    ) -> None:
        """parameters: those of the model that it trains; is_offloaded: the moments wait in host
        memory between steps.
        """
        self._name = name
        self._model = model
        self._is_offloaded = is_offloaded
        self._config = config
        self._num_steps = num_steps
        self._parameters = [p for p in parameters if p.requires_grad]
        groups = [
            {
                "params": [p for p in self._parameters if p.ndim >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.torch_optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def set_step(self, step: int) -> float:
        """Sets and returns the learning rate of learner step `step` (0 is the first)."""
        lr = learning_rate(
            step,
            lr=self._config.lr,
            warmup_steps=self._config.warmup_steps,
            num_steps=self._num_steps,
            schedule=self._config.schedule,
            min_lr_ratio=self._config.min_lr_ratio,
        )
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        return lr

    def apply(self, loss: float) -> float:
        """Clips, steps and clears the gradients; returns their norm before clipping.

        loss: the minibatch's loss over all ranks.  Raises NonFiniteError before anything is
        changed, on every rank alike.
        """
        for parameter in self._parameters:
            if parameter.grad is None:  # no pass had a gradient: the moments must fade all the same
                parameter.grad = torch.zeros_like(parameter)
        norm = gradient_norm(self._parameters)
        norm_value = float(norm)
        if not (math.isfinite(loss) and math.isfinite(norm_value)):
            self.torch_optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(
                f"{self._name}: loss {loss}, gradient norm {norm_value}; nothing was changed. Look"
                " at the batch's log-probs and rewards; a lower learning rate or a tighter"
                " grad_clip may prevent it"
            )
        if norm_value > self._config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.grad_clip, norm)
        if self._is_offloaded:
            self.move_moments(self._parameters[0].device)
        self.torch_optimizer.step()
        self.torch_optimizer.zero_grad(set_to_none=True)
        if self._is_offloaded:
            self.move_moments(torch.device("cpu"))
        reshard(self._model)
        return norm_value

    def discard(self) -> None:
        """Forgets the gradients: nothing is trained."""
        self.torch_optimizer.zero_grad(set_to_none=True)
        reshard(self._model)

    def move_moments(self, device: torch.device) -> None:
        """AdamW's moments, to where their next use is, or where they wait for it."""
        for state in self.torch_optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(device)
