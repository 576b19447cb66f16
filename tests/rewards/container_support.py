"""A root file system of this machine's own files, and an engine that runs containers of it."""

import asyncio
import glob
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from async_rl.core.types import ContainerTest, StdinTest, Verdict
from async_rl.rewards.verifier.container_run import judge_contained
from async_rl.rewards.verifier.containers import Containers
from async_rl.rewards.verifier.outcomes import Ruling
from async_rl.rewards.verifier.program import Limits
from async_rl.rewards.verifier.protocol import TestResult

T = TypeVar("T")
LIMITS = Limits(cpu_s=1, memory_bytes=1 << 28, output_bytes=1 << 16)
IMAGE = "python"
PYTHON = ["/usr/bin/python3", "-B", "/work/solution.py"]
PYTEST = [
    "/usr/bin/python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider",
    "--junitxml=/work/report.xml", "/work",
]  # fmt: skip
_TOOLS = ("sh", "cat", "ls", "sleep")
_PACKAGES = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")
_LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "idlelib", "tkinter", "__pycache__", "site-packages", "ensurepip",
    "config-*", "lib2to3", "turtledemo", "pydoc_data", "distutils", "*.a",
)  # fmt: skip
ENGINES = (["podman"], ["podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs"])


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=True)
    except OSError:  # another file system
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def _add(root: Path, source: str, target: str = "") -> None:
    path = root / (target or source).lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _link(os.path.realpath(source), str(path))


def _add_program(root: Path, source: str, target: str, modules: Sequence[str] = ()) -> None:
    _add(root, source, target)
    listed = subprocess.run(
        ["ldd", source, *modules], capture_output=True, text=True, check=False
    ).stdout
    for word in set(listed.split()):
        if word.startswith("/") and not word.endswith(":"):
            _add(root, word)


def build_root(root: Path) -> None:
    """Python with pytest, and a few tools."""
    for name in ("proc", "sys", "dev", "tmp", "work", "etc", "run"):
        (root / name).mkdir(parents=True)
    for tool in _TOOLS:
        _add_program(root, str(shutil.which(tool)), f"/usr/bin/{tool}")
    modules = glob.glob(f"{sysconfig.get_path('stdlib')}/lib-dynload/*.so")
    _add_program(root, os.path.realpath(sys.executable), "/usr/bin/python3", modules)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = root / "usr/lib" / version
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_LEFT_OUT, copy_function=_link)
    for name in _PACKAGES:
        source, target = (
            Path(sysconfig.get_path("purelib")) / name,
            library / "site-packages" / name,
        )
        if source.is_dir():
            shutil.copytree(source, target, ignore=_LEFT_OUT, copy_function=_link)
        elif source.exists():
            _add(root, str(source), f"{target.relative_to(root)}")


def working_engine(root: Path) -> list[str]:
    """The first command of Podman that runs a container here; skips the test if none does."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    said = ""
    for engine in ENGINES:
        done = subprocess.run(
            [*engine, "run", "--rm", "--network=none", "--ulimit=nofile=64:64",
             "--ulimit=nproc=64:64",
             "--rootfs", f"{root}:O", "/usr/bin/cat", "/dev/null"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode == 0:
            return engine
        said = done.stderr.strip()[-300:]
    pytest.skip(f"podman runs no container here: {said}")


async def exact(test: StdinTest, output: bytes) -> Ruling:
    """A stand-in for the server's own rules."""
    if output.decode().strip() == test.output:
        return Ruling(Verdict.PASS)
    return Ruling(Verdict.WRONG_ANSWER, output.decode()[:2000])


class Engine:
    """Containers on an event loop of their own."""

    def __init__(self, root: Path) -> None:
        build_root(root)
        self.root, self.words = root, working_engine(root)
        self._runner = asyncio.Runner()
        self.containers = Containers(self.words, {IMAGE: str(root)}, 2)

    def results(self, *programs: tuple[str, dict[str, Any]]) -> list[TestResult]:
        """Judge (code, fields of the test) side by side."""

        async def judge() -> list[TestResult]:
            return await asyncio.gather(*(self.judge(code, **given) for code, given in programs))

        return self._runner.run(judge())

    def result(self, code: str, **given: Any) -> TestResult:
        return self.results((code, given))[0]

    async def judge(self, code: str, **given: Any) -> TestResult:
        test = ContainerTest(**{"image": IMAGE, "command": PYTHON, **given})
        return await judge_contained(self.containers, test, code, LIMITS, exact)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def listed(self, label: str = "async_rl.verifier") -> Sequence[str]:
        """Containers with the label, running or not."""
        done = subprocess.run(
            [*self.words, "ps", "--all", "--quiet", "--filter", f"label={label}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.split()

    def close(self) -> None:
        self._runner.run(self.containers.close())
        self._runner.close()
