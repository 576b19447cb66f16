"""`async-rl verify`: scores a file of completions. `async-rl data check` scores the reference
solutions of a data set here.

Invariants: every program of the file has exactly one verdict; a program that could not be judged is
listed as such, never counted as a wrong program. The verdicts go to stdout, the progress to stderr.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import msgspec
import typer

from async_rl.composition.compose import verifier_config
from async_rl.composition.overrides import with_defaults
from async_rl.config.run import RunConfig
from async_rl.core.errors import DataError, at
from async_rl.core.machine import this_machine
from async_rl.core.types import CodeProblem, Verdict
from async_rl.launchers.commands.options import Settings, show_progress
from async_rl.launchers.commands.verifier import for_each

if TYPE_CHECKING:
    from async_rl.rewards.verifier.service import VerifierService

_UNUSABLE = "unusable row"
_UNSCORED = {_UNUSABLE, *(verdict for verdict in Verdict if not verdict.is_score)}
_COMPLETIONS = ("completions", "completion", "responses", "response")
_REFERENCES = (
    *("canonical_solution", "gold_standard_solution", "solutions", "solution", "code"),
    "completion",  # of LeetCodeDataset
)
# PYTHON3 of CodeContests.
_PYTHON = 3
_IDS = ("task_id", "query_id", "id")


class _Item(NamedTuple):
    """One program of the file with its problem and the name of its row. Without a problem the row
    is unusable, and `program` contains the reason.
    """

    row: str
    name: str
    problem: CodeProblem | None
    program: str


class _Result(NamedTuple):
    """The verdict of an item, or _UNUSABLE."""

    item: _Item
    verdict: str
    message: str


def verify(
    file: Annotated[
        str,
        typer.Argument(
            help=(
                "jsonl, json or parquet: rows with tests and a column completion or response (or a"
                " list)"
            )
        ),
    ],
    settings: Settings = None,
    output: Annotated[
        Path | None, typer.Option(help="jsonl file for one line per program with all its tests")
    ] = None,
) -> None:
    """Score a file of completions. Settings of sandbox, verifiers and reward can differ from conf/.

    Examples: async-rl verify completions.jsonl --output results.jsonl
    """
    # A cell runs one program, which uses one core.
    cells = f"verifiers.cells={len(this_machine().cores)}"
    config = verifier_config(with_defaults(settings or [], [cells]))
    # Read before any program runs: the command exits immediately if a file has no usable column.
    items = list(_items(file, _COMPLETIONS, config))
    # No verdict is not the same as no failure: a script would read exit code 0.
    if not items:
        raise DataError(f"{file}: has no rows; nothing was scored")
    started_s = time.monotonic()
    with output.open("xb") if output else nullcontext() as lines:
        results = asyncio.run(_score(items, config, lines))
    _report(results, time.monotonic() - started_s)
    # A wrong completion is a result.
    if any(result.verdict in _UNSCORED for result in results):
        raise typer.Exit(1)


async def wrong_references(
    files: Sequence[str], config: RunConfig, service: VerifierService
) -> list[str]:
    """Return the reference solutions that the tests of their rows reject, with reasons."""
    rows = (_items(file, _REFERENCES, config) for file in files)
    try:
        items = [
            item for each in rows for item in each if item.problem and not item.problem.wants_words
        ]
    except DataError as error:
        return [str(error)]
    results = await _judged(items, service)
    wrong = [result for result in results if result.verdict != Verdict.PASS]
    return [f"{each.item.name}: {each.verdict}: {each.message}" for each in wrong]


def _items(file: str, columns: tuple[str, ...], config: RunConfig) -> Iterator[_Item]:
    """Yield the programs of the file in order. Raises DataError if the file cannot be read or a row
    has no completion; a row may have no reference solution.
    """
    from async_rl.data.files import read_rows
    from async_rl.data.problems import read_problem
    from async_rl.rewards.extraction import extract_code

    for position, row in read_rows(file):
        column = next((column for column in columns if row.get(column) is not None), None)
        if column is None and columns is _REFERENCES:
            continue
        if column is None:
            raise DataError(
                f"{position}: has {', '.join(sorted(row))}, but none of {', '.join(columns)}; one"
                " must contain the program"
            )
        with at(position):
            texts = _programs(f"column {column}", row[column])
        ids = (str(row[key]) for key in _IDS if row.get(key) is not None)
        row_name = next(ids, position.rpartition(", ")[2])
        names = [f"{row_name}, {number} of {len(texts)}" for number in range(1, len(texts) + 1)]
        if len(texts) == 1:
            names = [row_name]
        try:
            with at(position):
                problem, _ = read_problem(row)
        except DataError as error:
            yield from (_Item(row_name, name, None, str(error)) for name in names)
            continue
        for name, text in zip(names, texts, strict=True):
            code = extract_code(text, config.reward.extraction, problem.language)
            if code is None:
                # A reference solution is code without a fence; a completion without code fails.
                code = text if columns is _REFERENCES else ""
            yield _Item(row_name, name, problem, _complete(row, code))


def _programs(column: str, value: Any) -> list[str]:
    from async_rl.core.io_pairs import read_json, read_strings

    # APPS stores its solutions as the text of a JSON list.
    if isinstance(value, str) and column == "column solutions":
        value = read_json(column, value)
    if isinstance(value, dict):
        pairs = zip(value.get("language", ()), value.get("solution", ()), strict=False)
        value = [program for language, program in pairs if language == _PYTHON]
    return [value] if isinstance(value, str) else read_strings(column, value)


def _complete(row: dict[str, Any], code: str) -> str:
    """Put the prompt before a completion of HumanEval or BigCodeBench, which continues the prompt's
    function.
    """
    entry = row.get("entry_point")
    prompt = row.get("code_prompt") or row.get("prompt")
    # A chat model repeats the whole function, a base model only continues it.
    if entry and isinstance(prompt, str) and f"def {entry}(" not in code:
        return f"{prompt}{code}"
    return code


async def _score(items: list[_Item], config: RunConfig, lines: BinaryIO | None) -> list[_Result]:
    from async_rl.rewards.verifier.serving import open_service

    async with open_service(config) as service:
        level, num = service.cells.level, service.num_cells
        typer.echo(f"{len(items)} programs, {num} at a time, jail level {level}", err=True)
        return await _judged(items, service, lines)


async def _judged(
    items: Sequence[_Item], service: VerifierService, lines: BinaryIO | None = None
) -> list[_Result]:
    from async_rl.rewards.verifier.protocol import VerifyRequest

    results: list[_Result] = []

    async def judge(item: _Item) -> None:
        problem = item.problem
        if problem is None:
            results.append(_Result(item, _UNUSABLE, item.program))
            return
        response = await service.verify(
            VerifyRequest(
                code=item.program,
                tests=problem.tests,
                setup=problem.setup,
                language=problem.language,
            )
        )
        if lines is not None:
            line = {"name": item.name, **msgspec.to_builtins(response)}
            lines.write(msgspec.json.encode(line) + b"\n")
        failed = (test.message for test in response.tests if test.verdict is not Verdict.PASS)
        results.append(_Result(item, response.verdict, next(failed, "")))
        show_progress(len(results), len(items), "programs")

    await for_each(items, judge, service.num_cells)
    return results


def _report(results: list[_Result], seconds: float) -> None:
    for result in results:
        if result.verdict in _UNSCORED:
            typer.echo(f"{result.item.name}: {result.verdict}: {result.message}")
    for verdict, count in Counter(result.verdict for result in results).most_common():
        typer.echo(f"{verdict:22}{count:8}{count / len(results):8.1%}")
    # pass@1 is the mean over problems, whatever number of completions each has.
    by_row: dict[str, list[bool]] = {}
    for result in results:
        if result.verdict not in _UNSCORED:
            by_row.setdefault(result.item.row, []).append(result.verdict == Verdict.PASS)
    if by_row:
        share = fmean(map(fmean, by_row.values()))
        typer.echo(f"pass@1 {share:.4f} over {len(by_row)} problems")
    rate = len(results) / seconds
    typer.echo(f"{len(results)} programs in {seconds:.1f} s, {rate:.0f} per second")
