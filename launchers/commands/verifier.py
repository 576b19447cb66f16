"""The verifier without a run: `async-rl verify` scores a file of completions, `async-rl verifier`
is the HTTP server, and `async-rl data check` scores the reference solutions of a data set here.

Invariants
- Every program of a file has exactly one verdict; a program that could not be judged is listed as
  such, never counted as a wrong program. The verdicts go to stdout, the progress to stderr.
- The server has its settings from conf/ and the arguments; it binds loopback by default; it always
  requires a token, and prints one if none is given; the first SIGTERM or Ctrl-C drains, the second
  exits immediately.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, TypeVar

import msgspec
import typer

from async_rl.core.errors import ConfigError, DataError, at
from async_rl.core.machine import this_machine
from async_rl.core.types import Verdict
from async_rl.launchers.commands.options import Port, Settings, show_progress
from async_rl.rewards.verifier.protocol import VerifyRequest, VerifyResponse

if TYPE_CHECKING:
    from async_rl.config.run import RunConfig
    from async_rl.rewards.verifier.service import VerifierService

T = TypeVar("T")
_COMPLETIONS = ("completions", "completion", "responses", "response")
_REFERENCES = (
    *("canonical_solution", "gold_standard_solution", "solutions", "solution", "code"),
    "completion",  # of LeetCodeDataset
)
# PYTHON3 of CodeContests.
_PYTHON = 3
_IDS = ("task_id", "query_id", "id")


class _Program(NamedTuple):
    """A program of the file with the name of its row; of a row that cannot be used the reason."""

    row: str
    name: str
    request: VerifyRequest | DataError


_Result = tuple[_Program, VerifyResponse]
"""A program and its verdict: a test error for a row that cannot be used."""


def _text(program: _Program, response: VerifyResponse) -> str:
    """Return the verdict for people, with the reason."""
    failed = (test.message for test in response.tests if test.verdict is not Verdict.PASS)
    return f"{program.name}: {response.verdict}: {response.failure or next(failed, '')}"


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
    # The imports of a composer take half a second, which --help need not wait for.
    from async_rl.composition.compose import verifier_config
    from async_rl.composition.overrides import with_defaults

    # A cell runs one program, which uses one core.
    cells = f"verifiers.cells={len(this_machine().cores)}"
    config = verifier_config(with_defaults(settings or [], [cells]))
    # Read before any program runs: the command exits immediately if a file has no usable column.
    programs = list(_programs(file, _COMPLETIONS, config))
    # No verdict is not the same as no failure: a script would read exit code 0.
    if not programs:
        raise DataError(f"{file}: has no rows; nothing was scored")
    with output.open("xb") if output else nullcontext() as lines:
        results = asyncio.run(_score(programs, config, lines))
    _report(results)
    # A wrong completion is a result.
    if not all(response.verdict.is_score for _, response in results):
        raise typer.Exit(1)


async def wrong_references(
    files: Sequence[str], config: RunConfig, service: VerifierService
) -> list[str]:
    """Return the reference solutions that the tests of their rows reject, with reasons."""
    try:
        programs = [program for file in files for program in _programs(file, _REFERENCES, config)]
    except DataError as error:
        return [str(error)]
    results = await _judged(programs, service)
    return [_text(*result) for result in results if result[1].verdict is not Verdict.PASS]


def _programs(file: str, columns: tuple[str, ...], config: RunConfig) -> Iterator[_Program]:
    """Yield the programs of the file in order. Raises DataError if it cannot be read or a row has
    no completion. A row may have no reference solution, or one that is no program.
    """
    from async_rl.data.files import read_rows
    from async_rl.data.problems import read_problem
    from async_rl.rewards.responses import extract_code

    is_reference = columns is _REFERENCES
    for position, row in read_rows(file):
        column = next((column for column in columns if row.get(column) is not None), None)
        if column is None and is_reference:
            continue
        if column is None:
            raise DataError(
                f"{position}: has {', '.join(sorted(row))}, but none of {', '.join(columns)}; one"
                " must contain the program"
            )
        with at(position):
            texts = _texts(f"column {column}", row[column])
        ids = (str(row[key]) for key in _IDS if row.get(key) is not None)
        row_name = next(ids, position.rpartition(", ")[2])
        try:
            with at(position):
                problem, _ = read_problem(row)
        except DataError as error:
            # `data check` lists such rows itself.
            if not is_reference:
                yield _Program(row_name, row_name, error)
            continue
        if is_reference and problem.wants_words:
            continue
        for number, text in enumerate(texts, 1):
            code = extract_code(text, config.reward.extraction, problem.language)
            if code is None:
                # A reference solution is code without a fence; a completion without code fails.
                code = text if is_reference else ""
            request = VerifyRequest(
                code=_complete(row, code),
                tests=problem.tests,
                setup=problem.setup,
                language=problem.language,
            )
            name = row_name if len(texts) == 1 else f"{row_name}, {number} of {len(texts)}"
            yield _Program(row_name, name, request)


def _texts(column: str, value: Any) -> list[str]:
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


async def _score(
    programs: list[_Program], config: RunConfig, lines: BinaryIO | None
) -> list[_Result]:
    from async_rl.rewards.verifier.service import open_service

    async with open_service(config) as service:
        typer.echo(f"{len(programs)} programs, jail level {service.cells.level}", err=True)
        return await _judged(programs, service, lines)


async def _judged(
    programs: Sequence[_Program], service: VerifierService, lines: BinaryIO | None = None
) -> list[_Result]:
    results: list[_Result] = []

    async def judge(program: _Program) -> None:
        if isinstance(program.request, DataError):
            response = VerifyResponse(
                verdict=Verdict.TEST_ERROR, tests=[], level=0, failure=str(program.request)
            )
        else:
            response = await service.verify(program.request)
        results.append((program, response))
        if lines is not None:
            line = {"name": program.name, **msgspec.to_builtins(response)}
            lines.write(msgspec.json.encode(line) + b"\n")
        show_progress(len(results), len(programs), "programs")

    await for_each(programs, judge, service.num_cells)
    return results


def _report(results: list[_Result]) -> None:
    # pass@1 is the mean over problems, whatever number of completions each has.
    by_row: dict[str, list[bool]] = defaultdict(list)
    for program, response in results:
        if response.verdict.is_score:
            by_row[program.row].append(response.verdict is Verdict.PASS)
        else:
            typer.echo(_text(program, response))
    for verdict, count in Counter(response.verdict for _, response in results).most_common():
        typer.echo(f"{verdict:22}{count:8}{count / len(results):8.1%}")
    if by_row:
        share = fmean(map(fmean, by_row.values()))
        typer.echo(f"pass@1 {share:.4f} over {len(by_row)} problems")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], cells: int) -> None:
    """Call `work` for every item, for as many at a time as keep all cells of a verifier busy."""
    remaining = iter(items)

    async def worker() -> None:
        for item in remaining:
            await work(item)

    async with asyncio.TaskGroup() as group:
        # Two for each cell: the next program is ready when a cell becomes free.
        for number in range(2 * cells):
            group.create_task(worker(), name=f"worker {number}")


def verifier(
    settings: Settings = None,
    host: Annotated[str | None, typer.Option(help="address to bind; default: loopback")] = None,
    port: Port = 0,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ASYNC_RL_TOKEN",
            help="token that clients must send; default: a new one, which is printed",
        ),
    ] = None,
) -> None:
    """Serve verdicts over HTTP until stopped, without a run. Settings of sandbox, verifiers and
    reward can differ from conf/.

    Examples: async-rl verifier; async-rl verifier --port 8080 verifiers.cells=4 sandbox.timeout_s=5
    """
    from async_rl.composition.compose import verifier_config
    from async_rl.wire.addresses import host_for_people

    config = verifier_config(settings or [])
    # An empty variable of the environment would mean no protection.
    if token == "":
        raise ConfigError("--token is empty; give one, or omit the option to get a new one")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    address = host or host_for_people(config.network)
    asyncio.run(_serve(config, address, port, token))


async def _serve(config: RunConfig, host: str, port: int, token: str | None) -> None:
    from async_rl.rewards.verifier.server import serve
    from async_rl.rewards.verifier.service import open_service
    from async_rl.wire.http import listen

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        stopping.set()
        # Without our handler, the next signal kills the process.
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, stop)
    # Never without a token: any user of the machine reaches loopback.
    secret = token or secrets.token_urlsafe()
    with listen(host, port) as listener:
        async with open_service(config, has_functions=True) as service:

            async def ready(url: str) -> None:
                jail = f"jail level {service.cells.level}, {service.num_cells} cells"
                typer.echo(f"verifier at {url} ({jail})")
                if token is None:
                    typer.echo(f"token {secret}")
                for reason in service.cells.reasons:
                    typer.echo(f"a stronger jail was not possible: {reason}")

            await serve(
                service,
                listener,
                token=secret,
                ready=ready,
                stopping=stopping,
                log=logging.getLogger("async_rl"),
            )
    typer.echo("verifier ended: all admitted requests are answered")
