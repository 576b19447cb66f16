"""Names of settings before the present release: still accepted, with a warning that names the new.

old_names.yaml has the names.  A removed setting is left out with a warning that says what decides
now, or refused if it changed results; in the config.yaml of an older run it is left out.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

from async_rl.composition.choices import (
    ABSENT,
    KIND,
    Tree,
    drop_if_foreign,
    expand,
    pop,
    put,
    value_at,
)
from async_rl.composition.old_rewards import OLD, with_terms
from async_rl.core.errors import ConfigError

log = logging.getLogger("async_rl")


class _Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: str
    harmless: list[Any] = []


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    renamed: dict[str, str]
    values: dict[str, dict[Any, Tree]]
    chooses: dict[str, Tree]
    needs: dict[str, str]
    removed: dict[str, str]
    refused: dict[str, _Refusal]
    added: dict[str, Any]


@functools.cache
def table() -> _Table:
    """The content of old_names.yaml."""
    text = resources.files(__package__).joinpath("old_names.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=_Table)


def is_old(path: str) -> bool:
    """Return whether this setting, or the section it is in, has another name now or is removed."""
    rewards = [f"reward.{name}" for name in OLD]
    table_names = (*table().renamed, *table().values, *table().removed, *table().refused)
    names = (*table_names, *rewards)
    return any(path == name or path.startswith(f"{name}.") for name in names)


def present_name(path: str) -> str:
    """Return the name of a setting in this release; the path itself if it was not renamed."""
    return table().renamed.get(path, path)


def removal(path: str) -> str | None:
    """Why a setting of an earlier release is gone; None for other paths."""
    parts = path.split(".")
    prefixes = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    refused = table().refused
    return next((refused[prefix].reason for prefix in prefixes if prefix in refused), None)


def with_new_names(
    tree: Mapping[str, Any],
) -> Tree:
    """Return a copy of a configuration in the form of this release, and log what changed.

    A parameter that the chosen variant does not have is left out, since it had no effect.  Removed
    settings that changed results stay, so that the schema refuses them with the reason.
    """
    present, warnings = translated(tree)
    for warning in warnings:
        log.warning("%s", warning)
    return present


def translated(tree: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """As `with_new_names`, with the warnings. Raises ConfigError for a setting that had no effect
    and would have one now.
    """
    present, placed = _renamed(tree)
    warnings = []
    for old, new in placed:
        choice = drop_if_foreign(present, new)
        remark = f", and {choice} has no such parameter" if choice else ""
        warnings.append(
            f"{old} is now called {new}{remark}; the old name works in this release only"
        )
    for old, refusal in table().refused.items():
        value = pop(present, old)
        if value is not ABSENT and value not in refusal.harmless:
            put(present, old, value)
    for old, reason in table().removed.items():
        if pop(present, old) is not ABSENT:
            warnings.append(f"{old} is no longer a setting and is left out: {reason}")
    return present, warnings


def modernized(
    tree: Mapping[str, Any],
) -> Tree:
    """Return a copy of the configuration of an older run in the form of this release.

    Its file names every setting, most of them with their defaults, so removed ones are dropped.
    """
    present, placed = _renamed(tree)
    for path in (*table().removed, *table().refused):
        pop(present, path)
    for path, value in table().added.items():
        if value_at(present, path) is None:
            put(present, path, value)
            drop_if_foreign(present, path)
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
    now = modernized(tree)
    for path, refusal in table().refused.items():
        value, harmless = value_at(tree, path), refusal.harmless
        _, is_of_critic, name = path.partition(".critic.optimizer.")
        remark = refusal.reason
        if is_of_critic:
            present = value_at(now, f"learner.optimizer.{name}")
            # The file of an older run has the optimizer of a critic even if it trained none.
            is_used = value_at(now, "algorithm.advantage.critic") is not None
            harmless = [present] if is_used else [value]
            remark = f"is {present} now, because {refusal.reason}"
        # A section without a harmless value is a constant of this release, whatever its values.
        if value is not None and harmless and value not in harmless:
            raise ConfigError(
                f"{path}={value}: {remark}; resume the run with the version that began it, or"
                " delete the line from its config.yaml to continue with the present value"
            )


def _renamed(
    tree: Mapping[str, Any],
) -> tuple[Tree, list[tuple[str, str]]]:
    """Return the tree with new names, and the old and the new name of each setting found."""
    present, names = copy.deepcopy(dict(tree)), table()
    every = dict.fromkeys((*names.renamed, *names.values))
    given = {old: value for old in every if (value := pop(present, old)) is not ABSENT}
    _require_effect(present, given)
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
            name = new.removesuffix("?")
            if name == new or value_at(present, name) is None:
                put(present, name, value)
            placed.append((old, name))
    placed += with_terms(present)
    if placed:
        expand(present)
    return present, placed


def _require_effect(tree: Tree, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an old choice that had no effect because another setting was missing,
    if the present choice would have an effect without it.
    """
    for old, needed in table().needs.items():
        new = table().renamed[old]
        off = {KIND: "none"}
        if old in given and needed not in given and value_at(tree, new) in (off, off[KIND]):
            raise ConfigError(
                f"{old}={given[old]}: had no effect without {needed}, and {new}={given[old]} has"
                f" one; leave {old} out, or set {new}={given[old]} and {table().renamed[needed]}"
            )
