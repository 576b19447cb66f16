"""What the product calls exists, with the parameters that it passes, in the installed torch,
transformers and vLLM, and in the oldest and newest allowed versions, whose signatures are recorded.
"""

import functools
import importlib.util
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from signatures import PACKAGES, RECORD, ROOT, Signatures, calls, problems, signatures


@functools.cache
def installed(package: str) -> Signatures:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return signatures(Path(spec.origin).parent)


def recorded() -> dict[str, Signatures]:
    return tomllib.loads(RECORD.read_text())


def required(package: str) -> Requirement:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [found] = [
        line
        for line in map(Requirement, extras["optional-dependencies"]["train"])
        if line.name == package
    ]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_version_takes_what_the_product_passes(package: str) -> None:
    assert problems(installed(package), package) == []


@pytest.mark.parametrize("version", recorded())
def test_an_allowed_version_has_and_takes_what_the_installed_one_does(version: str) -> None:
    package, _, number = version.partition(" ")
    if not required(package).specifier.contains(number):
        return
    here, there = installed(package), recorded()[version]
    assert set(here) <= set(there), f"record {version} again, or raise the bound"
    assert problems(there, package) == []
    assert set(here[f"{package}.members"][0]) == set(there[f"{package}.members"][0])


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_oldest_allowed_version_is_installed_or_recorded(package: str) -> None:
    [oldest] = [s.version for s in required(package).specifier if s.operator == ">="]
    numbers = [key.split()[1] for key in recorded() if key.startswith(f"{package} ")]
    releases = [Version(number).release[:2] for number in (*numbers, metadata.version(package))]
    assert Version(oldest).release[:2] in releases


def test_a_parameter_that_a_version_lacks_is_reported() -> None:
    name = "torch.distributed.fsdp.fully_shard"
    assert {"mesh", "mp_policy", "offload_policy"} <= calls()[name]
    changed = dict(installed("torch"))
    changed[name] = [[word for word in changed[name][0] if word != "mesh"]]
    assert problems(changed, "torch") == [f"{name} takes no mesh"]
