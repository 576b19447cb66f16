"""`async-rl migrate`: translates a configuration of another trainer into a file for `conf=`.

Invariants: no file is overwritten; what a run does otherwise than the source is at the top of the
report; every key of the source is listed with its fate; the written file is valid, or names the
values that it lacks; the exit status is 3 if a key was refused or has another effect.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from async_rl.composition.schema import put
from async_rl.core.errors import ConfigError
from async_rl.launchers.migration.applying import Line, Migration, read
from async_rl.launchers.migration.sources import Unreadable

REFUSED = 3
"""Exit status if the meaning of a key was lost; 2 is a wrong use."""


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            help="yaml of verl or AReaL, json or yaml of TRL's GRPOConfig, or a shell or Python"
            " script that starts one of these trainers"
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
    release: Annotated[
        str,
        typer.Option(
            help="release of the source system, as in 0.18; its defaults fill absent keys"
        ),
    ] = "",
    data: Annotated[list[Path] | None, typer.Option(help="a file of rows to train on")] = None,
    held_out: Annotated[list[Path] | None, typer.Option(help="a file of rows to evaluate")] = None,
) -> None:
    """Translate a configuration of verl, AReaL or TRL, and list the result for every key. The exit
    status is 3 if a run would do something otherwise than the source.

    Examples: async-rl migrate ppo_trainer.yaml; async-rl migrate run.sh --data rows.jsonl
    """
    given = {"data.train_files": _paths(data), "data.val_files": _paths(held_out)}
    given = {path: files for path, files in given.items() if files}
    migration = read(file, overrides or (), release=release, given=given)
    target = output or file.with_suffix(".async_rl.yaml")
    try:
        # "x" fails if the file exists: it may have been edited since.
        with target.open("x") as out:
            out.write(to_yaml(migration))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror}); choose another file with --output"
        ) from error
    lines = {kind: [line for line in migration.lines if line.fate.kind == kind] for kind in _TITLES}
    typer.echo(
        f"read as {migration.system}: keys that the file omits have its defaults (--release)"
    )
    for kind, title in _TITLES.items():
        typer.echo(f"{title}: {len(lines[kind])} keys")
        for line in lines[kind]:
            typer.echo(f"  {_described(line)}")
        if kind == "refused":
            typer.echo(f"for every file of {migration.system.partition(' ')[0]}:")
            typer.echo("\n".join(f"  {difference}" for difference in migration.differences))
    typer.echo(f"written: {target}; check it with: async-rl launch conf={target} --dry-run")
    if lines["refused"]:
        raise typer.Exit(REFUSED)


_TITLES = {
    "refused": "refused, or otherwise than the source",
    "translated": "translated",
    "defaulted": "defaulted",
}


def _paths(files: Sequence[Path] | None) -> list[str]:
    return [str(path.absolute()) for path in files or ()]


def to_yaml(migration: Migration) -> str:
    """Return the file's text: the configuration it builds on, and the settings as sections."""
    tree: dict[str, Any] = {"defaults": [migration.base, "_self_"]}
    for path, value in migration.settings.items():
        put(tree, path, value)
    return msgspec.yaml.encode(tree).decode()


def _described(line: Line) -> str:
    parts = [line.key if isinstance(line.value, Unreadable) else f"{line.key}={line.value}"]
    if line.fate.settings:
        ours = ", ".join(f"{path}={value}" for path, value in line.fate.settings.items())
        parts.append(f"-> {ours}")
    if line.fate.reason:
        parts.append(line.fate.reason)
    return "  ".join(parts)
