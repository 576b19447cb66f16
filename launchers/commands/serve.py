"""`async-rl serve`: starts a training service for programs that speak the Tinker API."""

from typing import Annotated

import typer

from async_rl.core.machine import this_machine
from async_rl.launchers.api import starting
from async_rl.launchers.commands.options import Port, split_conf
from async_rl.runs.control import owning
from async_rl.service.address import address_of, free_port
from async_rl.wire.addresses import LOOPBACK

_CONF = "serve"


def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[model=PATH] [conf=NAME] [key=value ...]",
            help=(
                "a model, or a name from conf/ whose model is served, and settings that differ from"
                " conf/serve.yaml; default: the embedded model"
            ),
        ),
    ] = None,
    port: Port = 0,
) -> None:
    """Train and sample for programs that speak the Tinker API, until Ctrl-C.

    Examples: async-rl serve; async-rl serve model=build/real/SmolLM2-135M-Instruct; async-rl serve
    conf=real --port 8765
    """
    from async_rl.composition.compose import compose_unchecked

    conf, overrides = split_conf(settings or [])
    overrides = [
        f"model.path={word.removeprefix('model=')}" if word.startswith("model=") else word
        for word in overrides
    ]
    if conf not in (None, _CONF):
        path = compose_unchecked(conf).model.path
        overrides.insert(0, f"model.path={'null' if path is None else path}")
    config, _ = starting.checked_config(_CONF, overrides, this_machine())
    port = free_port(port)
    run_dir = starting.make_run_dir(config)
    address = address_of(run_dir, port)
    typer.echo(
        f"export TINKER_BASE_URL=http://{LOOPBACK}:{address.port}\n"
        f"export TINKER_API_KEY={address.api_key}\n"
        f"if the service ends, async-rl resume {run_dir.name} continues it at the same address"
    )
    with owning(run_dir):
        raise typer.Exit(starting.supervise(config, run_dir))
