"""What is wrong with a user's yaml file, in our words, with the file and the line.

The messages of yaml, OmegaConf and hydra name their own classes and search paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError


def unreadable(conf: str, path: Path, error: Exception) -> str:
    """The problem of a file that is no yaml."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f"conf={conf}: cannot be read as yaml text; save it as UTF-8"
    number, problem = error.problem_mark.line, str(error.problem)
    if "duplicate key" in problem:
        reason = f"{problem.rpartition(' ')[2]} is set twice; remove one of them"
    elif r"'\t'" in problem:
        reason = "begins with a tab; indent with spaces"
    else:
        lines = [*path.read_text().splitlines(), ""]
        shown = lines[min(number, len(lines) - 1)].strip() or "the end of the file"
        reason = (
            f"not readable as yaml at {shown!r}; look for a bracket or a quote that is not"
            " closed, and for a missing colon, here and in the lines before"
        )
    return f"conf={conf}, line {number + 1}: {reason}"


def not_composed(conf: str, path: Path | None, error: Exception, known: Sequence[str]) -> str:
    """The problem of a file that names another one, or a setting, that does not exist.

    known: the files of conf/.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = error.options if group and error.options else known
        where = _place(conf, _line_with(path, name))
        return (
            f"{where}: defaults name {group or 'a file'} {name}, which does not exist; there are"
            f" {', '.join(options)}"
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        where = place(conf, path, str(error.full_key))
        return (
            f"{where}: the ${{...}} in {error.full_key} cannot be resolved; it must name a setting,"
            " as in ${num_steps}"
        )
    return f"conf={conf}: {' '.join(str(error).split())}"


def place(conf: str, path: Path | None, setting: str) -> str:
    """Return the file and the line that sets a setting, or the file alone."""
    node = None if path is None else yaml.compose(path.read_text())
    line = None
    for name in setting.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(key, value) for key, value in pairs if key.value == name]
        if not found:
            return _place(conf, line)
        line, node = found[-1][0].start_mark.line + 1, found[-1][1]
    return _place(conf, line)


def _place(conf: str, line: int | None) -> str:
    return f"conf={conf}" if line is None else f"conf={conf}, line {line}"


def _line_with(path: Path | None, text: str) -> int | None:
    lines = [] if path is None else path.read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if text in line), None)
