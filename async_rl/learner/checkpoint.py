"""Checkpoints of the learner: a safetensors file per rank and an index (docs/checkpoints.md).

The state is copied, written in the background to a directory next to the final one, then renamed.
Invariants
- A directory with its final name is complete and on the disk. A directory with the suffix
  `.partial` is incomplete, and is removed when the next checkpoint of the same name starts.
- The restored state is equal bit for bit, on any number of ranks. There is one random state,
  because all ranks draw the same numbers.
- The state is copied before `start` returns, so later training does not reach the file.
- One checkpoint is written at a time.
- Reading runs nothing that a file says, and allocates nothing of a size that a file says.
"""

import errno
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from async_rl.core.checksums import complete, sum_of
from async_rl.core.errors import DataError, InfrastructureError
from async_rl.learner.checkpoint_files import (
    INDEX_FILE,
    Index,
    Optimizer,
    Staging,
    Stored,
    file_of,
    open_shard,
    read_index,
)
from async_rl.learner.objective_state import ObjectiveState
from async_rl.learner.optimizer import MOMENTS, Trained
from async_rl.learner.sharding import BACKEND, Ranks, chunk, local, num_shards
from async_rl.weights.tensors import CODES

_RANDOM = "random"
_CUDA_RANDOM = "random.cuda"


