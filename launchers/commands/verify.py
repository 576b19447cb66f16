"""`async-rl verify`: scores a file of completions, or checks the reference solutions of a data set.

Invariants: every program of the file has exactly one verdict; an infrastructure error is retried
and, if it persists, listed as such, never counted as a wrong program. The verdicts go to stdout,
the progress bar to stderr.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import msgspec
import typer

from async_rl.config.base import replace
from async_rl.core.errors import ConfigError, DataError, InfrastructureError
from async_rl.core.types import CodeProblem, Verdict
from async_rl.launchers.commands.verifier import VerifierSettings, verifier_config

if TYPE_CHECKING:
    from async_rl.config.run import RunConfig
    from async_rl.rewards.verifier.judging import Judge
    from async_rl.rewards.verifier.protocol import VerifyResponse

_TRIES = 3
_TASKS_PER_CELL = 2  # the next program is ready when a cell becomes free
_COMPLETIONS = ("completions", "completion", "responses", "response")
_REFERENCES = ("canonical_solution", "solutions", "solution", "code")
_IDS = ("task_id", "query_id", "id")


class _Item(NamedTuple):
    """One program of the file with its problem. Without a problem the row is unusable, and
    `program` contains the reason.
    """

    name: str
    problem: CodeProblem | None
    program: str


class _Result(NamedTuple):
    """The verdict of an item; None for an unusable row."""

    item: _Item
    verdict: Verdict | None
    message: str

    @property
    def label(self) -> str:
        return "unusable row" if self.verdict is None else self.verdict.value


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
    settings: VerifierSettings = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="programs that run in parallel; default: one per core"),
    ] = None,
    references: Annotated[
        bool,
        typer.Option(
            "--references", help="check the rows' reference solutions and list those that fail"
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="jsonl file for one line per program with all its tests")
    ] = None,
) -> None:
    """Score a file of completions, or check a data set's reference solutions.

    Examples: async-rl verify completions.jsonl --output results.jsonl; async-rl verify
    problems.jsonl --references
    """
    from async_rl.core.machine import this_machine

    config = verifier_config(settings or [])
    num_workers = workers or len(this_machine().cores)
    columns = _REFERENCES if references else _COMPLETIONS
    num_programs = sum(len(programs) for _, _, programs in _rows(file, columns))
    if not num_programs:
        raise DataError(f"{file}: has no rows; nothing was scored")
    started_s = time.monotonic()
    with _opened(output) as lines:
        items = _items(file, columns, config)
        results = asyncio.run(_score(items, num_programs, config, num_workers, lines))
    _report(results, time.monotonic() - started_s, references=references)
    failed = {result.verdict for result in results} - {Verdict.PASS}
    if not references:
        failed = {verdict for verdict in failed if verdict is None or not verdict.is_score}
    if failed:
        raise typer.Exit(1)


def _opened(output: Path | None) -> AbstractContextManager[BinaryIO | None]:
    try:
        return open(output, "xb") if output else nullcontext()
    except OSError as error:
        raise ConfigError(
            f"--output {output}: cannot be made ({error.strerror}); choose another"
        ) from error


def _rows(file: str, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield (position, row, texts with its programs) in order. Raises DataError if the file cannot
    be read or has no such column.
    """
    from async_rl.data.files import read_rows

    for position, row in read_rows(file):
        column = next((column for column in columns if row.get(column) is not None), None)
        if column is None:
            raise DataError(
                f"{position}: has {', '.join(sorted(row))}, but none of {', '.join(columns)}; one"
                " must contain the program"
            )
        yield position, row, _programs(position, column, row[column])


def _items(file: str, columns: tuple[str, ...], config: RunConfig) -> Iterator[_Item]:
    from async_rl.data.problems import read_problem
    from async_rl.rewards.extraction import extract_code

    for position, row, texts in _rows(file, columns):
        names = (str(row[key]) for key in _IDS if row.get(key) is not None)
        name = next(names, position.rpartition(", ")[2])
        try:
            problem, _ = read_problem(position, row)
        except DataError as error:
            for _ in texts:
                yield _Item(name, None, str(error))
            continue
        for text in texts:
            code = extract_code(text, config.reward.extraction)
            if code is None:
                # A reference solution is code without a fence; a completion without code fails.
                code = text if columns is _REFERENCES else ""
            yield _Item(name, problem, _complete(row, code))


