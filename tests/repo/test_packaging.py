"""The lock, the project file and the folders agree."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT, name, product

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = [
    line
    for line in (ROOT / "requirements/cpu.lock").read_text().splitlines()
    if line and not line.startswith("#")
]
PINS = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in LOCK}


def test_every_line_of_the_lock_is_one_exact_version() -> None:
    assert [
        line for line in LOCK if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line)
    ] == []
    assert sorted(LOCK, key=str.lower) == LOCK
    assert len(PINS) == len(LOCK)


@pytest.mark.parametrize("extra", ["", "cpu", "dev", "docs"])
def test_the_lock_satisfies_what_the_project_asks_for(extra: str) -> None:
    project = PROJECT["project"]
    wanted = [
        Requirement(line)
        for line in (project["optional-dependencies"][extra] if extra else project["dependencies"])
    ]
    wrong = [
        str(r)
        for r in wanted
        if not r.specifier.contains(PINS.get(canonicalize_name(r.name), "0"), prereleases=True)
    ]
    assert wrong == []


def test_the_build_tool_is_the_one_in_the_lock() -> None:
    (requirement,) = PROJECT["build-system"]["requires"]
    assert requirement == f"setuptools=={PINS['setuptools']}"


def test_the_environment_is_the_one_in_the_lock() -> None:
    installed = {canonicalize_name(d.metadata["Name"]): d.version for d in metadata.distributions()}
    assert {n: (installed.get(n), pin) for n, pin in PINS.items() if installed.get(n) != pin} == {}


def test_every_package_of_the_product_is_installed() -> None:
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    folders = {
        (
            p.removeprefix("async_rl.").replace(".", "/")
            if ".".join(p.split(".")[:2]) in mapped
            else p.replace(".", "/")
        )
        for p in PROJECT["tool"]["setuptools"]["packages"]
    }
    assert folders == {name(path.parent) for path in product() if path.name == "__init__.py"}
    assert folders == {name(path.parent) for path in product()}
