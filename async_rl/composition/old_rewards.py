"""The settings of reward functions before the present release, as terms of the reward."""

from __future__ import annotations

from typing import Any

from async_rl.composition.choices import ABSENT, KIND, Tree, pop, value_at
from async_rl.config.plugins import short_name

OLD = ("fn", "fns", "weights", "by_source", "model", "remote")
"""Settings and sections of `reward` that the terms replace."""
_PROVIDED = ("tests", "xml_format", "length", "reward_model", "remote")


def with_terms(tree: Tree) -> list[tuple[str, str]]:
    """In name: write the old settings as terms. Return the old and the new name of each that had
    an effect.
    """
    given = {name: value for name in OLD if (value := pop(tree, f"reward.{name}")) is not ABSENT}
    if not given:
        return []
    terms = dict(value_at(tree, "reward.terms") or {})
    names = given.get("fns") or [given[name] for name in ("fn",) if given.get(name)]
    if isinstance(names, str):
        names = [names]
    if names:
        terms = {name: term for name, term in terms.items() if _sources(term)}
    weights = given.get("weights") or [1.0] * len(names)
    for name, weight in zip(names, weights, strict=False):
        terms[short_name(name)] = {**_term(name), "weight": weight}
    for line in given.get("by_source") or []:
        source, _, function = line.partition("=")
        name = short_name(function)
        if name in terms and not _sources(terms[name]):
            name = f"{name}_of_source"
        sources = [*_sources(terms.get(name, {})), source]
        terms[name] = {**_term(function), "sources": sources}
    for section, kind in (("model", "reward_model"), ("remote", "remote")):
        for name, term in terms.items():
            if isinstance(term, dict) and term.get(KIND) == kind:
                terms[name] = {**term, **given.get(section, {})}
    # The file of an older run has no terms, and the schema no defaults.
    tree.setdefault("reward", {})["terms"] = terms
    had_effect = [name for name in ("fn", "fns", "by_source") if given.get(name)]
    return [(f"reward.{name}", "reward.terms") for name in had_effect]


def _term(name: str) -> Tree:
    return {KIND: name} if name in _PROVIDED else {KIND: "plugin", "fn": name}


def _sources(term: Any) -> list[str]:
    return list(term.get("sources", [])) if isinstance(term, dict) else []
