"""The choices of a configuration as a tree of dicts: their variants, and the values of parameters
that are not given.

conf/variants.yaml has the parameters of every variant.  In a tree a choice is the name of a
variant, or a mapping with the name as `kind` and some of its parameters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

import async_rl.conf

CONF_DIR = Path(async_rl.conf.__file__).resolve().parent
KIND = "kind"
"""Field of a section that names the variant of a choice."""
Tree = dict[str, Any]
_FUNCTION = "plugin"
"""The variant of a choice that is a function of the user's."""


@functools.cache
def variants() -> dict[str, dict[str, Tree]]:
    """The parameters of each variant by the path of its choice; `*` stands for any name."""
    # OmegaConf's reader, as for all of conf/: others take 1e-3 for text.
    tree = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "variants.yaml"))
    return msgspec.convert(tree, dict[str, dict[str, Tree]])


@functools.cache
def variants_of(path: str) -> Mapping[str, Tree] | None:
    """Return the variants of the choice at this path; None if it is not a choice."""
    names = path.split(".")
    for choice, by_kind in variants().items():
        expected = choice.split(".")
        if len(names) == len(expected) and all(
            want in (name, "*") for name, want in zip(names, expected, strict=True)
        ):
            return by_kind
    return None


def choices_first(values: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Sort settings for `put`: outer choices first, since each resets its parameters."""

    def rank(setting: tuple[str, Any]) -> tuple[bool, int]:
        path, value = setting
        # False sorts first. An inner choice belongs to a variant of the outer choice.
        return (False, path.count(".")) if is_choice(path, value) else (True, 0)

    return sorted(values, key=rank)


def is_choice(path: str, value: Any) -> bool:
    """Return whether setting this value at this path chooses a variant."""
    return isinstance(value, str) and variants_of(path.removesuffix(f".{KIND}")) is not None


def expand(tree: Tree) -> None:
    """In place: write every choice as a mapping, with the parameters that are not given."""
    for choice, by_kind in variants().items():
        *parents, leaf = choice.split(".")
        for parent in _nodes(tree, parents):
            # list: the loop replaces entries of the mapping.
            for name in list(parent) if leaf == "*" else [leaf]:
                node = _as_mapping(parent.get(name))
                if isinstance(node, dict) and _FUNCTION in by_kind:
                    node = _with_function(node, by_kind)
                if isinstance(node, dict) and node.get(KIND) in by_kind:
                    # deepcopy: `variants` is cached, and later overrides change the tree in place.
                    given = {KIND: node[KIND], **copy.deepcopy(by_kind[node[KIND]])}
                    parent[name] = merged(given, node)


def _with_function(node: Tree, by_kind: Mapping[str, Tree]) -> Tree:
    """A choice of `module:function` chooses the plug-in of that name."""
    kind = node.get(KIND)
    is_function = isinstance(kind, str) and ":" in kind and kind not in by_kind
    return {**node, KIND: _FUNCTION, "fn": kind} if is_function else node


def merged(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Return `base` with the values of `over`; a mapping for a choice keeps the chosen variant."""
    result = dict(base)
    for name, value in over.items():
        before = _as_mapping(result.get(name))
        # A list is replaced as a whole, as hydra does: nobody expects files to be appended.
        if isinstance(value, Mapping) and isinstance(before, dict):
            result[name] = merged(before, value)
        else:
            result[name] = value
    return result


def put(tree: Tree, path: str, value: Any) -> None:
    """In place: set one value; the name of another variant replaces the choice with its
    parameters.
    """
    choice = path.removesuffix(f".{KIND}")
    *parents, leaf = choice.split(".")
    node = tree
    for name in parents:
        child = _as_mapping(node.get(name))
        node[name] = child if isinstance(child, dict) else {}
        node = node[name]
    before = _as_mapping(node.get(leaf))
    if is_choice(choice, value) and isinstance(before, dict) and before.get(KIND) == value:
        return  # a file may have set parameters of the variant that the command line names again
    # A mapping without `kind` changes parameters of the present variant; with `kind` it replaces
    # the variant and all of its parameters.
    is_change = isinstance(value, dict) and isinstance(before, dict) and KIND not in value
    node[leaf] = merged(before, value) if is_change else value


def value_at(tree: Any, path: str) -> Any:
    """The value of a setting or section; None where it is missing."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def drop_if_foreign(tree: Tree, path: str) -> str | None:
    """In place: remove the value at a path if a choice above it has chosen a variant without it.

    Returns that choice as `path=variant`; None if the value belongs there.
    """
    names = path.split(".")
    for depth in range(1, len(names)):
        choice = ".".join(names[:depth])
        node = next(_nodes(tree, names[:depth]), None)
        by_kind = variants_of(choice)
        # An unknown variant is reported by the schema, which has the better message.
        if by_kind is None or node is None or node.get(KIND) not in by_kind:
            continue
        # Only the first part below the choice can be foreign: deeper parts belong to inner choices.
        if names[depth] != KIND and names[depth] not in by_kind[node[KIND]]:
            node.pop(names[depth], None)
            return f"{choice}={node[KIND]}"
    return None


def _as_mapping(value: Any) -> Any:
    return {KIND: value} if isinstance(value, str) else value


def _nodes(tree: Any, names: list[str]) -> Iterator[Tree]:
    """Yield the mappings at a path; `*` in the path stands for any name."""
    if not isinstance(tree, dict):
        return
    if not names:
        yield tree
        return
    for name in list(tree) if names[0] == "*" else names[:1]:
        yield from _nodes(tree.get(name), names[1:])
