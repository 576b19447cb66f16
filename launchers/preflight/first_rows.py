"""The first rows of the data files, read before a run starts.

Files are usually wrong for one reason, which the first rows show: a column that is named otherwise.
Without this check such a run starts all its processes and loads its model first.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from async_rl.config.data import is_source
from async_rl.config.plugins import DATA_SOURCE, load_function
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DataError, Unsupported
from async_rl.core.types import ContainerTest
from async_rl.data.drafts import Draft, Drafter
from async_rl.data.files import matching_files, open_table
from async_rl.rewards.verifier.containers import Containers

# Read within milliseconds, also by --dry-run; the preparation of the run checks every row.
_NUM_ROWS = 20


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
