"""Checks of a run's inputs: the first rows of its data files, and the installed vLLM.

Files are usually wrong for one reason, which the first rows show: a column that is named otherwise.
Without this check such a run starts all its processes and loads its model first. The engine
arguments and parsers of vLLM are read from its source: an import would take seconds and hundreds of
MB.
"""

import asyncio
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from async_rl.composition.problems import hint
from async_rl.config.data import is_source
from async_rl.config.generation import PARSERS, THINKING_PARSER, TOOL_PARSER
from async_rl.config.plugins import DATA_SOURCE, load_function
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DataError, Unsupported
from async_rl.core.types import ContainerTest
from async_rl.data.drafts import Draft, Drafter
from async_rl.data.files import matching_files, open_table
from async_rl.generation.environment import version_problem
from async_rl.rewards.verifier.containers import Containers

# Read within milliseconds, also by --dry-run; the preparation of the run checks every row.
_NUM_ROWS = 20
ARGUMENT = "engine argument"
_NAMES = {
    ARGUMENT: ("engine/arg_utils.py", r"^    ([a-z]\w*): "),
    TOOL_PARSER: ("tool_parsers/__init__.py", r'^    "(\w+)": \('),
    THINKING_PARSER: ("reasoning/__init__.py", r'^    "(\w+)": \('),
}
"""By kind: the file, and a line of it with a name: a field of EngineArgs, an entry of a table."""


class _PlainChat:
    """Renders a chat without the model's template, since the model may not be there yet."""

    chat_template = "plain"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        """Return the messages below each other."""
        return "\n".join(message["content"] for message in messages)


def row_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of the first rows of local files, one line per file."""
    drafts = []
    for setting, patterns in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for name in filter(is_source, patterns):
            try:
                load_function(setting, name, DATA_SOURCE)
            except ConfigError as error:
                yield str(error)
        for draft in _first_drafts(patterns, config):
            if isinstance(draft, str):
                yield f"{setting}: {draft}"
            elif setting == "data.train_files":
                drafts.append(draft)
    yield from _image_problems(config, drafts)


def _image_problems(config: RunConfig, drafts: Sequence[Draft]) -> Iterator[str]:
    """Yield the missing images of the first rows, if the verifiers run on this machine."""
    tests = [test for draft in drafts for test in draft.problem.tests]
    images = {test.image for test in tests if isinstance(test, ContainerTest)}
    if not images or not config.launcher.is_one_machine:
        return
    sandbox = config.sandbox
    for image in sorted(images):
        containers = Containers(sandbox.container_engine, sandbox.rootfs, 1)
        try:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, containers.require(image)).result()
        except Unsupported as error:
            yield f"data.train_files: {error}"


def _first_drafts(patterns: Sequence[str], config: RunConfig) -> Iterator[Draft | str]:
    """Yield the drafts of the first rows, or the problem that stops the reading of a file."""
    # A remote file may take minutes to copy, and the rows of a function to make.
    local = [name for name in patterns if "://" not in name and not is_source(name)]
    try:
        files = matching_files(local)
        drafter = Drafter(files, config, _PlainChat())
    except DataError as error:
        yield str(error)
        return
    for file in files:
        try:
            rows = list(itertools.islice(open_table(file), _NUM_ROWS))
            if not rows:
                yield f"{file}: is empty; give a file with at least one prompt"
            for number, placed in enumerate(rows):
                draft = drafter.draft(file, number, placed)
                if isinstance(draft, Draft):
                    yield draft
                elif config.data.bad_rows == "error":
                    yield str(draft)
                    # The rows of a file are usually wrong for the same reason.
                    break
        except DataError as error:
            yield str(error)


def installed() -> Path | None:
    """Return the directory of the installed vLLM; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    return None


def known_names(root: Path, kind: str) -> list[str]:
    """Return the engine arguments, or the parsers of one of PARSERS, of the vLLM at `root`."""
    file, pattern = _NAMES[kind]
    return re.findall(pattern, (root / file).read_text(), re.MULTILINE)


def vllm_problems(extra: Sequence[str]) -> Iterator[str]:
    """Yield the missing parts of the installed vLLM: a supported version, and the engine arguments
    and the parsers of generation.vllm.extra. Nothing without vLLM.
    """
    root = installed()
    if root is None:
        return
    if problem := version_problem():
        yield problem
    for entry in extra:
        name, _, value = entry.partition("=")
        kind, word = (name, value) if name in PARSERS else (ARGUMENT, name)
        known = known_names(root, kind)
        if word not in known:
            yield (
                f"generation.vllm.extra={entry}: the installed vLLM has no such {kind};"
                f" {hint(word, among=known)}"
            )
