"""Checks of model.lora.host against the run that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.core.errors import AsyncRLError
from async_rl.planning.learner_memory import longest_sequence


def host_problems(config: RunConfig) -> Iterator[str]:
    """Yield the reasons why the engines of that run cannot serve this one."""
    lora = config.model.adapter
    if lora is None or lora.host is None:
        return
    given = f"model.lora.host={lora.host}"
    directory = Path(lora.host)
    if not (directory / "config.yaml").is_file():
        yield f"{given}: is not the directory of a run; give one, for example runs/first"
        return
    # Imports ZeroMQ, which other launches do not need before they start.
    from async_rl.runtime.context import load_config, load_control

    try:
        host = load_config(directory)
        load_control(directory).check_messages(directory.name)
    except (AsyncRLError, OSError, ValueError) as error:
        yield f"{given}: {error}"
        return
    theirs = host.model.adapter
    if theirs is None or theirs.slots < 2:
        slots = 0 if theirs is None else theirs.slots
        yield (
            f"{given}: that run has model.lora.slots={slots}; start it with model.lora=lora"
            " model.lora.slots=2, or more for more runs"
        )
        return
    # vLLM reserves the slots at its start, with the rank of that run.
    if lora.rank > theirs.rank:
        yield (
            f"model.lora.rank={lora.rank} is above the model.lora.rank={theirs.rank} of"
            f" {directory.name}, whose engines have room for that; lower it, or raise the other"
        )
    longest = longest_sequence(config)
    room = longest_sequence(host)
    if longest > room:
        yield (
            f"data.max_prompt_tokens + data.max_response_tokens = {longest} is above the {room} of"
            f" {directory.name}, whose engines take no longer sequences; lower it"
        )
    # Each changes what the same adapter computes.
    for path, ours, other in (
        ("model.path", _model(config), _model(host)),
        ("model.dtype", config.model.dtype, host.model.dtype),
        ("model.override_config", config.model.override_config, host.model.override_config),
        ("data.longest", config.data.longest, host.data.longest),
    ):
        if ours != other:
            yield f"{path}={ours}, but {other} in {directory.name}, whose engines serve this run"


def _model(config: RunConfig) -> str | None:
    path = config.model.path
    # Two paths may lead to the same model; a hub name is compared as it is.
    return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path
