"""The table of languages (`languages.toml`), and where their tools are on this machine.

Invariant: a toolchain names exactly the paths that a command may read and execute; nothing is
searched for inside the jail.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from async_rl.core.errors import Unsupported
from async_rl.core.frozen import frozen
from async_rl.sandbox.protocol import CommandSpec

# A tool of the machine may be a script that waits for a network.
_LOCATE_S = 30
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "PWD": "/tmp", "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
}  # fmt: skip
# The kernel executes it for programs that are linked dynamically, so Landlock must allow it.
_LOADER = "/lib64/ld-linux-x86-64.so.2"
_PUBLIC_CLASS = re.compile(
    r"^[ \t]*public\s+(?:(?:final|abstract|strictfp|sealed)\s+)*"
    r"(?:class|interface|enum|record)\s+(\w{1,100})\b",
    re.MULTILINE | re.ASCII,
)
_CLASS = re.compile(r"\b(?:class|enum|record|interface)\s+(\w{1,100})\b", re.ASCII)
_PACKAGE = re.compile(r"^[ \t]*package\s+([\w.]{1,200})\s*;", re.MULTILINE | re.ASCII)
_MAIN = re.compile(r"\bvoid\s+main\s*\(")


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command of a language; see `languages.toml`."""

    program: str = ""
    arguments: list[str] = []
    environment: list[str] = []
    reads: list[str] = []
    runs: list[str] = []


class Compile(Step, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compile step."""

    program: str = "{tool}"
    product: str
    cpu_s: float = 30
    memory_mb: int = 1024
    scratch_mb: int = 256


class Run(Step, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command that runs a program."""

    limit: str = "address_space"
    extra_mb: int = 0
    reserve_mb: int = 0
    startup_s: float = 0
    tools: bool = False
    memory_marks: list[str] = []


class LanguageRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the table. probe: a program that prints "ok"."""

    tool: str
    source: str
    probe: str
    run: Run
    locate: list[str] = []
    compile: Compile | None = None


def table() -> dict[str, LanguageRow]:
    """The rows, by language."""
    text = (files(__package__) / "languages.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, LanguageRow])


@frozen
class Toolchain:
    """One language on this machine."""

    language: str
    row: LanguageRow
    places: Mapping[str, str]

    @classmethod
    def find(cls, language: str, row: LanguageRow) -> Toolchain:
        """Find the tool. Blocks while it prints its directory. Raises Unsupported."""
        found = shutil.which(row.tool)
        if found is None:
            raise Unsupported(
                f"programs in {language} need {row.tool}, which is not on the PATH of this"
                " verifier; install it and start the verifier again"
            )
        # Landlock decides by the file itself, not by a link to it.
        tool = os.path.realpath(found)
        root = os.path.dirname(os.path.dirname(tool))
        if row.locate:
            status, said = output_of([found, *row.locate], _LOCATE_S)
            if status:
                raise Unsupported(
                    f"programs in {language} need {found}, which does not work here: {said}"
                )
            root = os.path.realpath(said)
        return cls(language=language, row=row, places={"tool": tool, "root": root})

    def fill(self, texts: Sequence[str], more: Mapping[str, str] | None = None) -> list[str]:
        """The texts with their placeholders replaced."""
        places = {**self.places, **(more or {})}
        return [re.sub(r"\{(\w+)\}", lambda match: places[match[1]], text) for text in texts]

    def command(self, step: Step, places: Mapping[str, str], **more: Any) -> CommandSpec:
        """The command of a step. places: further placeholders; more: the other fields."""
        (path,) = self.fill([step.program])
        variables = dict(text.split("=", 1) for text in self.fill(step.environment))
        return CommandSpec(
            executable=path,
            arguments=[path or "solution", *self.fill(step.arguments, places)],
            environment=_ENVIRONMENT | variables,
            readable=self._paths(step.reads),
            runnable=[*self._paths(step.runs), os.path.realpath(_LOADER)] if path else [],
            **more,
        )

    def _paths(self, patterns: Sequence[str]) -> list[str]:
        """The existing paths that the patterns name."""
        return [path for pattern in self.fill(patterns) for path in sorted(glob.glob(pattern))]

    def visible(self) -> set[str]:
        """Every path that a command of the language may read."""
        steps = filter(None, (self.row.run, self.row.compile))
        return {path for step in steps for path in self._paths([*step.reads, *step.runs])}


def output_of(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Exit status and text of a program of this machine, which runs without a jail. Blocks."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, getattr(error, "strerror", None) or str(error)
    return done.returncode, done.stdout.decode(errors="replace").strip()


def source_names(code: str) -> dict[str, str]:
    """File name and main class of a Java program: a public class must be in a file of its name."""
    public = _PUBLIC_CLASS.search(code)
    # javac refuses a public class in a file of another name.
    name = public[1] if public else "Main"
    main = _MAIN.search(code)
    # The class that opens last before `main` is the one around it.
    around = _CLASS.findall(code, 0, main.start()) if main else []
    inside = public[1] if public else (around[-1] if around else name)
    package = _PACKAGE.search(code)
    return {"file": f"{name}.java", "main": f"{package[1]}.{inside}" if package else inside}
