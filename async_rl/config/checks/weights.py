"""Checks of the settings of weight pushes: combinations that cannot work, or of which one setting
would have no effect.

Part of `checks/run.py`, whose invariants hold here.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config.run import FileTransfer, RunConfig


def weights_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line per problem."""
    weights = config.weights
    bound = config.buffer.max_staleness_versions
    # Admission waits for a newer version, which only the blocked step would make.
    if weights.push_every_steps - 1 > bound:
        yield (
            f"weights.push_every_steps={weights.push_every_steps} with"
            f" buffer.max_staleness_versions={bound}: between pushes generators are"
            f" {weights.push_every_steps - 1} versions behind and admission would stop forever;"
            f" raise buffer.max_staleness_versions to at least {weights.push_every_steps - 1}, or"
            " lower weights.push_every_steps"
        )
    if config.buffer.age_rule == "exact" and weights.push_every_steps > 1:
        yield (
            f"weights.push_every_steps={weights.push_every_steps} with buffer.age_rule=exact: every"
            " batch needs the weights of another step, and admission would stop forever; set"
            " weights.push_every_steps=1"
        )
    yield from _adapter(config)
    transfer = weights.transfer
    is_in_run = isinstance(transfer, FileTransfer) and transfer.path is None
    if is_in_run and not config.launcher.has_shared_run_dir:
        yield (
            "weights.transfer=filesystem with launcher.shared_run_dir=false: other nodes cannot"
            " read the run's directory; set weights.transfer.path to a URL that all nodes can read,"
            " or launcher.shared_run_dir=true"
        )


def _adapter(config: RunConfig) -> Iterator[str]:
    """Yield the problems of an adapter that an engine applies."""
    lora = config.model.adapter
    if lora is None or not config.model.is_applied:
        return
    given = f"model.lora.slots={lora.slots}"
    if lora.slots > 1 and not config.agent.is_service:
        yield f"{given}: a run has one adapter; set model.lora.slots=1"
    if not config.generation.provided.serves_adapters:
        yield (
            f"{given} with generation.engine={config.generation.engine}: only vLLM applies"
            " adapters; set generation.engine=vllm"
        )
    if config.devices.are_handed_over:
        yield (
            f"{given} with placement=colocated: an engine that applies adapters does not sleep; set"
            " placement=disaggregated"
        )
    if config.weights.transfer.kind not in ("auto", "filesystem"):
        yield (
            f"{given} with weights.transfer={config.weights.transfer.kind}: only files carry an"
            " adapter; set weights.transfer=auto"
        )
