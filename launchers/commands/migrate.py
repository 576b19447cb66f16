"""`async-rl migrate`: a configuration of verl or AReaL, turned into a file of ours that `conf=`
takes, with the fate of every key.

Invariants: nothing is overwritten; the file comes with a table of all keys; an error if a launch
would refuse the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.migration import areal as migration_areal
from async_rl.launchers.migration import verl as migration_verl
from async_rl.launchers.migration.rules import Migration, flat
from async_rl.launchers.migration.rules import migrate as apply_rules

_ORDER = ("translated", "defaulted", "refused")


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            help="verl's ppo_trainer.yaml, or an AReaL experiment configuration as yaml"
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="where ours is written; default: beside it, as NAME.async_rl.yaml"),
    ] = None,
) -> None:
    """Translate a configuration of verl or AReaL, and say what becomes of every key.

    Examples: async-rl migrate ppo_trainer.yaml; async-rl migrate experiment.yaml --output ours.yaml
    """
    from async_rl.launchers.configuration.compose import compose

    migration = read(file)
    target = output or file.with_suffix(".async_rl.yaml")
    try:
        with target.open("x") as out:
            out.write(to_yaml(migration))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror}); give another place with --output"
        ) from error
    for kind in _ORDER:
        lines = [line for line in migration.lines if line.fate.kind == kind]
        typer.echo(f"{kind}: {len(lines)} keys")
        for line in lines:
            ours = ", ".join(f"{path}={value}" for path, value in line.fate.settings.items())
            typer.echo(
                "  "
                + "  ".join(
                    part
                    for part in (
                        f"{line.key}={line.value}",
                        f"-> {ours}" if ours else "",
                        line.fate.reason,
                    )
                    if part
                )
            )
    typer.echo(
        f"written: {target}; see what it would do with: async-rl launch conf={target} --dry-run"
    )
    compose(
        str(target), ["num_steps=1"] if "num_steps" in migration.settings else []
    )  # its files need not be here to be counted


def read(file: Path) -> Migration:
    """The migration of a file. Raises ConfigError if it is of neither system."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not readable as a configuration: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: holds no mapping; give a yaml file of verl or AReaL")
    source = flat(tree)
    if "actor_rollout_ref" in tree:
        return apply_rules(
            source, migration_verl.RULES, migration_verl.IMPLIED, migration_verl.base(source)
        )
    if "ppo" in tree and "dataset" in tree:
        return apply_rules(
            source, migration_areal.RULES, migration_areal.IMPLIED, migration_areal.base(source)
        )
    raise ConfigError(
        f"{file}: has neither actor_rollout_ref (verl) nor ppo and dataset (AReaL); give a"
        " configuration of one of them"
    )


def to_yaml(migration: Migration) -> str:
    """Our file: what it builds on, and the settings that differ, as sections."""
    tree: dict[str, Any] = {"defaults": [migration.base, "_self_"]}
    for path, value in migration.settings.items():
        node = tree
        *parents, leaf = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return msgspec.yaml.encode(tree).decode()
