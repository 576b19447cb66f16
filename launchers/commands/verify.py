"""`async-rl verify`: scores a file of completions, or checks the reference solutions of a data set,
on cells of its own.

Invariants: every program of the file gets exactly one verdict; an infrastructure error is tried
again and, if it stays, is listed as such, never counted among the wrong ones.  The verdicts go to
stdout, the progress bar to stderr.
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

from async_rl.core.errors import ConfigError, DataError, InfrastructureError
from async_rl.core.types import CodeProblem, Verdict
from async_rl.launchers.commands.verifier import VerifierSettings, verifier_config

if TYPE_CHECKING:
    from async_rl.config.run import RunConfig
    from async_rl.rewards.verifier.judging import Judge
    from async_rl.rewards.verifier.protocol import VerifyResponse

_TRIES = 3
_COMPLETIONS = ("completions", "completion", "responses", "response")
_REFERENCES = ("canonical_solution", "solutions", "solution", "code")
_IDS = ("task_id", "query_id", "id")


class _Item(NamedTuple):
    """One program of the file with its problem; the problem is None where the row is of no use, and
    program says why.
    """

    name: str
    problem: CodeProblem | None
    program: str


class _Result(NamedTuple):
    """What became of an item."""

    item: _Item
    verdict: Verdict | None
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
    settings: VerifierSettings = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="programs that run side by side; default: one per core"),
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

    config = verifier_config(list(settings or []))
    num_workers = workers or len(this_machine().cores)
    columns = _REFERENCES if references else _COMPLETIONS
    num_programs = sum(len(programs) for _, _, programs in _rows(file, columns))
    if not num_programs:
        raise DataError(f"{file}: has no rows; nothing was scored")
    started = time.monotonic()
    with _opened(output) as lines:
        results = asyncio.run(
            _score(_items(file, columns, config), num_programs, config, num_workers, lines)
        )
    _report(results, time.monotonic() - started, references=references)
    failed = {result.verdict for result in results} - {Verdict.PASS}
    if failed if references else failed & {Verdict.INFRASTRUCTURE_ERROR, None}:
        raise typer.Exit(1)


def _opened(output: Path | None) -> AbstractContextManager[BinaryIO | None]:
    try:
        return open(output, "xb") if output else nullcontext()
    except OSError as error:
        raise ConfigError(
            f"--output {output}: cannot be made ({error.strerror}); choose another"
        ) from error


def _rows(file: str, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """(place, row, the texts with its programs) in order. Raises DataError if the file cannot be
    read or has no such column.
    """
    from async_rl.data.files import read_rows

    for place, row in read_rows(file):
        column = next((column for column in columns if row.get(column) is not None), None)
        if column is None:
            raise DataError(
                f"{place}: none of the columns {', '.join(columns)} among {', '.join(sorted(row))};"
                " one must hold the program"
            )
        yield place, row, _programs(place, column, row[column])


def _items(file: str, columns: tuple[str, ...], config: RunConfig) -> Iterator[_Item]:
    from async_rl.data.problems import read_problem
    from async_rl.rewards.extraction import extract_code

    for place, row, programs in _rows(file, columns):
        name = next(
            (f"{row[key]}" for key in _IDS if row.get(key) is not None), place.rpartition(", ")[2]
        )
        try:
            problem, _ = read_problem(place, row)
        except DataError as error:
            yield from (_Item(name, None, str(error)) for _ in programs)
            continue
        for text in programs:
            code = extract_code(text, config.reward.extraction)
            yield _Item(
                name,
                problem,
                _whole(row, text if code is None and columns is _REFERENCES else code or ""),
            )


def _programs(place: str, column: str, value: Any) -> list[str]:
    if isinstance(value, str) and column == "solutions":
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise DataError(f"{place}: column solutions is no JSON list ({error})") from error
    programs = [value] if isinstance(value, str) else value
    if not isinstance(programs, list) or not all(isinstance(program, str) for program in programs):
        raise DataError(f"{place}: column {column} must hold a string or a list of strings")
    return programs


def _whole(row: dict[str, Any], code: str) -> str:
    """HumanEval's completions go on where the prompt ends."""
    entry = row.get("entry_point")
    return (
        f"{row['prompt']}{code}"
        if entry and isinstance(row.get("prompt"), str) and f"def {entry}(" not in code
        else code
    )


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
    verifiers = msgspec.structs.replace(config.verifiers, cells=workers)
    async with open_service(verifiers, config.sandbox, Activity(), config.timeouts) as service:
        typer.echo(
            f"{num_programs} programs, {workers} at a time, jail level {service.cells.level}",
            err=True,
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("", total=num_programs, passed=0)
            num_passed = 0

            async def work() -> None:
                nonlocal num_passed
                for item in items:
                    result = await _one(service.judge, item, lines)
                    results.append(result)
                    num_passed += result.verdict is Verdict.PASS
                    progress.update(bar, advance=1, passed=num_passed)

            async with asyncio.TaskGroup() as group:
                for _ in range(2 * workers):
                    group.create_task(work())
    return results


async def _one(judge: Judge, item: _Item, lines: BinaryIO | None) -> _Result:
    from async_rl.rewards.verifier.protocol import VerifyRequest, infrastructure_response

    if item.problem is None:
        return _Result(item, None, item.program)
    request = VerifyRequest(code=item.program, tests=item.problem.tests, setup=item.problem.setup)
    response: VerifyResponse | None = None
    for _ in range(_TRIES):
        try:
            response = await judge.verify(request)
            break
        except InfrastructureError as error:
            response = infrastructure_response(str(error), 0)
    assert response is not None
    if lines is not None:
        lines.write(
            msgspec.json.encode({"name": item.name, **msgspec.to_builtins(response)}) + b"\n"
        )
    failed = next((test for test in response.tests if test.verdict is not Verdict.PASS), None)
    return _Result(item, response.verdict, failed.message if failed else "")


def _report(results: list[_Result], seconds: float, *, references: bool) -> None:
    counts = Counter(
        "unusable row" if result.verdict is None else result.verdict.value for result in results
    )
    for result in results:
        if (
            result.verdict is None
            or result.verdict is Verdict.INFRASTRUCTURE_ERROR
            or (references and result.verdict is not Verdict.PASS)
        ):
            typer.echo(
                f"{result.item.name}: {result.verdict.value if result.verdict else 'unusable row'}:"
                f" {result.message}"
            )
    for name, count in counts.most_common():
        typer.echo(f"{name:22}{count:8}{count / len(results):8.1%}")
    by_name: dict[str, list[bool]] = {}
    for result in results:
        if result.verdict not in (None, Verdict.INFRASTRUCTURE_ERROR):
            by_name.setdefault(result.item.name, []).append(result.verdict is Verdict.PASS)
    if by_name and not references:
        share = sum(sum(passed) / len(passed) for passed in by_name.values()) / len(by_name)
        typer.echo(f"pass@1 {share:.4f} over {len(by_name)} problems")
    typer.echo(
        f"{len(results)} programs in {seconds:.1f} s, {len(results) / seconds:.0f} per second"
    )
