"""The page docs/configuration.md: every setting with unit, range, value in conf/ and meaning, made
from the schema and the files of conf/.

Called by reference.py, for `make docs`.
"""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from omegaconf import OmegaConf

from async_rl.config.base import Section
from async_rl.config.run import RunConfig
from async_rl.launchers.configuration.compose import CONF_DIR, as_written, names
from async_rl.launchers.configuration.schema import (
    Setting,
    entry_of,
    flatten,
    mappings,
    settings,
    show,
)

_HEAD = """# Configuration

Made from the schema (`async_rl/config/run.py` and the files it imports) and `conf/` by `make docs`; change it there. A run is composed of
`conf/base.yaml`, one file of each group below, and `key=value` on the command line, which wins. `async-rl launch conf=ppo_code --dry-run`
shows the result; an unknown key is answered with the nearest right one, a wrong value with its range. The column *value* is what
{confs} have; where they differ, each is named. Text in `${{...}}` is worked out on the machine."""
_UNITS = {
    "_s": "s",
    "_minutes": "min",
    "_mb": "MB",
    "_kb": "KB",
    "_tokens": "tokens",
    "_versions": "versions",
    "_steps": "steps",
    "_pushes": "pushes",
    "_groups": "groups",
    "_prompts": "prompts",
    "_samples": "samples",
    "_programs": "programs",
    "cores": "core numbers",
    "port": "port",
}
_TYPES = {int: "whole number", float: "number", bool: "true, false", str: "text"}
_BOUNDS = (("ge", ">= "), ("gt", "> "), ("le", "<= "), ("lt", "< "))


def settings_page() -> str:
    """The whole page."""
    written = {conf: dict(flatten(as_written(conf))) for conf in names()}
    parts = [_HEAD.format(confs=" and ".join(f"`conf={conf}`" for conf in written))]
    for section, members in itertools.groupby(
        settings().values(), key=lambda s: s.path.rpartition(".")[0]
    ):
        listed = list(members)
        parts.append(f"\n## {section or 'The run'}\n\n{_meaning_of(section)}\n")
        rows = [
            (f"`{s.path}`", unit(s), span(s.type), _values(s, written), s.description)
            for s in listed
        ]
        parts.append(table(("setting", "unit", "range", "value", "meaning"), rows))
        for place in [s.path for s in listed if s.path in mappings()]:
            inner = entry_of(f"{place}.NAME").values()
            parts.append(f"\n## {place}.NAME\n\n{_first_sentence(mappings()[place])}\n")
            rows = [
                (
                    f"`{s.path}`",
                    unit(s),
                    span(s.type),
                    "required" if s.is_required else "",
                    s.description,
                )
                for s in inner
            ]
            parts.append(table(("setting", "unit", "range", "value", "meaning"), rows))
    for group in sorted({path.parent.name for path in CONF_DIR.glob("*/*.yaml")}):
        parts.append(
            f"\n## The group `{group}`\n\n`{group}=NAME` takes one of these files; a file sets what"
            " stands beside it.\n"
        )
        files = sorted((CONF_DIR / group).glob("*.yaml"))
        parts.append(
            table(
                ("name", "sets"),
                [(f"`{path.stem}`", ", ".join(_settings_in(path.stem, group))) for path in files],
            )
        )
    return "\n".join(parts) + "\n"


def unit(setting: Setting) -> str:
    """The unit that the name carries; empty for text, choices and plain numbers, whose meaning says
    it.
    """
    if "number" not in span(setting.type):
        return ""
    return next((unit for ending, unit in _UNITS.items() if setting.path.endswith(ending)), "")


def span(annotation: Any) -> str:
    """What a value may be, in words: `whole number >= 1 or null`."""
    if get_origin(annotation) is Annotated:
        inner, *metas = get_args(annotation)
        return " ".join([span(inner), *(bound for meta in metas for bound in _bounds(meta))])
    if get_origin(annotation) is Literal:
        return ", ".join(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(span(member) for member in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {span(get_args(annotation)[0])}"
    if get_origin(annotation) is tuple:
        return "list of " + " and ".join(span(member) for member in get_args(annotation))
    return "null" if annotation is types.NoneType else _TYPES.get(annotation, "mapping")


def _bounds(meta: msgspec.Meta) -> Iterator[str]:
    values = {"ge": meta.ge, "gt": meta.gt, "le": meta.le, "lt": meta.lt}
    yield from (f"{sign}{values[name]:g}" for name, sign in _BOUNDS if values[name] is not None)
    if meta.pattern:
        yield f"like `{meta.pattern}`"
    if meta.min_length:
        yield "(not empty)"


def _values(setting: Setting, written: dict[str, dict[str, Any]]) -> str:
    found = {
        conf: f"`{show(leaves[setting.path])}`"
        for conf, leaves in written.items()
        if setting.path in leaves
    }
    if len(set(found.values())) == 1 and len(found) == len(written):
        return next(iter(found.values()))
    return ", ".join(f"{conf}: {value}" for conf, value in found.items())


def _settings_in(name: str, group: str) -> list[str]:
    file = CONF_DIR / group / f"{name}.yaml"
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(tree, dict)
    found = re.match(r"# @package (\w+)", file.read_text())
    package = found[1] if found else group
    prefix = "" if package == "_global_" else f"{package}."
    base = [
        f"all of `{entry}`"
        for entry in tree.pop("defaults", [])
        if isinstance(entry, str) and entry != "_self_"
    ]
    return base + [
        f"`{path}={show(value)}`"
        for path, value in flatten({str(key): value for key, value in tree.items()}, prefix)
    ]


def _meaning_of(section: str) -> str:
    """First sentence of what the schema says of a section."""
    kind: Any = RunConfig
    for name in section.split(".") if section else ():
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
    return _first_sentence(kind)


def _first_sentence(kind: type[Section]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