class Checkpointer:
    """Saves and restores models, moments, random state, version and the state of the objective.

    reference: a model that follows the policy; base: directory of frozen base weights, without
    which a checkpoint of an adapter is of no use. None = there is none.
    """

    def __init__(
        self,
        ranks: Ranks,
        trained: Trained,
        objective: ObjectiveState,
        *,
        reference: nn.Module | None,
        base: Path | None,
    ) -> None:
        self._ranks = ranks
        self._trained = trained
        self._objective = objective
        self._reference = reference
        self._base = base
        self._base_sha256 = "" if base is None else sum_of(base.glob("*.safetensors"))
        self._staging = Staging()
        # One thread: checkpoints are finished in the order in which they were started.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: list[Future[None]] = []
        # A separate group: its collectives run in the background, next to the collectives of
        # training. One rank needs none, and so opens no listener.
        self._group = None if ranks.world_size == 1 else dist.new_group(backend=BACKEND)

    def start(self, directory: Path, version: int) -> Future[None]:
        """Copy the state (collective) and write it in the background: models, moments, random
        state, version and the state of the objective.

        The future completes after the rename on rank 0; a failure is an InfrastructureError.
        """
        # Its memory is used again.
        wait(self._written)
        partial = directory.with_name(directory.name + ".partial")
        if self._ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        # Otherwise another rank could write before the directory is removed.
        self._ranks.barrier()
        tensors = self.tensors()
        own = {
            name: local(tensor)
            for name, tensor in tensors.items()
            # Rank 0 has the tensors that are not sharded; a second copy is not written.
            if self._ranks.rank < num_shards(tensor) and len(local(tensor))
        }
        self._staging.fill(own)
        index = Index(
            format=3,
            version=version,
            optimizers={name: _saved(o.torch_optimizer) for name, (_, o) in self._trained.items()},
            objective=self._objective.numbers(),
            base_sha256=self._base_sha256,
            tensors={
                name: Stored(
                    dtype=_code(tensor),
                    shape=list(tensor.shape),
                    pieces=_pieces(len(tensor), num_shards(tensor)),
                )
                for name, tensor in tensors.items()
            },
        )
        self._written = [self._thread.submit(self._write, index, partial, directory)]
        return self._written[0]

    def _write(self, index: Index, partial: Path, directory: Path) -> None:
        report = torch.zeros(1 + hashlib.sha256().digest_size, dtype=torch.uint8)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            digest = self._staging.write(partial / file_of(self._ranks.rank))
            report[1:] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        except OSError as error:
            report[0] = error.errno or errno.EIO
        # Every rank takes part, also after a failure: rank 0 would wait for it.
        reports = report.repeat(self._ranks.world_size, 1)
        if self._group is not None:
            parts = None if self._ranks.rank else list(reports)
            dist.gather(report, parts, group=self._group)
        if self._ranks.rank:
            return
        content = msgspec.json.encode(index)
        sums = {INDEX_FILE: hashlib.sha256(content).hexdigest()}
        try:
            for rank, (code, *digits) in enumerate(reports.tolist()):
                if code:
                    raise OSError(code, f"{os.strerror(code)} at rank {rank}")
                sums[file_of(rank)] = bytes(digits).hex()
            (partial / INDEX_FILE).write_bytes(content)
            complete(partial, directory, sums)
        except OSError as error:
            raise InfrastructureError(
                f"checkpoint {directory} could not be written: {error}; free disk space or grant"
                " write permission, then async-rl resume the run"
            ) from error

    def load(self, directory: Path) -> int:
        """Restore everything and return the version.

        Raises DataError if the directory is not a complete checkpoint of these models.
        """
        index = read_index(directory)
        tensors = self.tensors()
        # The checkpoint may have been written on a machine without a GPU, or with one.
        if _CUDA_RANDOM not in index.tensors:
            tensors.pop(_CUDA_RANDOM, None)
        try:
            self._check(index, tensors)
            shards = functools.cache(lambda file: open_shard(directory / file))
            for name, tensor in tensors.items():
                self._read(name, tensor, index.tensors[name], shards)
            torch.set_rng_state(tensors[_RANDOM])
            if _CUDA_RANDOM in tensors:
                torch.cuda.set_rng_state(tensors[_CUDA_RANDOM])
        # torch raises RuntimeError for a random state that is none.
        except (DataError, SafetensorError, RuntimeError) as error:
            raise DataError(
                f"checkpoint {directory} cannot be read, or is of another model or configuration:"
                f" {error}; move it away to continue from the previous one"
            ) from error
        self._objective.restore(index.objective)
        for name, (_, optimizer) in self._trained.items():
            for state in optimizer.torch_optimizer.state.values():
                state["step"].fill_(index.optimizers[name].num_steps)
        return index.version

    def _check(self, index: Index, tensors: Mapping[str, Tensor]) -> None:
        if index.base_sha256 != self._base_sha256:
            raise DataError(
                f"it has an adapter for base weights with checksum {index.base_sha256[:12]}, but"
                f" those in {self._base} have {self._base_sha256[:12]}; set model.path to the"
                " weights that the run started with"
            )
        for name, tensor in tensors.items():
            stored = index.tensors.get(name)
            own = (_code(tensor), list(tensor.shape))
            if stored is None or (stored.dtype, stored.shape) != own:
                raise DataError(f"{name} is {stored or 'missing'}, not {own}")
        if index.optimizers.keys() != self._trained.keys():
            raise DataError(f"it has optimizers of {', '.join(index.optimizers)}")

    @torch.no_grad()
    def _read(
        self, name: str, tensor: Tensor, stored: Stored, shards: Callable[[str], Any]
    ) -> None:
        """Read the rows of this rank."""
        size = num_shards(tensor)
        first, last = chunk(len(tensor), size, self._ranks.rank % size)
        for file, begin, end in stored.pieces:
            low = max(begin, first)
            high = min(end, last)
            if low < high:
                piece = shards(file).get_slice(name)
                expected = (stored.dtype, [end - begin, *stored.shape[1:]])
                if (piece.get_dtype(), piece.get_shape()) != expected:
                    raise DataError(f"{name} in {file} is not {expected}")
                local(tensor)[low - first : high - first] = piece[low - begin : high - begin]

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors by their names in a checkpoint; a number as one row."""
        tensors: dict[str, Tensor] = {}
        for name, (model, optimizer) in self._trained.items():
            names = _names(model)
            for parameter, state in optimizer.torch_optimizer.state.items():
                tensors[f"{name}.model.{names[parameter]}"] = parameter
                for moment in MOMENTS:
                    tensors[f"{name}.optimizer.state.{names[parameter]}.{moment}"] = state[moment]
        if self._reference is not None:
            named = _names(self._reference).items()
            tensors |= {f"reference.{n}": x for x, n in named if isinstance(x, nn.Parameter)}
        # Bytes last, so that every tensor is aligned in the file.
        tensors |= {_RANDOM: torch.get_rng_state(), **_gpu_random()}
        return {name: x if x.ndim else x.unsqueeze(0) for name, x in tensors.items()}


@functools.cache
def _pieces(num_rows: int, num_ranks: int) -> list[tuple[str, int, int]]:
    """Return the rows of each rank. Cached: a thousand ranks have a thousand pieces of each of
    thousands of tensors, of a few heights.
    """
    spans = ((file_of(rank), *chunk(num_rows, num_ranks, rank)) for rank in range(num_ranks))
    return [(file, begin, end) for file, begin, end in spans if begin < end]


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Return the first name of each tensor: tied weights have several. FSDP shards again what a
    pass has gathered.
    """
    return {x: name for name, x in reversed(model.state_dict(keep_vars=True).items())}


def _saved(optimizer: torch.optim.Optimizer) -> Optimizer:
    num_steps = float(next(iter(optimizer.state.values()))["step"])
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return Optimizer(num_steps=num_steps, settings=settings)


def _code(tensor: Tensor) -> str:
    return CODES[str(tensor.dtype).removeprefix("torch.")]


def _gpu_random() -> dict[str, Tensor]:
    if torch.cuda.is_available():
        return {_CUDA_RANDOM: torch.cuda.get_rng_state()}
    return {}