def _programs(position: str, column: str, value: Any) -> list[str]:
    if isinstance(value, str) and column == "solutions":
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise DataError(
                f"{position}: column solutions is not a JSON list ({error}); write one"
            ) from error
    programs = [value] if isinstance(value, str) else value
    if not isinstance(programs, list) or not all(isinstance(program, str) for program in programs):
        raise DataError(f"{position}: column {column} must contain a string or a list of strings")
    return programs


def _complete(row: dict[str, Any], code: str) -> str:
    """Put the prompt before a completion of HumanEval, which continues the prompt's function."""
    entry, prompt = row.get("entry_point"), row.get("prompt")
    if entry and isinstance(prompt, str) and f"def {entry}(" not in code:
        return f"{prompt}{code}"
    return code


async def _score(
    items: Iterator[_Item],
    num_programs: int,
    config: RunConfig,
    workers: int,
    lines: BinaryIO | None,
) -> list[_Result]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from async_rl.observability.activity import Activity
    from async_rl.rewards.verifier.serving import open_service

    results: list[_Result] = []
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[passed]} pass"),
        TimeRemainingColumn(),
    )
    verifiers = replace(config.verifiers, cells=workers)
    async with open_service(verifiers, config.sandbox, Activity(), config.timeouts) as service:
        level = service.cells.level
        typer.echo(f"{num_programs} programs, {workers} at a time, jail level {level}", err=True)
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("", total=num_programs, passed=0)
            num_passed = 0

            async def work() -> None:
                nonlocal num_passed
                for item in items:
                    result = await _judge(service.judge, item, lines)
                    results.append(result)
                    if result.verdict is Verdict.PASS:
                        num_passed += 1
                    progress.update(bar, advance=1, passed=num_passed)

            async with asyncio.TaskGroup() as group:
                for number in range(_TASKS_PER_CELL * workers):
                    group.create_task(work(), name=f"worker {number}")
    return results


async def _judge(judge: Judge, item: _Item, lines: BinaryIO | None) -> _Result:
    if item.problem is None:
        return _Result(item, None, item.program)
    response = await _response(judge, item.program, item.problem)
    if lines is not None:
        line = {"name": item.name, **msgspec.to_builtins(response)}
        lines.write(msgspec.json.encode(line) + b"\n")
    failed = (test.message for test in response.tests if test.verdict is not Verdict.PASS)
    return _Result(item, response.verdict, next(failed, ""))


async def _response(judge: Judge, program: str, problem: CodeProblem) -> VerifyResponse:
    from async_rl.rewards.verifier.protocol import VerifyRequest, infrastructure_response

    request = VerifyRequest(code=program, tests=problem.tests, setup=problem.setup)
    reason = ""
    for _ in range(_TRIES):
        try:
            return await judge.verify(request)
        except InfrastructureError as error:
            reason = str(error)
    return infrastructure_response(reason, 0)


def _report(results: list[_Result], seconds: float, *, references: bool) -> None:
    for result in results:
        is_unscored = result.verdict is None or not result.verdict.is_score
        if is_unscored or (references and result.verdict is not Verdict.PASS):
            typer.echo(f"{result.item.name}: {result.label}: {result.message}")
    for label, count in Counter(result.label for result in results).most_common():
        typer.echo(f"{label:22}{count:8}{count / len(results):8.1%}")
    by_name: dict[str, list[bool]] = {}
    for result in results:
        if result.verdict is not None and result.verdict.is_score:
            by_name.setdefault(result.item.name, []).append(result.verdict is Verdict.PASS)
    if by_name and not references:
        share = sum(sum(passed) / len(passed) for passed in by_name.values()) / len(by_name)
        typer.echo(f"pass@1 {share:.4f} over {len(by_name)} problems")
    rate = len(results) / seconds
    typer.echo(f"{len(results)} programs in {seconds:.1f} s, {rate:.0f} per second")
