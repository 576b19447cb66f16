"""Checks of placement=colocated: settings that it excludes or that would have no effect.

Part of `checks/run.py`, whose invariants hold here.
"""

from collections.abc import Iterator

from async_rl.config.run import RunConfig


def placement_problems(config: RunConfig) -> Iterator[str]:
    """Yield the contradictions of a device that generators and learner share in turns."""
    if config.weights.transfer.kind == "ipc" and not has_shared_gpu(config):
        yield (
            "weights.transfer=ipc: the weights remain in the memory of a GPU that a vLLM generator"
            " and a learner of one rank share; set placement=colocated, generation.engine=vllm,"
            " learner.ranks=1, and gpus_each=0.5 for both, or set weights.transfer=auto"
        )
    if not config.takes_turns:
        return
    yield from _handovers(config)
    yield from _devices(config)


def has_shared_gpu(config: RunConfig) -> bool:
    """Return whether the generator can map the learner's memory: a vLLM generator on the same GPU
    as a learner of one rank.
    """
    return (
        config.takes_turns
        and config.generators.gpus_each > 0
        and config.learner.gpus_each > 0
        and config.generation.is_vllm
        and config.learner.ranks == 1
    )


def _handovers(config: RunConfig) -> Iterator[str]:
    every = config.weights.push_every_steps
    bound = config.buffer.max_staleness_versions
    if every > config.num_steps:
        yield (
            f"weights.push_every_steps={every} is above num_steps={config.num_steps} with"
            " placement=colocated: all steps would belong to one handover, and no sample would use"
            f" new weights; lower it to at most {config.num_steps}"
        )
    # Two handovers: the batches that are trained now, and the groups written since then.
    if bound > 2 * every:
        yield (
            f"buffer.max_staleness_versions={bound} with placement=colocated and"
            f" weights.push_every_steps={every}: one handover trains {every} batches, so groups"
            " written more than two handovers ahead only become stale; set it to at most"
            f" {2 * every}, or weights.push_every_steps to at least {-(-bound // 2)}"
        )
    if config.weights.transfer.kind in ("filesystem", "collective"):
        yield (
            f"weights.transfer={config.weights.transfer.kind} with placement=colocated: generators"
            " run next to the learner and read its memory; set weights.transfer=auto"
        )


def _devices(config: RunConfig) -> Iterator[str]:
    if not config.launcher.shares_devices:
        yield (
            f"placement=colocated with launcher={config.launcher.kind}, which assigns a GPU to one"
            " process only; set launcher=local inside a job of one node"
        )
    for name in config.generators.pools:
        yield (
            f"generators.pools.{name} with placement=colocated: the learner shares its device with"
            " the generators of one pool only; remove this pool"
        )
    learns = config.learner.gpus_each
    generates = config.generators.gpus_each
    if (learns > 0) != (generates > 0):
        yield (
            f"learner.gpus_each={learns:g} and generators.gpus_each={generates:g} with"
            " placement=colocated: they share devices, so both use GPUs or neither does; set both"
            " to 0.5, or both to 0"
        )
    if learns <= 0 or generates <= 0:
        return
    parts = config.generation.vllm.tensor_parallel_size
    # Tensor parallel parts exchange in every layer, so NCCL needs a whole GPU for each.
    if parts > 1:
        yield (
            f"generation.vllm.tensor_parallel_size={parts} with placement=colocated: an engine on"
            " several GPUs needs whole GPUs; set generation.vllm.tensor_parallel_size=1"
        )
    elif learns >= 1 or generates >= 1:
        yield (
            f"learner.gpus_each={learns:g} and generators.gpus_each={generates:g} with"
            " placement=colocated: whole GPUs cannot be shared; set both to 0.5"
        )
    # On CPUs there is no such pairing: all cores are one device.
    if config.generators.count != config.learner.ranks:
        yield (
            f"generators.count={config.generators.count} and learner.ranks={config.learner.ranks}"
            " with placement=colocated: each device has one generator and one rank; set"
            f" generators.count={config.learner.ranks}"
        )
