"""Facts about checkers in C++, which contests bring: compiled and run in the jail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest
from language_support import Languages
from rewards_support import LIMITS
from tables import table

from async_rl.config.base import replace
from async_rl.core.errors import ConfigError, DataError
from async_rl.core.programs import Checker
from async_rl.core.types import StdinTest, Verdict
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.commands import load_headers
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.cells import Cells

# The part of the interface that these checkers use; the real header is the user's own file.
TESTLIB = table(__file__, "testlib")
CHECKER = table(__file__, "checker")
KATTIS = table(__file__, "kattis")


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headers")
    (folder / "testlib.h").write_text(TESTLIB)
    return folder


def checked(
    languages: Languages,
    headers: Path | None,
    checkers: list[str],
    programs: list[str],
    form: Literal["kattis", "testlib"] = "testlib",
) -> list[TestResult]:
    """The result of each program that partitions 10 into two numbers, by each checker."""
    languages.need("cpp")
    tests = [
        StdinTest(input="10\n", output="2", checker=Checker(code=each, form=form, language="cpp"))
        for each in checkers
    ]
    config = replace(LIMITS, checker_headers=str(headers) if headers else None)

    async def run() -> list[TestResult]:
        async with await Cells.start(1) as cells:
            judge = Judge(cells, config)
            requests = [
                VerifyRequest(code=code, tests=[test]) for test in tests for code in programs
            ]
            try:
                return [(await judge.verify(request)).tests[0] for request in requests]
            finally:
                await judge.close()

    return languages.runner.run(run())


@pytest.mark.proves("sandbox.checker_headers")
def test_a_checker_with_testlib_decides(languages: Languages, headers: Path) -> None:
    programs = ["print(4, 6)", "print(7)\nprint(3)", "print(5, 6)", "print(2, 3, 5)", "print('x')"]
    found = checked(languages, headers, [CHECKER], programs)
    assert [(str(each.verdict), each.message) for each in found] == [
        ("pass", ""),
        ("pass", ""),
        ("wrong_answer", "the sum is 11, not 10"),
        ("wrong_answer", "3 numbers"),
        ("wrong_answer", "Expected integer"),
    ]
    (without,) = checked(languages, None, [CHECKER], ["print(4, 6)"])
    assert without.verdict is Verdict.TEST_ERROR
    assert "the checker does not compile" in without.message
    assert "testlib.h" in without.message


def test_a_checker_in_the_form_of_kattis_decides(languages: Languages) -> None:
    programs = ["print(4, 6)", "print(2, 3, 5)"]
    right, wrong = checked(languages, None, [KATTIS], programs, "kattis")
    assert right.verdict is Verdict.PASS
    assert (wrong.verdict, wrong.message) == (Verdict.WRONG_ANSWER, "wrong sum or number")


FAILING = table(__file__, "failing")


def test_an_output_on_which_a_checker_fails_is_rejected(
    languages: Languages, headers: Path
) -> None:
    checkers = [*FAILING.values(), "int main( {"]
    *failed, broken = checked(languages, headers, checkers, ["print(4, 6)"])
    for name, found in zip(FAILING, failed, strict=True):
        assert found.verdict is Verdict.WRONG_ANSWER, (name, found)
        assert found.message, name
    assert broken.verdict is Verdict.TEST_ERROR


def test_a_checker_in_c_plus_plus_sees_nothing_but_its_files(
    languages: Languages, headers: Path
) -> None:
    code = r"""
#include <dirent.h>
#include "testlib.h"
int main(int argc, char* argv[]) {
    std::string seen;
    for (const char* path : {"/etc/passwd", "/usr/bin/env", "/proc/self/status", "HEADERS"})
        if (std::ifstream(path).good()) seen += path;
    DIR* folder = opendir(".");
    for (dirent* entry; (entry = readdir(folder)) != nullptr;)
        if (entry->d_name[0] != '.') seen += std::string(" ") + entry->d_name;
    quitf(_wa, "%s", seen.c_str());
}
""".replace("HEADERS", str(headers / "testlib.h"))
    (found,) = checked(languages, headers, [code], ["print(4, 6)"])
    assert sorted(found.message.split()) == ["answer", "input", "output"]


def test_headers_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert load_headers(None) == {}
    with pytest.raises(ConfigError, match=r"checker_headers=/nowhere: .*No such file"):
        load_headers("/nowhere")
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="give a directory with only headers"):
        load_headers(os.fspath(tmp_path))


def test_a_row_brings_a_checker_in_c_plus_plus() -> None:
    row = {"input_output": {"inputs": ["10\n"], "outputs": ["2"]}}
    given = {"code": CHECKER, "form": "testlib", "language": "cpp"}
    problem, _ = read_problem({**row, "checker": given})
    (test,) = problem.tests
    assert isinstance(test, StdinTest)
    assert test.checker == Checker(code=CHECKER, form="testlib", language="cpp")
    with pytest.raises(DataError, match="column checker is not as documented"):
        read_problem({**row, "checker": {**given, "language": "pascal"}})
