"""The functions and classes of torch, transformers and vLLM that the product calls, and their
parameters in some version, both read from source without importing a package.

    python tests/packaging/signatures.py torch-2.14.1-*.whl transformers-5.0.0-*.whl ...

records in signatures.toml the parameters in the wheels of other versions than the installed ones.
Functions written in C++ (`torch.cat`) have no source in a wheel and are not compared.
"""

import ast
import collections
import functools
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".toml")
PACKAGES = ("torch", "transformers", "vllm")
ANY = "**"
"""Stands for a parameter that takes any keyword."""
_MODELS = ("lm", "PreTrainedModel")
"""Variables of async_rl/learner/ that hold a model of transformers, and the class."""
Signatures = dict[str, list[list[str]]]
"""The parameters of each definition of a name, by the name."""


@functools.cache
def calls() -> dict[str, set[str]]:
    """Return the imported names of the packages, and the keywords that calls pass to each."""
    found: collections.defaultdict[str, set[str]] = collections.defaultdict(set)
    for path in sorted([*ROOT.glob("async_rl/**/*.py"), *ROOT.glob("launchers/**/*.py")]):
        tree = ast.parse(path.read_text())
        names: dict[str, str] = {}
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in PACKAGES:
                    names |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
                case ast.Import():
                    own = [a for a in node.names if a.name.partition(".")[0] in PACKAGES]
                    names |= {a.asname or a.name: a.name for a in own}
        for name in names.values():
            found[name] |= set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            first, _, rest = ast.unparse(node.func).partition(".")
            if first in names:
                dotted = ".".join(filter(None, [names[first], rest]))
                found[dotted] |= {word.arg for word in node.keywords if word.arg is not None}
    return dict(found)


@functools.cache
def model_attributes() -> set[str]:
    """Return the attributes of models that the learner reads."""
    found = set()
    for path in ROOT.glob("async_rl/learner/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                holder = node.value
                name = holder.attr if isinstance(holder, ast.Attribute) else ast.unparse(holder)
                if name == _MODELS[0]:
                    found.add(node.attr)
    return found


def sources(tree: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield path and text of the Python files of a wheel or of an installed package, whose paths
    have one of these prefixes.
    """
    if tree.is_dir():
        for path in tree.rglob("*.py"):
            name = str(path.relative_to(tree.parent))
            if name.startswith(prefixes):
                yield name, path.read_text()
        return
    with zipfile.ZipFile(tree) as wheel:
        for name in wheel.namelist():
            if name.endswith(".py") and name.startswith(prefixes):
                yield name, wheel.read(name).decode()


def signatures(tree: Path) -> Signatures:
    """Return the parameters of the called names in a package, of each definition of the name in
    or below the module that exports it.
    """
    package = tree.name.partition("-")[0]
    called = calls()
    wanted = {n for n in called if n.startswith(f"{package}.") and re.fullmatch(r"[\w.]+", n)}
    # `torch.cat` and the like are C++; functions of the same name serve compilers and exporters.
    wanted -= {name for name in wanted if package == "torch" and name.count(".") == 1}
    by_last: dict[str, list[str]] = collections.defaultdict(list)
    for name in wanted:
        by_last[name.rpartition(".")[2]].append(name)
    pattern = re.compile(rf"^(?:def|class) ({'|'.join(by_last)})\b", re.M)
    found: collections.defaultdict[str, list[list[str]]] = collections.defaultdict(list)
    members: set[str] = set()
    with_members = ("transformers/modeling_utils.py", "torch/nn/modules/module.py")
    modules = {name.rpartition(".")[0].replace(".", "/") for name in wanted}
    for path, text in sources(tree, (*with_members, *modules)):
        if path in with_members:
            # Methods of mixins count: their file is that of the class.
            members |= set(re.findall(r"(?:def |self\.|^    )(\w+)", text, re.M))
        if not pattern.search(text):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                for name in by_last.get(node.name, ()):
                    if path.startswith(name.rpartition(".")[0].replace(".", "/")):
                        # Where no keyword is passed, the name alone counts.
                        form = _parameters(node) if called[name] else [ANY]
                        found[name] += [form] if form not in found[name] else []
    found[f"{package}.members"] = [sorted(members & model_attributes())]
    return {name: sorted(found[name]) for name in sorted(found)}


def _parameters(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.ClassDef):
        made = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
        if made:
            return _parameters(made[0])
        # A dataclass, or a class whose base has the parameters.
        fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]  # type: ignore[union-attr]
        return fields if not node.bases else [*fields, ANY]
    given = node.args
    names = [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [*names, ANY] if given.kwarg else names


def problems(found: Mapping[str, list[list[str]]], package: str) -> list[str]:
    """Return the names that a version lacks, and the keywords that no definition of a name takes.

    found: the signatures of that version. A name without source in any version is not compared.
    """
    lacking = []
    for name, keywords in calls().items():
        if not name.startswith(f"{package}.") or not found.get(name):
            continue
        if not any(ANY in taken or keywords <= set(taken) for taken in found[name]):
            least = min(found[name], key=lambda taken: len(keywords - set(taken)))
            lacking.append(f"{name} takes no {', '.join(sorted(keywords - set(least)))}")
    return lacking


def main(wheels: list[str]) -> None:
    """Write the record."""
    lines = []
    for wheel in map(Path, wheels):
        package, version, *_ = wheel.name.split("-")
        lines.append(f'["{package} {version}"]')
        lines += [f"{json.dumps(n)} = {json.dumps(p)}" for n, p in signatures(wheel).items()]
    RECORD.write_text("\n".join(["# Written by tests/packaging/signatures.py.", *lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
