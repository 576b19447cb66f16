"""A version in buffers of the GPU, which generators on that GPU map (CUDA IPC).

Each buffer is a chunk of bounded size, because vLLM copies all of a buffer at once.
Invariant: the buffers exist until every generator that serves has the version; a generator that
joins later uses the next medium, the shared block. Needs a GPU, except `packed` and `described`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from async_rl.config.run import DEVICE_CHUNK_BYTES
from async_rl.core.sequences import divided
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import DeviceBlock, DeviceChunk, Manifest
from async_rl.weights.media import LearnerSide, Sender
from async_rl.weights.membership import Life, Load, Membership
from async_rl.weights.tensors import Tensors


class DeviceSender(Sender):
    """Members map the buffers of the newest version."""

    reads_block = False

    def __init__(self, learner: LearnerSide) -> None:
        super().__init__(learner)
        self._exported: tuple[int, DeviceBlock] | None = None

    def reaches(self, member: Member) -> bool:
        """Only while the buffers exist."""
        return self._exported is not None

    async def offer(self, manifest: Manifest) -> None:
        """Export the weights before the learner moves off the device."""
        # Cleared first, so that `leave` cannot free the new ones in the name of the old version.
        self._exported = None
        self._exported = manifest.version, await self._learner.exporter.share_on_device()

    async def source(self, manifest: Manifest, load: Load, life: Life) -> DeviceBlock:
        """The exported buffers."""
        assert self._exported is not None, "Sender.reaches comes before Sender.source"
        return self._exported[1]

    async def leave(self, membership: Membership) -> None:
        """Free the buffers once all generators that serve have their version."""
        if self._exported is not None and membership.all_have(self._exported[0]):
            self._exported = None
            await self._learner.exporter.unshare_on_device()


@contextmanager
def receive_from_device(
    manifest: Manifest, block: DeviceBlock, device: torch.device
) -> Iterator[Tensors]:
    """Yield copies of the tensors, which vLLM's own code maps."""
    # Only vLLM engines get this source (config/checks/run.py), and the import is slow.
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

    entries = iter(manifest.tensors)

    def copied() -> Tensors:
        for chunk in block.chunks:
            part = list(itertools.islice(entries, chunk.num_tensors))
            yield from packed_ipc_consumer(
                {block.gpu: mapping_arguments(chunk)},
                [tensor.name for tensor in part],
                [list(tensor.shape) for tensor in part],
                [tensor.dtype for tensor in part],
                [tensor.size_bytes for tensor in part],
                device.index,
            )

    yield copied()


class ExportedWeights:
    """One packed version, in the process of the learner that owns the memory."""

    def __init__(
        self, tensors: Iterable[torch.Tensor], *, sizes: Sequence[int], device: torch.device
    ) -> None:
        """Arguments as in `packed`."""
        self._packed = list(packed(tensors, sizes=sizes, device=device))
        # Readers do not wait for this stream, so the bytes must be complete before they get the
        # handles.
        torch.cuda.current_stream(device).synchronize()
        chunks = []
        for num_tensors, buffer in self._packed:
            _, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
            chunks.append(described(arguments, num_tensors=num_tensors, size_bytes=len(buffer)))
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        self.block = DeviceBlock(gpu=gpu, chunks=chunks)

    def close(self) -> None:
        """Free the memory; no process maps it any more."""
        del self._packed
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        # torch would keep the memory for itself, and generators on this GPU need it.
        torch.cuda.empty_cache()


def packed(
    tensors: Iterable[torch.Tensor],
    *,
    sizes: Sequence[int],
    device: torch.device,
    chunk_bytes: int = DEVICE_CHUNK_BYTES,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of tensors in a chunk, and uint8 [N] with their bytes one after another.

    sizes: of each tensor in bytes. A chunk above chunk_bytes has a single tensor. Each tensor is
    released before the next is requested.
    """
    remaining = iter(tensors)
    for part in divided(zip(sizes, sizes, strict=True), chunk_bytes):
        buffer = torch.empty(sum(part), dtype=torch.uint8, device=device)
        offset = 0
        for tensor in itertools.islice(remaining, len(part)):
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            buffer[offset : offset + flat.numel()].copy_(flat)
            offset += flat.numel()
        yield len(part), buffer


def described(arguments: tuple[Any, ...], *, num_tensors: int, size_bytes: int) -> DeviceChunk:
    """Return the arguments of `rebuild_cuda_tensor` for a uint8 buffer [size_bytes] that the reader
    cannot derive.
    """
    return DeviceChunk(
        num_tensors=num_tensors,
        size_bytes=size_bytes,
        offset=arguments[3],
        storage=arguments[7:10],
        sync=arguments[11:],
    )


def mapping_arguments(chunk: DeviceChunk) -> tuple[Any, ...]:
    """Return the arguments of `rebuild_cuda_tensor` for a uint8 tensor [size_bytes] on device 0,
    which vLLM replaces by its own.
    """
    stride = (1,)
    device = 0
    requires_grad = False
    return (
        torch.Tensor,
        torch.Size([chunk.size_bytes]),
        stride,
        chunk.offset,
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        *chunk.storage,
        requires_grad,
        *chunk.sync,
    )
