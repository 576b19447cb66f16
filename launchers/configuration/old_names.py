"""Names of settings before the present release: still accepted, with a warning that names the new.

A renamed setting keeps its meaning.  A removed one is an error on the command line, with the
reason; in the config.yaml of an older run it is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("async_rl")

RENAMED = {
    "network.call_timeout_s": "timeouts.call_s",
    "supervisor.start_timeout_s": "timeouts.start_s",
    "supervisor.stop_timeout_s": "timeouts.stop_s",
    "generation.timeout_s": "timeouts.group_s",
    "supervisor.stall_timeout_s": "timeouts.stall_s",
}
_FULL_SUPPORT = "sampling always uses the full vocabulary, whose log-probs the learner computes"
_EMBEDDED = "it is a constant of async_rl/data/embedded.py"
REMOVED = {
    "supervisor.heartbeat_s": "it is timeouts.call_s / 10, at most 1 s",
    "supervisor.heartbeat_timeout_s": "it is 1.5 timeouts.call_s",
    "supervisor.restart_window_s": "it is 300 s, or 2 timeouts.start_s if that is more",
    "supervisor.stall_warning_s": "it is timeouts.stall_s / 30",
    "buffer.lease_timeout_s": "it is 3 timeouts.call_s",
    "generators.drain_timeout_s": "it is timeouts.group_s / 4",
    "generators.autoscale.interval_s": "it is 3 timeouts.call_s",
    "learner.take_timeout_s": "it is timeouts.stall_s / 3",
    "reward.load_timeout_s": "it is 2/3 of timeouts.start_s",
    "slurm.stop_before_s": "it is 2 timeouts.stop_s",
    "verifiers.timeout_s": "it is timeouts.group_s / 4",
    "weights.deadline_s": "it is timeouts.start_s / 3",
    "weights.rest_deadline_s": "it is timeouts.start_s / 6",
    "generation.top_p": _FULL_SUPPORT,
    "generation.top_k": _FULL_SUPPORT,
    "generation.min_response_tokens": _FULL_SUPPORT,
    "model.tiny_coder": _EMBEDDED,
    "data.list_functions": _EMBEDDED,
}


def renamed(override: str) -> str:
    """The override under the present name of its setting."""
    key, equals, value = override.partition("=")
    if key not in RENAMED:
        return override
    log.warning("%s is now called %s; the old name works in this release only", key, RENAMED[key])
    return f"{RENAMED[key]}{equals}{value}"


def removal(path: str) -> str | None:
    """Why a setting of an earlier release is gone; None for other paths."""
    parts = path.split(".")
    prefixes = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return next((REMOVED[prefix] for prefix in prefixes if prefix in REMOVED), None)


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration in which renamed settings have their new names.

    Removed settings stay, so that the schema refuses them with the reason.
    """
    present = _copied(tree)
    for old, new in RENAMED.items():
        value = _pop(present, old)
        if value is None:
            continue
        log.warning("%s is now called %s; the old name works in this release only", old, new)
        node = present
        *parents, leaf = new.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return present


def modernized(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the configuration of an older run in the form of this release.

    Its file names every setting, most of them with their defaults, so removed ones are dropped.
    """
    present = _copied(tree)
    for path in REMOVED:
        _pop(present, path)
    return with_new_names(present)


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()
    }


def _pop(tree: dict[str, Any], path: str) -> Any:
    """Take the value at a path out of the tree; None if there is none."""
    *parents, leaf = path.split(".")
    node: Any = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    return node.pop(leaf, None) if isinstance(node, dict) else None
