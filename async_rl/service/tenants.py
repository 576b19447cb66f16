"""Training runs on one base model: each has an adapter with its own optimizer and gradients.

Invariants
- A pass computes and trains the adapter of one run; the numbers of a run do not depend on others.
- Gradients accumulate until a step, which clears them. A call that fails leaves nothing of itself.
- A directory with its final name is complete and on the disk, with the checksums of its files.
- Nothing that a file says is executed.
"""

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from async_rl.config.base import replace
from async_rl.config.generation import LoraAdapter
from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig
from async_rl.core.checksums import checksum, complete, damage, sums_of
from async_rl.core.errors import DataError
from async_rl.learner.loading import load_policy, recompute_activations
from async_rl.learner.models import Policy
from async_rl.learner.optimizer import Moments
from async_rl.service.forms import Adam, LoraConfig
from async_rl.weights.lora import (
    Adapter,
    adapter_weights,
    add_adapter,
    merged_weights,
    targets_of,
    write_peft,
)

_WHOLE = "model.safetensors"
_NUMBERS = "state.json"
_TENSORS = "state.safetensors"
_WEIGHTS = shutil.ignore_patterns(
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.index.json"
)


class Numbers(msgspec.Struct, kw_only=True):
    """What a run has besides tensors.

    lora: as it was created; base_sha256: of the files of the base model; version: changes of its
    weights.
    """

    lora: LoraConfig
    base_sha256: str
    version: int = 0


@contextlib.contextmanager
def written(directory: Path) -> Iterator[Path]:
    """Yield an empty directory, which gets this name once what the block has written is on the
    disk. It replaces a directory of that name. Raises DataError if it cannot be written.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(directory, ignore_errors=True)
        complete(partial, directory, sums_of(partial))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{directory.name} could not be written: {error}; free disk space or grant write"
            " permission, then save again"
        ) from error


def read_state(directory: Path, base_sha256: str) -> tuple[Numbers, dict[str, Tensor]]:
    """Return the numbers of a whole state, and its tensors as of `Tenant.tensors`. Raises DataError
    for a damaged one, and for one of another base model.
    """
    if problem := damage(directory):
        raise DataError(f"{directory.name} cannot be read: {problem}")
    try:
        numbers = msgspec.json.decode((directory / _NUMBERS).read_bytes(), type=Numbers)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{directory.name} is not a state of a training run: {error}") from error
    if numbers.base_sha256 != base_sha256:
        raise DataError(f"{directory.name} is of another base model")
    return numbers, load_file(directory / _TENSORS)


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


class Tenant:
    """One training run.

    numbers: saved with its tensors; loss, num_tokens: sums since the newest step.
    """

    def __init__(
        self, policy: Policy, run_id: str, numbers: Numbers, config: LoraAdapter | None
    ) -> None:
        """Add an adapter to the base model. config: the largest that the service serves; None = the
        weights of the model itself are trained. Raises DataError for an adapter without layers.
        """
        self._lm: Any = policy.lm
        self.run_id = run_id
        self.numbers = numbers
        if (config is None) != (numbers.lora.rank == 0):
            raise DataError(f"{numbers.lora} cannot be trained here; resume with other model.lora")
        self._scaling: float | None = None
        if config is not None:
            self._scaling = config.alpha / numbers.lora.rank
            self._add_adapter(config)
        named = (
            policy.lm.named_parameters() if config is None else adapter_weights(self._lm, run_id)
        )
        self.weights: dict[str, nn.Parameter] = dict(named)
        for parameter in self.weights.values():
            parameter.requires_grad_(True)
        self._parameters = list(self.weights.values())
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True)
        self.forget_moments()
        self.loss = 0.0
        self.num_tokens = 0

    def _add_adapter(self, config: LoraAdapter) -> None:
        lora = self.numbers.lora
        targets = targets_of(self._lm, attention=lora.train_attn, mlp=lora.train_mlp)
        if config.targets:
            targets = [name for name in targets if name in config.targets]
        if not targets:
            raise DataError("lora_config: set train_attn or train_mlp; nothing else can be trained")
        # Not at random: executed again, it has to be the same.
        seed = checksum(self.run_id) if lora.seed is None else lora.seed
        add_adapter(
            self._lm, replace(config, rank=lora.rank, targets=targets), self.run_id, seed=seed
        )
        self._lm.to(self._lm.device)

    def forget_moments(self) -> None:
        """Start the optimizer anew."""
        Moments(self._optimizer, self._parameters, is_offloaded=False)

    def forget_gradients(self) -> None:
        """Clear the gradients without a step."""
        self._optimizer.zero_grad()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add the gradients of the block to the earlier ones, or nothing if the block raises.

        Raises DataError if the sum is not finite.
        """
        earlier = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        try:
            yield
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if not torch.nn.utils.get_total_norm(gradients).isfinite():
                raise DataError("its gradient is not finite; the request has no effect")
        except BaseException:
            for parameter, gradient in zip(self._parameters, earlier, strict=True):
                parameter.grad = gradient
            raise

    def step(self, adam: Adam) -> float:
        """Step with the accumulated gradients, without any as with zeros, and return their norm."""
        for parameter in self._parameters:
            # Without a gradient AdamW would skip the parameter, but its moments must decay.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        most = adam.grad_clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, most))
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self._optimizer.step()
        self.forget_gradients()
        self.numbers.version += 1
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return the live weights, by their names in PEFT's files, and what the optimizer knows of
        them.
        """
        tensors: dict[str, Tensor] = dict(self.weights)
        for name, parameter in self.weights.items():
            state = self._optimizer.state[parameter]
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
        return tensors

    @torch.no_grad()
    def restore(
        self, numbers: Numbers, tensors: Mapping[str, Tensor], *, with_moments: bool
    ) -> None:
        """Take over the tensors of a state; without moments the optimizer starts anew. Raises
        DataError before any change if they have other shapes.
        """
        own = self.tensors()
        if {n: x.shape for n, x in own.items()} != {n: x.shape for n, x in tensors.items()}:
            raise DataError(
                f"the checkpoint has {numbers.lora}, and this run {self.numbers.lora}; load it as a"
                " new run"
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        if not with_moments:
            self.forget_moments()

    def write_state(self, directory: Path) -> None:
        """Write weights, moments and numbers."""
        (directory / _NUMBERS).write_bytes(msgspec.json.encode(self.numbers))
        save_file(self.tensors(), directory / _TENSORS)

    def write_weights(self, directory: Path) -> None:
        """Write the adapter as PEFT's files, or all weights as one file."""
        if self._scaling is None:
            save_file({n: x.detach() for n, x in self.weights.items()}, directory / _WHOLE)
            return
        content = Adapter(tensors=self.weights, scaling=self._scaling).to_bytes()
        facts = {"task_type": "CAUSAL_LM", "base_model_name_or_path": self._lm.name_or_path}
        write_peft(directory, content, self._scaling, **facts)

    def export(self, directory: Path) -> None:
        """Write base and adapter together as a Hugging Face model directory."""
        # Tokenizer and licence; the configuration is then written anew.
        shutil.copytree(self._lm.name_or_path, directory, ignore=_WEIGHTS, dirs_exist_ok=True)
        dtype = self._lm.dtype
        merged = merged_weights(self._lm, self.run_id)
        state = {name: x.detach().to("cpu", dtype).contiguous() for name, x in merged}
        self._lm.save_pretrained(directory, state_dict=state)
