"""The learner's engine: trains one policy on groups and returns metrics of each step.

`Trainer` owns policy, critic, reference and their optimizers; the step itself is in `update.py`.
Its calls block, so the learner process runs them in a thread.
Invariants
- SPMD: every rank makes the same calls, each with its own part of the batch. Results are complete
  on rank 0, and except for weights on all ranks.
- Version k is the policy after k steps; `step(groups, version)` makes version + 1.
- Nothing has changed if a call raises StalenessError or NonFiniteError, except PartlyTrained.
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.batching.batch import BatchPart, collate_part, whole
from async_rl.batching.packing import pack_rows
from async_rl.batching.support import Grammars
from async_rl.config.plugins import import_external
from async_rl.config.run import RunConfig
from async_rl.core.errors import NonFiniteError, PartlyTrained, RewardError
from async_rl.core.frozen import frozen
from async_rl.core.heads import means_by_name
from async_rl.core.types import FloatArray, Group, IntArray
from async_rl.learner.checkpoint import Checkpointer
from async_rl.learner.forward_passes import ForwardPasses
from async_rl.learner.host_memory import Owned, Resting
from async_rl.learner.loading import load_models, ranks_of
from async_rl.learner.metrics import step_scalars
from async_rl.learner.models import Policy, follow
from async_rl.learner.objective_state import ObjectiveState
from async_rl.learner.optimizer import model_optimizers
from async_rl.learner.sharding import reshard
from async_rl.learner.update import Updater
from async_rl.protocol.weights import TensorEntry
from async_rl.weights.lora import Adapter, merged_weights, whole_adapter, write_peft
from async_rl.weights.tensors import tensor_spec


@frozen
class StepResult:
    """The results of a step for other processes.

    scalars: under the names of the metric catalogue.
    """

    scalars: dict[str, float]


class Trainer:
    """Trains one policy. With world_size > 1 the process group must exist already.

    device: that it trains on.  owners: `ForwardPasses.owners`.  save, load: `Checkpointer.start`
    and `Checkpointer.load`.
    """

    def __init__(
        self,
        config: RunConfig,
        model_path: Path,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        """Load the models. Raises ConfigError for a model that cannot be trained."""
        # The same on all ranks: a value head and an adapter start with equal values everywhere.
        torch.manual_seed(config.seed)
        self._config = config
        self.device = device
        self._ranks = ranks_of(config, rank=rank, world_size=world_size, device=device)
        # Before the models: it may register their architecture.
        import_external(config.model)
        models = load_models(config, model_path, self._ranks)
        self._models = models
        self._policy = models.policy
        self._specs = [
            tensor_spec(n, x, self._ranks.dtype) for n, x in merged_weights(self._policy.lm)
        ]
        trained = model_optimizers(config, models)
        self._optimizers = {name: optimizer for name, (_, optimizer) in trained.items()}
        reference = config.algorithm.reference
        self._reference_share = 0.0 if reference is None else reference.ref_ema_eta
        self._moving_reference: Policy | None = None
        if self._reference_share and isinstance(models.reference, Policy):
            self._moving_reference = models.reference
        state = ObjectiveState(config.algorithm)
        self._checkpointer = Checkpointer(
            self._ranks,
            trained,
            state,
            reference=self._moving_reference,
            # An adapter alone is of no use with other base weights.
            base=None if config.model.adapter is None else model_path,
        )
        self.save = self._checkpointer.start
        self.load = self._checkpointer.load
        self._resting = Resting()
        self._grammars = Grammars(
            tokenizer=config.data.tokenizer or str(model_path),
            vocab_size=models.policy.lm.config.get_text_config().vocab_size,
            has_code=config.model.trust_remote_code,
        )
        self._forward = ForwardPasses(config, models, self._ranks)
        self.owners = self._forward.owners
        self._updater = Updater(
            config,
            self._ranks,
            models=models,
            forward=self._forward,
            optimizers=self._optimizers,
            state=state,
        )

    def step(self, groups: Sequence[Group], version: int) -> StepResult:
        """Train as `train`, on groups whose tokens all ranks have."""
        batch = whole(groups)
        number = self._ranks.part
        owners = self.owners(batch.heads, version)
        own = [t for t, owner in zip(batch.trajectories, owners, strict=True) if owner == number]
        part = BatchPart(heads=batch.heads, owners=owners, number=number, trajectories=own)
        return self.train(part, version)

    def train(self, part: BatchPart, version: int) -> StepResult:
        """Train on this rank's part of a batch, from version to version + 1.

        Raises StalenessError if a token exceeds the staleness bound, NonFiniteError if a loss or
        gradient is not finite, RewardError if every sample failed and reward.stop_on has
        all_failed.
        """
        config = self._config
        samples = [sample for group in part.heads for sample in group.samples]
        means = means_by_name(sample.parts for sample in samples)
        # At most and not equal: penalties of a plug-in may go below the reward of a failure.
        failed = statistics.fmean(s.reward <= config.reward.fail_reward for s in samples)
        # Before the step: a batch without any reward teaches nothing, and moves the moments.
        if failed == 1 and "all_failed" in config.reward.stop_on:
            raise RewardError(
                f"step {version + 1}: none of its {len(samples)} samples has a reward above"
                f" reward.fail_reward={config.reward.fail_reward:g}: either scoring is broken or no"
                " prompt can be solved; read some samples with async-rl rollouts RUN, or set"
                " reward.stop_on=[]"
            )
        batch = collate_part(
            part,
            device=self.device,
            across=self._ranks,
            temperature=config.generation.temperature,
            grammars=self._grammars,
        )
        # Only an error before the first update leaves the version as it was.
        num_updates = self._num_updates
        try:
            step = self._updater.step(batch, version)
        except NonFiniteError as error:
            ids = ", ".join(str(group.group_id) for group in part.heads)
            is_changed = self._num_updates > num_updates
            kind = PartlyTrained if is_changed else NonFiniteError
            raise kind(f"step {version + 1}, groups {ids}: {error}") from error
        finally:
            self._reshard()
        if self._moving_reference is not None:
            follow(self._moving_reference, self._policy, share=self._reference_share)
        return StepResult(
            scalars={
                **step_scalars(step, version=version, pass_reward=config.reward.pass_reward),
                **{f"reward/part/{name}": mean for name, mean in means.items()},
                "reward/failed_share": failed,
            },
        )

    def _reshard(self) -> None:
        """Release all gathered parameters: whoever reads weights between steps reads the shards."""
        for model in self._models:
            reshard(model)

    @property
    def _num_updates(self) -> int:
        return sum(optimizer.num_updates for optimizer in self._optimizers.values())

    def leave_device(self) -> None:
        """Move models and moments to host memory; no step may run until `enter_device`."""
        # Without a GPU they are there.
        if self.device.type != "cpu":
            self._resting.leave(*self._movable)
            # Other processes on this GPU get the memory only after the cache is released.
            torch.cuda.empty_cache()

    def enter_device(self) -> None:
        """Move models and moments to the device, except those that learner.offload keeps off."""
        self._resting.enter(*self._movable, self.device)

    @property
    def _movable(self) -> tuple[list[nn.Module], list[Owned]]:
        # FSDP keeps them in host memory and moves them for each pass.
        if self._config.learner.offload == "parameters":
            return [], []
        optimizers = self._optimizers.values()
        moments = [moment for one in optimizers for moment in one.moments.on_device()]
        return list(self._models), moments

    @torch.no_grad()
    def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Compute the log-prob of each token at temperature 1.

        rows: int [L] each -> float32 [L] each; the first token has no log-prob and gets 0.
        """
        chunk_tokens = self._policy.chunk_tokens(self._config.learner.logits_chunk_mb)
        # In one pass on this rank alone: the rows are few, and ranks have no part of them.
        packed = pack_rows(rows, prompt_length=1, device=self.device)
        output = self._policy(packed, temperature=1.0, chunk_tokens=chunk_tokens)
        self._reshard()
        ends = np.cumsum([len(row) - 1 for row in rows])[:-1]
        of_rows = np.split(output.logprobs.cpu().numpy(), ends)
        return [np.concatenate([np.zeros(1, dtype=np.float32), of]) for of in of_rows]

    def tensor_specs(self) -> list[TensorEntry]:
        """Return the specs of the policy's tensors in the generators' dtype, tied ones once."""
        return self._specs

    @torch.no_grad()
    def full_tensors(self) -> Iterator[Tensor]:
        """Yield the policy's tensors on rank 0 in the order of the specs, on the device.

        Collective: every rank must iterate to the end; other ranks send their parts.
        """
        weights = (tensor for _, tensor in merged_weights(self._policy.lm))
        yield from self._ranks.gather(weights, self._ranks.dtype)

    def export_hf(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model directory, without a tokenizer."""
        names = [spec.name for spec in self._specs]
        # One tensor at a time: a whole model need not fit next to the shards on the device.
        tensors = [tensor.cpu() for tensor in self.full_tensors()]
        if self._ranks.rank == 0:
            state = dict(zip(names, tensors, strict=True))
            self._policy.lm.save_pretrained(directory, state_dict=state)
        self._ranks.barrier()

    def adapter(self) -> Adapter | None:
        """Copy the adapter to main memory, whole on every rank; None without one (collective)."""
        return whole_adapter(self._policy.lm, self._config.model)

    def export_adapter(self, directory: Path) -> None:
        """Write the adapter as PEFT's files; `model.lora` must have one."""
        adapter = self.adapter()
        assert adapter is not None, "the caller checks model.lora"
        if self._ranks.rank == 0:
            write_peft(
                directory,
                adapter.to_bytes(),
                adapter.scaling,
                task_type="CAUSAL_LM",
                base_model_name_or_path=self._config.model.path,
            )
        self._ranks.barrier()
