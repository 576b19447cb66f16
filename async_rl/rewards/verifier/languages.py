"""The table of languages (`languages.toml`), and where their tools are on this machine."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from async_rl.core.errors import Unsupported
from async_rl.core.frozen import Value
from async_rl.core.programs import PYTHON

# A tool of the machine may be a script that waits for a network.
_LOCATE_S = 30
_PUBLIC_CLASS = re.compile(
    r"^[ \t]*public\s+(?:(?:final|abstract|strictfp|sealed)\s+)*"
    r"(?:class|interface|enum|record)\s+(\w{1,100})\b",
    re.MULTILINE | re.ASCII,
)
_CLASS = re.compile(r"\b(?:class|enum|record|interface)\s+(\w{1,100})\b", re.ASCII)
_PACKAGE = re.compile(r"^[ \t]*package\s+([\w.]{1,200})\s*;", re.MULTILINE | re.ASCII)
_MAIN = re.compile(r"\bvoid\s+main\s*\(")


class Step(Value):
    """One command of a language; see `languages.toml`."""

    program: str = ""
    arguments: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


class Compile(Step, kw_only=True):
    """The compile step."""

    program: str = "{tool}"
    product: str
    cpu_s: float = 30
    memory_mb: int = 1024
    scratch_mb: int = 256


class Run(Step):
    """The command that runs a program."""

    limit: str = "RLIMIT_AS"
    extra_mb: int = 0
    reserve_mb: int = 0
    startup_s: float = 0
    tools: bool = False
    memory_marks: tuple[str, ...] = ()


class LanguageRow(Value):
    """One row of the table. probe: a program that prints "ok"."""

    tool: str
    source: str
    probe: str
    run: Run
    locate: tuple[str, ...] = ()
    compile: Compile | None = None


def places_of(language: str, row: LanguageRow) -> dict[str, str]:
    """Find the tool and its directory. Blocks while it prints its directory. Raises Unsupported."""
    # The interpreter of this process: on the PATH may be a script that chooses one.
    found = shutil.which(sys.executable if language == PYTHON else row.tool)
    if found is None:
        raise Unsupported(
            f"programs in {language} need {row.tool}, which is not on the PATH of this verifier;"
            " install it and start the verifier again"
        )
    # Landlock decides by the file itself, not by a link to it.
    tool = os.path.realpath(found)
    root = os.path.dirname(os.path.dirname(tool))
    if row.locate:
        status, root = output_of([found, *row.locate], _LOCATE_S)
        if status:
            raise Unsupported(
                f"programs in {language} need {found}, which does not work here: {root}"
            )
    return {"tool": tool, "root": os.path.realpath(root)}


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
    inside = around[-1] if around and not public else name
    package = _PACKAGE.search(code)
    return {"file": f"{name}.java", "main": f"{package[1]}.{inside}" if package else inside}
