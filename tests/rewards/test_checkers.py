"""Facts about checkers of rows: how a row brings one, its headers, and what it sees. What they
decide is in programs.yaml.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rewards_support import HEADERS, Jail

from async_rl.core.errors import ConfigError, DataError
from async_rl.core.programs import Checker
from async_rl.core.types import StdinTest, Verdict
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.commands import load_headers

SEES = r"""
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
"""


@pytest.mark.proves("sandbox.checker_headers")
def test_a_checker_in_c_plus_plus_sees_nothing_but_its_files(jail: Jail) -> None:
    code = SEES.replace("HEADERS", str(HEADERS / "testlib.h"))
    checker = Checker(code=code, form="testlib", language="cpp")
    found = jail.result("print(4, 6)", StdinTest(input="10\n", output="2", checker=checker))
    assert found.verdict is Verdict.WRONG_ANSWER
    assert sorted(found.message.split()) == ["answer", "input", "output"]


def test_headers_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert load_headers(None) == {}
    with pytest.raises(ConfigError, match=r"checker_headers=/nowhere: .*No such file"):
        load_headers("/nowhere")
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="give a directory with only headers"):
        load_headers(os.fspath(tmp_path))


def test_a_column_of_a_row_names_the_checker() -> None:
    pairs = {"input_output": {"inputs": ["10\n", "9\n"], "outputs": ["2", "1"]}}
    python = Checker(code="x = 1", form="testlib")
    native = Checker(code="int main() {}", form="testlib", language="cpp")
    given: list[tuple[Any, Checker]] = [
        ({"code": python.code, "form": "testlib"}, python),
        (msgspec.json.encode(python).decode(), python),
        ({"code": native.code, "form": "testlib", "language": "cpp"}, native),
    ]
    for column, checker in given:
        problem, _ = read_problem({**pairs, "checker": column})
        assert [test.checker for test in problem.tests] == [checker] * 2  # type: ignore[union-attr]
    pascal = {"code": "x", "form": "testlib", "language": "pascal"}
    for wrong in ({"code": "x ="}, {"code": "x =", "form": "kattis"}, "[]", pascal):
        with pytest.raises(DataError, match=r"column checker (is|does) not"):
            read_problem({**pairs, "checker": wrong})
