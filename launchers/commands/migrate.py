"""`async-rl migrate`: translates a configuration of another trainer into a file for `conf=`.

Invariants: no file is overwritten; every key of the source is listed with its fate; the command
fails if a launch would refuse the result, and exits with status 3 if it refused keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from async_rl.composition.choices import put
from async_rl.core.errors import ConfigError
from async_rl.launchers.migration.applying import Line, Migration
from async_rl.launchers.migration.systems import read

REFUSED = 3
"""Exit status if the meaning of a key was lost; 2 is a wrong use."""


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            help="yaml of verl or AReaL, toml of prime-rl, json or yaml of TRL's GRPOConfig, or a"
            " script with the arguments of TRL, OpenRLHF or verl"
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="further values of the source, as on its command line"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="the file to write; default: NAME.async_rl.yaml next to the source"),
    ] = None,
) -> None:
    """Translate a configuration of verl, AReaL, TRL, prime-rl or OpenRLHF, and list the result for
    every key. The exit status is 3 if keys were refused.

    Examples: async-rl migrate ppo_trainer.yaml; async-rl migrate rl.toml --output ours.yaml
    """
    from async_rl.composition.compose import compose

    migration = read(file, overrides or ())
    target = output or file.with_suffix(".async_rl.yaml")
    try:
        # "x" fails if the file exists: it may have been edited since.
        with target.open("x") as out:
            out.write(to_yaml(migration))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror}); choose another file with --output"
        ) from error
    for kind in ("translated", "defaulted", "refused"):
        lines = [line for line in migration.lines if line.fate.kind == kind]
        typer.echo(f"{kind}: {len(lines)} keys")
        for line in lines:
            typer.echo(f"  {_described(line)}")
    typer.echo(f"written: {target}; check it with: async-rl launch conf={target} --dry-run")
    # A number of steps replaces epochs, which could only be counted with the data files present.
    # A translation that no launch accepts is a failure, but the file stays to be edited.
    compose(str(target), ["num_steps=1"] if "num_steps" in migration.settings else [])
    if any(line.fate.kind == "refused" for line in migration.lines):
        raise typer.Exit(REFUSED)


def to_yaml(migration: Migration) -> str:
    """Return the file's text: the configuration it builds on, and the settings as sections."""
    tree: dict[str, Any] = {"defaults": [migration.base, "_self_"]}
    for path, value in migration.settings.items():
        put(tree, path, value)
    return msgspec.yaml.encode(tree).decode()


def _described(line: Line) -> str:
    parts = [f"{line.key}={line.value}"]
    if line.fate.settings:
        ours = ", ".join(f"{path}={value}" for path, value in line.fate.settings.items())
        parts.append(f"-> {ours}")
    if line.fate.reason:
        parts.append(line.fate.reason)
    return "  ".join(parts)
