"""The settings that differ between two configurations."""

from __future__ import annotations

from async_rl.composition import schema
from async_rl.config.base import as_builtins
from async_rl.config.run import RunConfig

Changes = dict[str, tuple[object, object]]


def changes(before: RunConfig, after: RunConfig) -> Changes:
    """Return the settings that differ, by path: the old value and the new one."""
    # By path, so that a parameter of a variant that only one of the two chose counts as a change.
    old = dict(schema.flatten(as_builtins(before)))
    new = dict(schema.flatten(as_builtins(after)))
    paths = {**old, **new}
    return {
        path: (old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path)
    }
