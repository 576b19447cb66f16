"""Judge the submissions of problem packages in the format of Kattis, interactive ones too.

    python -m benchmarks.verifier.packages PACKAGE... [--headers DIR] [--timeout 2]

A package is a directory with data/**/*.in and *.ans, a validator of outputs, and submissions whose
folder names the verdict that the authors expect. Each submission is judged with every input, and
its verdict is compared with its folder. --headers: a directory whose files validators may include,
such as testlib.h. Languages that the verifier has not are skipped and named.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.core.errors import Unsupported
from async_rl.core.programs import Checker, Language, language_of
from async_rl.core.types import StdinTest
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.cells import Cells

# The folders of submissions, and the verdicts that agree with them.
EXPECTED = {
    "accepted": {"pass"},
    "wrong_answer": {"wrong_answer"},
    "time_limit_exceeded": {"timeout"},
    "run_time_error": {"runtime_error"},
    "memory_limit_exceeded": {"memory"},
}
_VALIDATORS = ("output_validator", "output_validators")


def _language(file: Path) -> Language | None:
    return language_of(file.suffix[1:])


def _validator(package: Path) -> Path | None:
    """The file of the validator with `main`: headers lie next to it."""
    folders = [package / name for name in _VALIDATORS if (package / name).is_dir()]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if _language(file)]
    return files[0] if files else None


def tests_of(package: Path, form: str) -> list[StdinTest]:
    """One test for each input of the package."""
    validator = _validator(package)
    checker = None
    if validator is not None:
        checker = Checker(
            code=validator.read_text(),
            form="testlib" if form == "testlib" else "kattis",
            language=_language(validator) or "python",
            interacts="interactive" in (package / "problem.yaml").read_text(),
        )
    return [
        StdinTest(
            input=given.read_text(), output=given.with_suffix(".ans").read_text(), checker=checker
        )
        for given in sorted(package.glob("data/**/*.in"))
    ]


async def _judged(
    files: list[Path], tests: Sequence[StdinTest], headers: Path, timeout_s: float
) -> Counter[str]:
    settings = [f"sandbox.checker_headers={headers}"]
    sandbox = replace(compose_unchecked("grpo_code", settings).sandbox, packages=[])
    counts: Counter[str] = Counter()
    async with await Cells.start(1) as cells:
        judge = Judge(cells, sandbox)
        for file in files:
            language = _language(file)
            expected = EXPECTED.get(file.parent.name)
            if language is None or expected is None:
                print(f"  skipped {file.parent.name}/{file.name}")
                continue
            request = VerifyRequest(
                code=file.read_text(), tests=[*tests], language=language, timeout_s=timeout_s
            )
            try:
                response = await judge.verify(request)
            except Unsupported as error:
                print(f"  skipped {file.parent.name}/{file.name}: {error}")
                continue
            is_same = response.verdict in expected
            counts["as expected" if is_same else "differs"] += 1
            message = response.tests[-1].message
            number = len(response.tests)
            mark = " " if is_same else "!"
            print(f"{mark} {file.parent.name}/{file.name}: {response.verdict} ({number}) {message}")
        await judge.close()
    return counts


def main() -> None:
    """Print the verdict of each submission, and the number that agree with their folders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("packages", type=Path, nargs="+")
    parser.add_argument("--headers", type=Path)
    parser.add_argument("--form", choices=["kattis", "testlib"], default="kattis")
    parser.add_argument("--timeout", type=float, default=2.0)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    for package in arguments.packages:
        validator = _validator(package)
        with tempfile.TemporaryDirectory() as folder:
            sources = [arguments.headers] if arguments.headers else []
            sources += [validator.parent] if validator else []
            for source in sources:
                for header in source.glob("*.h"):
                    (Path(folder) / header.name).write_bytes(header.read_bytes())
            print(f"{package} ({validator.relative_to(package) if validator else 'no validator'})")
            files = sorted(package.glob("submissions/*/*"))
            tests = tests_of(package, arguments.form)
            total += asyncio.run(_judged(files, tests, Path(folder), arguments.timeout))
    print(f"{total['as expected']} of {total.total()} submissions have the expected verdict")


if __name__ == "__main__":
    main()
