"""The learner's engine: one object that turns groups into a better policy and tells, in numbers,
how.

`Trainer` owns actor, critic, reference and their optimizers; the step itself is in `update.py`.
Invariants
- SPMD: every rank makes the same calls with the same arguments; results are complete on rank 0 and,
  but for weights, on all ranks.
- Version k is the policy after k steps; `step(groups, version)` turns version into version + 1.
- Nothing has changed if a call raises StalenessError, or NonFiniteError on the first minibatch.
Called by processes/learner.py from a thread; it blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from async_rl.batching.batch import collate
from async_rl.batching.packing import pack
from async_rl.batching.partition import passes
from async_rl.config.learner import OptimizerConfig
from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig
from async_rl.core.codec import encode
from async_rl.core.errors import NonFiniteError, RewardError
from async_rl.core.summary import failed_share, part_means
from async_rl.core.types import FloatArray, Group, IntArray
from async_rl.learner.checkpoint import Checkpointer, ModelState
from async_rl.learner.metrics import step_histograms, step_scalars
from async_rl.learner.models import Critic, Policy, follow, frozen_copy, load_policy, value_head
from async_rl.learner.objective_state import ObjectiveState
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.rows import rows_as_group
from async_rl.learner.sharding import Ranks, full_tensor
from async_rl.learner.update import StepRecord, Updater

TensorSpec = tuple[str, str, tuple[int, ...], int]
"""Hugging Face name, torch dtype name, shape, size in bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step tells: numbers under the names of the metric catalogue; with a critic, the
    advantages of each group's response tokens.
    """

    scalars: dict[str, float]
    histograms: dict[str, list[float]]
    advantages: list[FloatArray]


class Trainer:
    """Trains one policy. With world_size > 1 the process group exists already."""

    def __init__(
        self,
        config: RunConfig,
        model_path: Path,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        failed_batches: Path,
    ) -> None:
        """Loads the models from model_path. Raises ConfigError for a model that cannot be trained.

        failed_batches: directory for batches on which a loss or a gradient was not finite; made
        when it is needed.
        """
        torch.manual_seed(config.seed)
        self._config = config
        self._dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        learner = config.learner
        self._ranks = Ranks(
            rank=rank,
            world_size=world_size,
            device=device,
            dtype=self._dtype,
            min_shard_params=learner.min_shard_params,
            offload=learner.offload,
        )
        self._failed_batches = failed_batches
        import_external(config.model)
        policy = load_policy(
            model_path,
            trust_remote_code=config.model.trust_remote_code,
            gradient_checkpointing=learner.gradient_checkpointing,
            is_fused=device.type == "cpu" and self._dtype == torch.float32,
        )
        reference = frozen_copy(policy) if config.algorithm.kl_coef > 0 else None
        critic = (
            Critic(policy.lm)
            if learner.critic.enabled and learner.critic.backbone == "own"
            else None
        )
        if learner.critic.enabled and critic is None:
            policy.value_head = value_head(policy.lm)
        blocks = policy.lm._no_split_modules or ()
        for model in (policy, reference, critic):
            if model is not None:
                self._ranks.shard(
                    model, blocks, methods=["states"] if isinstance(model, Policy) else []
                )
        self._policy = policy
        self._specs = [self._spec(name, tensor) for name, tensor in policy.named_weights()]
        policy_optimizer = self._optimizer("policy", policy, policy.lm, learner.optimizer)
        models: dict[str, tuple[nn.Module, ModelOptimizer]] = {"policy": (policy, policy_optimizer)}
        values = critic or policy.value_head
        if values is not None:
            models["critic"] = (
                values,
                self._optimizer("critic", critic or policy, values, learner.critic.optimizer),
            )
        state = ObjectiveState(config.algorithm)
        self._moving_reference = reference if config.algorithm.ref_ema_eta else None
        stateful: dict[str, Stateful] = {"objective": state}
        if self._moving_reference is not None:
            stateful["reference"] = ModelState(self._moving_reference)
        self._models = [model for model in (policy, reference, critic) if model is not None]
        self._optimizers = [optimizer for _, optimizer in models.values()]
        self._checkpointer = Checkpointer(self._ranks, models, stateful)
        self._updater = Updater(
            config,
            self._ranks,
            policy=policy,
            policy_optimizer=policy_optimizer,
            reference=reference,
            critic=critic,
            critic_optimizer=models["critic"][1] if "critic" in models else None,
            state=state,
        )

    def _optimizer(
        self, name: str, root: nn.Module, trained: nn.Module, settings: OptimizerConfig
    ) -> ModelOptimizer:
        """Of the parameters of `trained`, a part of the sharded `root`."""
        return ModelOptimizer(
            name,
            root,
            settings,
            parameters=trained.parameters(),
            num_steps=self._config.num_steps,
            is_offloaded=self._config.learner.offload == "optimizer",
        )

    def step(self, groups: Sequence[Group], version: int) -> StepResult:
        """Trains on the groups: version -> version + 1.

        Raises StalenessError if a token breaks the bound, NonFiniteError if loss or gradient is not
        finite, RewardError if every sample failed and reward.stop_if_all_fail is set.
        """
        reward = self._config.reward
        failed = failed_share(groups, reward.fail_reward)
        if failed == 1 and reward.stop_if_all_fail:
            raise RewardError(
                f"step {version + 1}: none of its"
                f" {sum(len(group.trajectories) for group in groups)} samples has a reward above"
                f" reward.fail_reward={reward.fail_reward:g}: what scores them is broken, or no"
                " prompt can be solved; read some with async-rl rollouts RUN, or set"
                " reward.stop_if_all_fail=false"
            )
        batch = collate(groups, device=self._ranks.device)
        try:
            record = self._updater.step(batch, version)
        except NonFiniteError as error:
            ids = ", ".join(str(group.group_id) for group in groups)
            raise NonFiniteError(
                f"step {version + 1}, groups {ids}: {error}; the batch is in"
                f" {self._keep(groups, version)}"
            ) from error
        if self._moving_reference is not None:
            follow(self._moving_reference, self._policy, share=self._config.algorithm.ref_ema_eta)
        return StepResult(
            scalars={
                **step_scalars(self._config, batch, record, version=version),
                **_part_scalars(groups),
                "reward/failed_share": failed,
            },
            histograms=step_histograms(batch, record, version=version),
            advantages=(
                self._advantages(groups, record) if self._config.learner.critic.enabled else []
            ),
        )

    def leave_device(self) -> None:
        """Models and moments wait in host memory; no step until `enter_device`."""
        self._move(torch.device("cpu"))
        if self._ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def enter_device(self) -> None:
        """Models and moments are back on the device; what learner.offload keeps off it between uses
        stays there.
        """
        self._move(self._ranks.device)

    def _move(self, device: torch.device) -> None:
        if self._config.learner.offload != "parameters":
            for model in self._models:
                model.to(device)
        if self._config.learner.offload == "none":
            for optimizer in self._optimizers:
                optimizer.move_moments(device)

    @staticmethod
    def _advantages(groups: Sequence[Group], record: StepRecord) -> list[FloatArray]:
        """float32 [response tokens of all samples] of each group, as `collate` lays them."""
        ends = np.cumsum(
            [sum(sample.response_length for sample in group.trajectories) for group in groups]
        )
        return np.split(record.targets.advantages.float().cpu().numpy(), ends[:-1])

    def _keep(self, groups: Sequence[Group], version: int) -> Path:
        """Writes the batch down for inspection: `async_rl.codec.decode(path.read_bytes(),
        list[Group])`.
        """
        path = self._failed_batches / f"step_{version + 1:06d}.msgpack"
        if self._ranks.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(list(groups)))
        return path

    @torch.no_grad()
    def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Log-prob of each token of each row at temperature 1, float32 [len(row)]; the first token
        has none and gets 0.
        """
        batch = collate([rows_as_group(rows, prompt_length=1)], device=self._ranks.device)
        found = torch.zeros(batch.num_tokens, device=self._ranks.device)
        budget = self._config.learner.budget_tokens
        chunk_tokens = self._policy.chunk_tokens(self._config.learner.logits_chunk_mb)
        for members in passes(batch, range(batch.num_sequences), ranks=1, budget_tokens=budget)[0]:
            row = pack(batch, members, device=self._ranks.device, with_ends=False)
            found[row.token_index] = self._policy(
                row, temperature=1.0, chunk_tokens=chunk_tokens
            ).logprobs
        flat = found.cpu().numpy()
        return [
            np.concatenate([np.zeros(1, dtype=np.float32), flat[start : start + size]])
            for start, size in zip(batch.offsets, batch.response_lengths, strict=True)
        ]

    def tensor_specs(self) -> list[TensorSpec]:
        """Every tensor of the policy in the type that generators use; tied ones once."""
        return list(self._specs)

    @torch.no_grad()
    def full_tensors(self, *, on_device: bool = False) -> Iterator[Tensor]:
        """The policy's tensors in the order of the specs, on the CPU or on the device (collective:
        every rank must iterate to the end).
        """
        for _, tensor in self._policy.named_weights():
            yield (
                full_tensor(tensor)
                .detach()
                .to(self.device if on_device else "cpu", self._dtype)
                .contiguous()
            )

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self._ranks.device

    def _spec(self, name: str, tensor: Tensor) -> TensorSpec:
        return (
            name,
            str(self._dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.numel() * self._dtype.itemsize,
        )

    def save(self, directory: Path, version: int) -> Future[None]:
        """Writes a checkpoint in the background: models, optimizers, random state, version.
        Complete once the directory has its name.
        """
        return self._checkpointer.begin(directory, version)

    def load(self, directory: Path) -> int:
        """Restores a checkpoint bit for bit and returns its version. Raises DataError if it is not
        one.
        """
        return self._checkpointer.load(directory)

    def export_hf(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face model directory that transformers and vLLM load; the
        tokenizer is not part of it.
        """
        names = [name for name, *_ in self._specs]
        state = dict(zip(names, self.full_tensors(), strict=True))
        if self._ranks.rank == 0:
            self._policy.lm.save_pretrained(directory, state_dict=state)
        self._ranks.barrier()


def _part_scalars(groups: Sequence[Group]) -> dict[str, float]:
    """The mean of each named part of the reward over all samples of the step."""
    means = part_means(sample for group in groups for sample in group.trajectories)
    return {f"reward/part/{name}": value for name, value in means.items()}
