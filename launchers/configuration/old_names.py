"""Names of settings before the present release: still accepted, with a warning that names the new.

old_names.yaml has the names.  A removed setting is an error on the command line and in a file, with
the reason; in the config.yaml of an older run it is left out.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

from async_rl.core.errors import ConfigError
from async_rl.launchers.configuration.choices import ABSENT, Tree, drop_if_foreign, expand, pop, put

log = logging.getLogger("async_rl")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    renamed: dict[str, str]
    values: dict[str, dict[Any, Tree]]
    chooses: dict[str, Tree]
    removed: dict[str, str]


@functools.cache
def table() -> _Table:
    """The content of old_names.yaml."""
    text = resources.files(__package__).joinpath("old_names.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=_Table)


def is_old(path: str) -> bool:
    """Return whether this setting, or a setting in this section, has another name now."""
    names = (*table().renamed, *table().values)
    return any(path == name or path.startswith(f"{name}.") for name in names)


def removal(path: str) -> str | None:
    """Why a setting of an earlier release is gone; None for other paths."""
    parts = path.split(".")
    prefixes = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    removed = table().removed
    return next((removed[prefix] for prefix in prefixes if prefix in removed), None)


def with_new_names(
    tree: Mapping[str, Any],
) -> Tree:
    """Return a copy of a configuration in which renamed settings have their new names.

    A parameter that the chosen variant does not have is left out, since it had no effect.  Removed
    settings stay, so that the schema refuses them with the reason.
    """
    present, placed = _renamed(tree)
    for old, new in placed:
        choice = drop_if_foreign(present, new)
        if choice is None:
            log.warning("%s is now called %s; the old name works in this release only", old, new)
        else:
            log.warning("%s is now called %s, and %s has no such parameter", old, new, choice)
    return present


def modernized(
    tree: Mapping[str, Any],
) -> Tree:
    """Return a copy of the configuration of an older run in the form of this release.

    Its file names every setting, most of them with their defaults, so removed ones are dropped.
    """
    present, placed = _renamed(tree)
    for path in table().removed:
        pop(present, path)
    for _, new in placed:
        drop_if_foreign(present, new)
    return present


def require_same_objective(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for an older run with an objective that this release no longer has. It can
    be read, but to continue it with another estimator would change its objective half-way.
    """
    algorithm = tree.get("algorithm") or {}
    estimator = algorithm.get("kl_estimator", "k1")
    is_in_reward = algorithm.get("kl_placement") == "reward" and algorithm.get("kl_coef", 0) > 0
    if is_in_reward and estimator != "k1":
        raise ConfigError(
            f"algorithm.kl_estimator={estimator} with algorithm.kl_placement=reward does not hold"
            " the policy to the reference, and this release has only k1 there; resume the run with"
            " the version that began it, or start a new one with algorithm.kl=loss"
        )


def _renamed(
    tree: Mapping[str, Any],
) -> tuple[Tree, list[tuple[str, str]]]:
    """Return the tree with new names, and the old and the new name of each setting found."""
    present, names = copy.deepcopy(dict(tree)), table()
    every = dict.fromkeys((*names.renamed, *names.values))
    given = {old: value for old in every if (value := pop(present, old)) is not ABSENT}
    placed: list[tuple[str, str]] = []
    special = [old for old in names.values if old in given and given[old] in names.values[old]]
    for old, new in names.renamed.items():
        if old not in given or old in special:
            continue
        put(present, new, given[old])
        for choice, variant in names.chooses.get(old, {}).items():
            if drop_if_foreign(present, new) is not None:
                put(present, choice, variant)
                put(present, new, given[old])
        placed.append((old, new))
    for old in special:
        for new, value in names.values[old][given[old]].items():
            put(present, new, value)
            placed.append((old, new))
    if placed:
        expand(present)
    return present, placed
