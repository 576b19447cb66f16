"""The choices of a configuration as a tree of dicts: their variants, and the values of parameters
that are not given.

conf/variants.yaml has the parameters of every variant.  In a tree a choice is the name of a
variant, or a mapping with the name as `kind` and some of its parameters.
"""

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

import async_rl.conf
from async_rl.composition.schema import KIND, find

CONF_DIR = Path(async_rl.conf.__file__).resolve().parent
Tree = dict[str, Any]
FUNCTION = "plugin"
"""The variant of a choice that is a function of the user's."""


@functools.cache
def variants() -> dict[str, dict[str, Tree]]:
    """The parameters of each variant by the path of its choice; `*` stands for any name."""
    # OmegaConf's reader, as for all of conf/: others take 1e-3 for text.
    tree = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "variants.yaml"))
    return msgspec.convert(tree, dict[str, dict[str, Tree]])


def choices_first(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Sort settings for `put`: outer choices first, since each resets its parameters."""

    def rank(setting: tuple[str, Any]) -> float:
        path, value = setting
        # An inner choice belongs to a variant of the outer choice.
        return path.count(".") if _is_choice(path, value) else math.inf

    return dict(sorted(values, key=rank))


def _is_choice(path: str, value: Any) -> bool:
    """Return whether setting this value at this path chooses a variant."""
    setting = find(path)
    return isinstance(value, str) and setting is not None and setting.choices != ()


def put(tree: Tree, path: str, value: Any) -> None:
    """In place: set one value; the name of another variant removes the parameters of a choice."""
    *parents, leaf = path.split(".")
    for name in parents:
        child = _as_mapping(tree.get(name))
        tree[name] = child if isinstance(child, dict) else {}
        tree = tree[name]
    before = _as_mapping(tree.get(leaf))
    # A file may have set parameters of the variant that the command line names again: they stay.
    if not (_is_choice(path, value) and isinstance(before, dict) and before.get(KIND) == value):
        tree[leaf] = value


def expand(tree: Tree) -> None:
    """In place: write every choice as a mapping, with the parameters that are not given."""
    # variants.yaml lists an outer choice before the choices inside its variants.
    for choice, by_kind in variants().items():
        place, _, leaf = choice.rpartition(".")
        parent = value_at(tree, place)
        if not isinstance(parent, dict):
            continue
        # list: the loop replaces entries of the mapping.
        for name in list(parent) if leaf == "*" else [leaf]:
            node = _as_mapping(parent.get(name))
            if isinstance(node, dict):
                parent[name] = _complete(node, by_kind)


def _complete(node: Tree, by_kind: dict[str, Tree]) -> Tree:
    """A choice with the parameters of its variant that are not given."""
    kind = node.get(KIND)
    # `module:function` chooses the plug-in of that name.
    if isinstance(kind, str) and ":" in kind and FUNCTION in by_kind:
        node = {**node, KIND: FUNCTION, "fn": kind}
    # An unknown variant is left to the schema. A copy, because `put` changes trees in place.
    defaults = copy.deepcopy(by_kind.get(str(node.get(KIND)), {}))
    for name, default in defaults.items():
        given = node.get(name)
        if name not in node:
            node[name] = default
        elif isinstance(given, dict) and isinstance(default, str):
            # An inner choice of which only parameters are given has the usual variant.
            node[name] = {KIND: default, **given}
    return node


def _as_mapping(value: Any) -> Any:
    return {KIND: value} if isinstance(value, str) else value


def value_at(tree: Any, path: str) -> Any:
    """The value of a setting or section; None where it is missing. An empty path is the tree."""
    for name in filter(None, path.split(".")):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree
