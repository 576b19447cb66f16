"""Training runs on one base model: each has an adapter with its own optimizer and gradients.

Invariants
- A pass computes and trains the adapter of one run; the numbers of a run do not depend on others.
- Gradients accumulate until a step, which clears them. A call that fails leaves nothing of itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from async_rl.config.base import replace
from async_rl.config.generation import LoraAdapter
from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError
from async_rl.learner.loading import load_policy, recompute_activations
from async_rl.learner.models import Policy
from async_rl.learner.optimizer import MOMENTS, Moments
from async_rl.service.forms import Adam
from async_rl.weights.adapters import Adapter
from async_rl.weights.lora import (
    adapter_weights,
    add_adapter,
    merged_weights,
    remove_adapter,
    targets_of,
    use_adapter,
)


class AdapterShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a run's adapter, and its rank."""

    rank: int
    targets: list[str]


def load_base(config: RunConfig, path: Path, device: torch.device) -> Policy:
    """Load the base model, in the type of its computation. Raises ConfigError as `load_policy`."""
    import_external(config.model)
    policy = load_policy(path, trust_remote_code=config.model.trust_remote_code)
    if config.learner.gradient_checkpointing:
        recompute_activations(policy.lm)
    policy.to(device)
    for parameter in policy.lm.parameters():
        # Not the buffers, such as the frequencies of positions, which need all their bits.
        parameter.data = parameter.data.to(getattr(torch, config.model.dtype))
    return policy.requires_grad_(False)


def shape_of(
    lm: Any, config: LoraAdapter, *, rank: int, attention: bool, mlp: bool
) -> AdapterShape:
    """Return the shape of a new adapter. config: the largest that the service serves. Raises
    DataError for another one.
    """
    if not 0 < rank <= config.rank:
        raise DataError(
            f"lora_config.rank={rank}: this service trains adapters of rank 1 to {config.rank}"
            " (model.lora.rank)"
        )
    targets = targets_of(lm, attention=attention, mlp=mlp)
    if config.targets:
        targets = [name for name in targets if name in config.targets]
    if not targets:
        raise DataError("lora_config: set train_attn or train_mlp; nothing else can be trained")
    return AdapterShape(rank=rank, targets=targets)


class Tenant:
    """One training run.

    seq_id: of the newest request that changed it; version: changes of its weights; answer: to the
    request seq_id; unsaved_s: seconds of work since the newest saved state; loss, num_tokens: sums
    since the newest step.
    """

    def __init__(
        self, policy: Policy, run_id: str, shape: AdapterShape, config: LoraAdapter, *, seed: int
    ) -> None:
        """Add an adapter to the base model. config: as for `shape_of`."""
        self._lm: Any = policy.lm
        self.run_id = run_id
        self.shape = shape
        self._scaling = config.alpha / shape.rank
        device = next(policy.lm.parameters()).device
        wanted = replace(config, rank=shape.rank, targets=shape.targets)
        add_adapter(self._lm, wanted, run_id, seed=seed)
        self.weights: dict[str, nn.Parameter] = dict(adapter_weights(self._lm, run_id))
        for parameter in self.weights.values():
            parameter.data = parameter.data.to(device)
            parameter.requires_grad_()
        self._parameters = list(self.weights.values())
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True)
        self.forget_moments()
        self.seq_id = -1
        self.version = 0
        self.answer = b""
        self.unsaved_s = 0.0
        self.loss = 0.0
        self.num_tokens = 0

    def forget_moments(self) -> None:
        """Start the optimizer anew."""
        Moments(self._optimizer, self._parameters, is_offloaded=False)

    @property
    def has_gradients(self) -> bool:
        """Return whether a request after the newest step has left gradients."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def forget_gradients(self) -> None:
        """Clear the gradients without a step."""
        self._optimizer.zero_grad(set_to_none=True)

    def use(self) -> None:
        """Let the next passes compute this run."""
        use_adapter(self._lm, self.run_id)

    def close(self) -> None:
        """Free the memory of the run."""
        remove_adapter(self._lm, self.run_id)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add the gradients of the block to the earlier ones, or nothing if the block raises.

        Raises DataError if they are not finite.
        """
        earlier = [parameter.grad for parameter in self._parameters]
        self.forget_gradients()
        try:
            yield
            if not math.isfinite(self._gradient_norm()):
                raise DataError("its gradient is not finite; the request has no effect")
            for parameter, grad in zip(self._parameters, earlier, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else grad + parameter.grad
        except BaseException:
            for parameter, grad in zip(self._parameters, earlier, strict=True):
                parameter.grad = grad
            raise

    def _gradient_norm(self) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def step(self, adam: Adam) -> float:
        """Step with the accumulated gradients, without any as with zeros, and return their norm.

        Raises DataError before any change.
        """
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            raise DataError(
                "the sum of the gradients is not finite; nothing was changed. Scale the losses down"
            )
        for parameter in self._parameters:
            # Without a gradient AdamW would skip the parameter, but its moments must decay.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if adam.grad_clip_norm > 0:
            total = torch.tensor(norm)
            torch.nn.utils.clip_grads_with_norm_(self._parameters, adam.grad_clip_norm, total)
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self._optimizer.step()
        self.forget_gradients()
        self.version += 1
        return norm

    def tensors(self, *, with_moments: bool) -> dict[str, Tensor]:
        """Return the live weights, by their names in PEFT's files, and the moments."""
        tensors: dict[str, Tensor] = dict(self.weights)
        if with_moments:
            for name, parameter in self.weights.items():
                state = self._optimizer.state[parameter]
                tensors |= {f"{name}.{moment}": state[moment] for moment in MOMENTS}
        return tensors

    @property
    def num_steps(self) -> int:
        """Steps that the moments have seen."""
        return int(self._optimizer.state[self._parameters[0]]["step"])

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(steps)

    def adapter(self) -> Adapter:
        """Copy the adapter to main memory."""
        tensors = {name: x.detach().cpu().contiguous() for name, x in self.weights.items()}
        return Adapter(tensors=tensors, scaling=self._scaling)

    def export(self, directory: Path) -> None:
        """Write base and adapter together as a Hugging Face model directory, without tokenizer."""
        dtype = self._lm.dtype
        merged = merged_weights(self._lm, self.run_id)
        state = {name: x.detach().to("cpu", dtype).contiguous() for name, x in merged}
        self._lm.save_pretrained(directory, state_dict=state)
