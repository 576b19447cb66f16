"""`async-rl migrate`: translates a configuration of verl or AReaL into a file for `conf=`.

Invariants: no file is overwritten; every key of the source is listed with its fate; the command
fails if a launch would refuse the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.configuration.choices import put
from async_rl.launchers.migration import areal, verl
from async_rl.launchers.migration import rules as migration_rules
from async_rl.launchers.migration.rules import Line, Migration, flat, read_table


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            help="verl's ppo_trainer.yaml, or an AReaL experiment configuration as yaml"
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="the file to write; default: NAME.async_rl.yaml beside the source"),
    ] = None,
) -> None:
    """Translate a configuration of verl or AReaL, and list the fate of every key.

    Examples: async-rl migrate ppo_trainer.yaml; async-rl migrate experiment.yaml --output ours.yaml
    """
    from async_rl.launchers.configuration.compose import compose

    migration = read(file)
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
    compose(str(target), ["num_steps=1"] if "num_steps" in migration.settings else [])


def read(file: Path) -> Migration:
    """Translate a file. Raises ConfigError if it belongs to neither system."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not readable as a configuration: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: contains no mapping; give a yaml file of verl or AReaL")
    if "actor_rollout_ref" in tree:
        return migration_rules.migrate(flat(tree), read_table("verl"), verl.FUNCTIONS)
    if "ppo" in tree and "dataset" in tree:
        return migration_rules.migrate(flat(tree), read_table("areal"), areal.FUNCTIONS)
    raise ConfigError(
        f"{file}: has neither actor_rollout_ref (verl) nor ppo and dataset (AReaL); give a"
        " configuration of one of them"
    )


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
