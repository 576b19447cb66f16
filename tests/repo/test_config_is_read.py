"""Every setting means something: it is described, and product code reads it."""

import ast
import functools
import re

import pytest
from repository import ROOT, name, product, syntax

from async_rl.composition.schema import settings
from docs.generate.settings import section_specs

MAX_SETTINGS = 170
# They declare settings, compare them or show what follows from them; none of that is a use.
NOT_A_USE = re.compile(
    r"async_rl/config/(checks/|(run|base|algorithm|launchers|data|learner|generation|rewards|rollout|timeouts)\.py)"
    r"|async_rl/planning/(estimate|fit)\.py|async_rl/composition/(plan|preflight|compose)\.py"
)


@functools.cache
def product_files() -> list[tuple[str, frozenset[str]]]:
    """(text, attributes that are read as values) of each file of product code."""
    texts = [path.read_text() for path in product() if not NOT_A_USE.match(name(path))]
    return [(text, read_attributes(text)) for text in texts]


def read_attributes(text: str) -> frozenset[str]:
    """Names x of all `object.x` that are neither called (methods) nor assigned, and of patterns."""
    nodes = list(ast.walk(ast.parse(text)))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    reads = (
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and id(node) not in called
    )
    # `case Loss(clip_low=low)` reads the attribute too.
    matched = (
        name for node in nodes if isinstance(node, ast.MatchClass) for name in node.kwd_attrs
    )
    return frozenset({*(node.attr for node in reads), *matched})


def section_classes(path: str) -> list[str]:
    """Names of the schema's classes that may hold the setting."""
    place, _, leaf = path.rpartition(".")
    return [str(spec["title"]) for spec in section_specs()[place] if leaf in spec["properties"]]


@functools.cache
def properties() -> dict[tuple[str, str], frozenset[str]]:
    """(class, property) of the schema, and the attributes that the property reads."""
    return {
        (section.name, function.name): read_attributes(ast.unparse(function))
        for path in (ROOT / "async_rl" / "config").glob("*.py")
        for section in syntax(path).body
        if isinstance(section, ast.ClassDef)
        for function in section.body
        if isinstance(function, ast.FunctionDef)
    }


def is_read(path: str) -> bool:
    """Whether a file that has to do with the setting's section reads an attribute of the setting's
    name, or a property of the section that does. A file may reach the section by a property.
    """
    parents, _, leaf = path.rpartition(".")
    section = parents.rpartition(".")[2]
    names = readers(section_classes(path), leaf)
    mention = rf"\b({'|'.join(section_classes(path))})\b"
    if section:
        mention += rf"|\.({'|'.join(readers(section_classes(parents), section))})\b"
    else:
        mention += rf"|\bconfig\.({'|'.join(names)})\b"
    return any(names & reads and re.search(mention, text) for text, reads in product_files())


def readers(classes: list[str], attribute: str) -> set[str]:
    """The attribute, and the properties of these classes that read it."""
    found = (
        name
        for (owner, name), reads in properties().items()
        if owner in classes and attribute in reads
    )
    return {attribute, *found}


@pytest.mark.parametrize("path", list(settings()))
def test_setting_is_read_by_product_code(path: str) -> None:
    assert is_read(path), f"{path} is read nowhere; read it or remove it"


def test_there_are_few_enough_settings_to_know() -> None:
    """Settings of entries of generators.pools (12) and reward.terms (15) have no fixed path."""
    assert len(settings()) <= MAX_SETTINGS


def test_settings_are_described_in_words() -> None:
    assert [path for path, setting in settings().items() if len(setting.description) < 4] == []


def test_a_method_of_the_same_name_is_not_a_use() -> None:
    assert read_attributes("rng.shuffle(xs)\na.shuffle = b.seed\n") == {"seed"}
