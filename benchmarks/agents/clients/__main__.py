"""Run programs with the packages of other projects as clients of the endpoint, and print a table.

Run: `python -m benchmarks.agents.clients [--python PATH ...] [--node FOLDER] [NAME ...]`.

--python: an interpreter with packages of a requirements-N.txt (several, because some packages
exclude each other); a program runs in the first one that has its package. --node: a folder with
the node_modules of package.json. NAME: programs; without names all run. Nothing is installed here,
and a program without its package is skipped.

Each program is an agent, started as `rollout.fn` starts a command. It uses OPENAI_BASE_URL or
ANTHROPIC_BASE_URL, exits with 0 if it got what it expects, and starts with comments: `package:` of
the table, and a line `policy:` for each text that the policy writes. A row is `yes` if the program
exits with 0, each text fits the grammar of its call, and the sample has each answer of the policy
once as trained tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

from async_rl.config.generation import Agent
from async_rl.core.errors import AgentError
from async_rl.core.frozen import frozen
from async_rl.rollouts.environments import Commands
from async_rl.sessions.endpoint import Endpoint
from benchmarks.agents.clients.served import served

_PROGRAMS = Path(__file__).with_name("programs")
_LIMIT_S = 120
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


@frozen
class Program:
    """A file, its package, and the texts that the policy writes for it."""

    file: Path
    package: str
    texts: list[str]


def programs(names: list[str]) -> list[Program]:
    """Return the programs with these names, or all."""
    found = []
    for file in sorted(_PROGRAMS.iterdir()):
        if file.suffix in (".py", ".mjs") and (not names or file.stem in names):
            text = file.read_text()
            (package,) = re.findall(r"^(?:#|//) package: (.*)$", text, re.MULTILINE)
            texts = re.findall(r"^(?:#|//) policy: (.*)$", text, re.MULTILINE)
            found.append(Program(file=file, package=package, texts=texts))
    return found


def command_of(program: Program, pythons: list[str], node: Path) -> tuple[list[str], str]:
    """Return the command of a program and the version of its package; no command without it."""
    if program.file.suffix == ".mjs":
        about = node / "node_modules" / program.package / "package.json"
        if not about.exists():
            return [], ""
        # Node looks for packages next to the program.
        copy = node / program.file.name
        copy.write_text(program.file.read_text())
        return ["node", str(copy)], json.loads(about.read_text())["version"]
    for python in pythons:
        found = subprocess.run(
            [python, "-c", _VERSION, program.package], capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            return [python, str(program.file)], found.stdout.strip()
    return [], ""


async def run(program: Program, command: list[str]) -> tuple[bool, str]:
    """Run a program; return whether all is as it should be, and what happened."""
    async with served(program.texts) as (url, session, policy):
        endpoint = Endpoint.of(url, session.token, session.session_key)
        try:
            # As rollout.fn: with the limit of memory.
            async with asyncio.timeout(_LIMIT_S):
                await Commands(Agent(command=command, fn=None, workers=1)).run(
                    endpoint, {"prompt": "go"}
                )
        except TimeoutError:
            return False, f"no end after {_LIMIT_S} s"
        except AgentError as error:
            return False, "\n".join([*policy.problems, str(error)])
        if policy.problems or not session.record.turns:
            return False, "\n".join(["no answer", *policy.problems])
        row, branches, _ = session.record.row()
        trained = int(row.is_written.sum())
        num_turns = len(session.record.turns)
        # Without what an engine writes after a stop text, which the agent does not get.
        num_served = sum(len(turn.answer.token_ids) for turn in session.record.turns.values())
        what = (
            f"{num_turns} answers, {num_served} tokens, {trained} trained, {len(branches)} branches"
        )
        return (trained, num_turns) == (num_served, policy.num_calls), what


async def main() -> int:
    """Print a row for each program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--node", type=Path, default=Path())
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    num_failed = 0
    print("| program | package | version | works | what |\n|---|---|---|---|---|")
    for program in programs(given.names):
        command, version = command_of(program, given.python or [sys.executable], given.node)
        is_fine, what = await run(program, command) if command else (True, "not installed")
        num_failed += not is_fine
        row = (program.file.name, program.package, version, "yes" if is_fine else "no", what)
        print(f"| {' | '.join(row)} |", flush=True)
    return min(num_failed, 1)


sys.exit(asyncio.run(main()))
