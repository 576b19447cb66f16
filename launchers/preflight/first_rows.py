"""The first rows of the data files, read and scored before a run starts.

Files and reward functions are usually wrong for one reason, which the first rows show: a column
that is named otherwise, a function that reads a column that is not there. Without this check such a
run starts all its processes and loads its model first.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from async_rl.config.base import replace
from async_rl.config.plugins import DATA_SOURCE, load_function
from async_rl.config.rewards import PluginTerm
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DataError, RewardError, Unsupported
from async_rl.core.types import ContainerTest
from async_rl.data.drafts import Draft, Drafter
from async_rl.data.files import is_function_of_rows, matching_files, open_table
from async_rl.rewards.verifier.containers import Containers
from async_rl.rewards.verifier.protocol import RewardSample
from async_rl.rewards.verifier.reward_process import RewardProcess

# Read within milliseconds, also by --dry-run; the preparation of the run checks every row.
_NUM_ROWS = 20
# Each is scored for every response below: nine calls, which may each take a second.
_NUM_SCORED = 3
_RESPONSES = ("", "The answer is 42.", "```python\ndef f(x):\n    return x\n```")
"""A function may rightly raise for one of these, but not for all."""
_TRIAL_S = 30.0
"""A model as a judge may take seconds for a call; a trial that takes longer is given up."""


class _PlainChat:
    """Renders a chat without the model's template, since the model may not be there yet."""

    chat_template = "plain"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        """Return the messages below each other."""
        return "\n".join(message["content"] for message in messages)


def row_problems(config: RunConfig, *, has_functions: bool = True) -> Iterator[str]:
    """Yield the problems of the first rows of local files, one line per file, and the reward
    functions that fail on all of them.

    has_functions: the reward functions can be loaded, so they are tried.
    """
    drafts = []
    for setting, patterns in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for name in filter(is_function_of_rows, patterns):
            try:
                load_function(setting, name, DATA_SOURCE)
            except ConfigError as error:
                yield str(error)
        for draft in _first_drafts(patterns, config):
            if isinstance(draft, str):
                yield f"{setting}: {draft}"
            elif setting == "data.train_files":
                drafts.append(draft)
    if has_functions:
        yield from _reward_problems(config, drafts)
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
    local = [name for name in patterns if "://" not in name and not is_function_of_rows(name)]
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


def _reward_problems(config: RunConfig, drafts: Sequence[Draft]) -> Iterator[str]:
    reward = config.reward
    own = {name: term for name, term in reward.terms.items() if isinstance(term, PluginTerm)}
    samples = {
        name: [
            _sample(draft, response, config)
            for draft in drafts[:_NUM_SCORED]
            for response in _RESPONSES
            if any(term.function == name for term in reward.terms_of(draft.data_source))
        ]
        for name in own
    }
    if not any(samples.values()):
        return
    # A model or a server among the terms would take long to load.
    tried = replace(reward, terms=own)
    with ThreadPoolExecutor(1) as thread:  # a notebook's own event loop may be running
        trial = _failures(RewardProcess(tried, timeouts=config.timeouts), samples)
        failures = thread.submit(asyncio.run, trial).result()
    for name, reason in failures.items():
        yield (
            f"reward.terms.{name}={own[name].fn}: it fails on every one of the first rows, whatever"
            f" the response: {reason}; correct it, or the rows"
        )


async def _failures(
    process: RewardProcess, samples: dict[str, list[RewardSample]]
) -> dict[str, str]:
    """Return, for each function that scored none of its samples, the reason of the first."""
    failures: dict[str, str] = {}
    try:
        async with asyncio.timeout(_TRIAL_S):
            for name, tries in samples.items():
                for sample in tries:
                    try:
                        await process.score([name], sample)
                    except* RewardError as errors:
                        failures.setdefault(name, str(errors.exceptions[0]))
                    else:
                        # A single success shows that the function fits the rows.
                        failures.pop(name, None)
                        break
    except TimeoutError:
        failures.clear()  # slow is not wrong: the run itself has the time limits
    except ConfigError as error:
        return {name: str(error) for name in samples}
    finally:
        await process.close()
    return failures


def _sample(draft: Draft, response: str, config: RunConfig) -> RewardSample:
    return RewardSample(
        prompt_id=draft.prompt_id,
        prompt=draft.text,
        response=response,
        transcript=response,
        token_ids=[],
        is_written=[],
        data_source=draft.data_source,
        row=msgspec.json.decode(draft.problem.row or "{}"),
        tests=draft.problem.tests,
        setup=draft.problem.setup,
        is_truncated=False,
        max_tokens=config.data.max_response_tokens,
    )
