"""The page docs/configuration.md: every setting with unit, range, value in conf/ and meaning,
generated from the schema and the files of conf/.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from async_rl.launchers.configuration.compose import CONF_DIR, as_written, names
from async_rl.launchers.configuration.schema import (
    Setting,
    Spec,
    entry_of,
    flatten,
    mappings,
    section_specs,
    settings,
    show,
    span,
)

_HEAD = """# Configuration

`make docs` generates this page from the schema (`async_rl/config/run.py` and the files it imports)
and from `conf/`; edit those. A run is composed of `conf/base.yaml`, one file of each group below,
and `key=value` on the command line, which has precedence. `async-rl launch conf=ppo_code --dry-run`
shows the result; the error of an unknown key names the most similar key, that of a wrong value its
range. The column *value* has the values of {confs}; where they differ, each is named. Text in
`${{...}}` is computed for the machine."""
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


def settings_page() -> str:
    """The whole page."""
    written = {conf: dict(flatten(as_written(conf))) for conf in names()}
    parts = [_HEAD.format(confs=" and ".join(f"`conf={conf}`" for conf in written))]
    for section, members in itertools.groupby(
        settings().values(), key=lambda s: s.path.rpartition(".")[0]
    ):
        listed = list(members)
        parts.append(f"\n## {section or 'The run'}\n\n{_meaning_of(section_specs()[section])}\n")
        rows = [
            (f"`{s.path}`", unit(s), span(s.spec), _values(s, written), s.description)
            for s in listed
        ]
        parts.append(table(("setting", "unit", "range", "value", "meaning"), rows))
        for place in [s.path for s in listed if s.path in mappings()]:
            inner = entry_of(f"{place}.NAME").values()
            parts.append(f"\n## {place}.NAME\n\n{_meaning_of(mappings()[place])}\n")
            rows = [
                (
                    f"`{s.path}`",
                    unit(s),
                    span(s.spec),
                    "required" if s.is_required else "",
                    s.description,
                )
                for s in inner
            ]
            parts.append(table(("setting", "unit", "range", "value", "meaning"), rows))
    for group in sorted({path.parent.name for path in CONF_DIR.glob("*/*.yaml")}):
        parts.append(
            f"\n## The group `{group}`\n\n`{group}=NAME` selects one of these files; the table"
            " lists the values that each file sets.\n"
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
    if "number" not in span(setting.spec):
        return ""
    return next((unit for ending, unit in _UNITS.items() if setting.path.endswith(ending)), "")


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


def _meaning_of(section: Spec) -> str:
    """The first line of the docstring of a section."""
    return str(section.get("description", "")).partition("\n")[0]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
