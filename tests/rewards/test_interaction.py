"""Facts about interactive problems: a program and a checker in any language, in two cells, each
reading what the other prints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import pytest
from language_support import Languages
from rewards_support import LIMITS, Jail
from tables import table

from async_rl.config.base import replace
from async_rl.core.errors import DataError
from async_rl.core.programs import LANGUAGES, Checker, Language
from async_rl.core.types import StdinTest, Verdict
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.cells import Cells

INTERACTORS, PLAYERS = table(__file__, "interactors"), table(__file__, "players")
LOSERS, NATIVE_LOSERS = table(__file__, "losers"), table(__file__, "native losers")
HEAD = "#include <bits/stdc++.h>\n#include <unistd.h>\n#include <signal.h>\nint main() {{ {} }}"
Form = Literal["kattis", "testlib"]


def game(
    program: str, language: Language, interactor: Language, form: Form = "kattis", limit: int = 7
) -> VerifyRequest:
    accepts, number = ("42", "2") if form == "kattis" else ("0", "3")
    code = INTERACTORS[interactor].replace("ACCEPTS", accepts).replace("NUMBER", number)
    checker = Checker(code=code, form=form, language=interactor, interacts=True)
    test = StdinTest(input="77\n", output=str(limit), checker=checker)
    return VerifyRequest(code=program, language=language, tests=[test], timeout_s=0.5)


class Table:
    """A judge with one cell of each kind, which counts the cells that break."""

    def __init__(self, languages: Languages) -> None:
        self.languages = languages
        self.cells = self.run(Cells.start(1))
        self.judge = Judge(self.cells, replace(LIMITS, memory_mb=256))

    def run(self, work):  # type: ignore[no-untyped-def]
        return self.languages.runner.run(work)

    def play(self, request: VerifyRequest) -> TestResult:
        for language in (request.language, request.tests[0].checker.language):  # type: ignore[union-attr]
            if language != "python":
                self.languages.need(language)
        (found,) = self.run(self.judge.verify(request)).tests
        assert found.verdict.is_score, found
        return found


@pytest.fixture(scope="module")
def at_table(languages: Languages) -> Iterator[Table]:
    made = Table(languages)
    yield made
    assert made.judge.num_replaced == 0
    made.run(made.judge.close())
    made.run(made.cells.close())


@pytest.mark.parametrize("form", ["kattis", "testlib"])
def test_a_checker_that_interacts_answers_the_program(jail: Jail, form: Form) -> None:
    (found,) = jail.verify(game(PLAYERS["python"], "python", "python", form)).tests
    assert found.verdict is Verdict.PASS, found


@pytest.mark.parametrize("name", LOSERS)
def test_a_program_that_does_not_play_loses(jail: Jail, name: str) -> None:
    program, verdict = LOSERS[name]
    (found,) = jail.verify(game(program, "python", "python", "testlib")).tests
    assert found.verdict == verdict, found


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_program_in_each_language_plays(at_table: Table, language: Language) -> None:
    for interactor in ("cpp", "python"):
        found = at_table.play(game(PLAYERS[language], language, interactor))
        assert found.verdict is Verdict.PASS, found
    found = at_table.play(game(PLAYERS[language], language, "cpp", "testlib", limit=5))
    assert (found.verdict, found.message) == (Verdict.WRONG_ANSWER, "too many questions")


@pytest.mark.parametrize("interactor", INTERACTORS)
@pytest.mark.parametrize("form", ["kattis", "testlib"])
def test_a_checker_in_several_languages_interacts(
    at_table: Table, interactor: Language, form: Form
) -> None:
    for player in ("python", "cpp"):
        found = at_table.play(game(PLAYERS[player], player, interactor, form))
        assert found.verdict is Verdict.PASS, found
    found = at_table.play(game(LOSERS["guesses"][0], "python", interactor, form))
    assert found.verdict is Verdict.WRONG_ANSWER, found


@pytest.mark.parametrize("name", NATIVE_LOSERS)
def test_a_program_in_c_plus_plus_that_does_not_play_loses(at_table: Table, name: str) -> None:
    body, verdict = NATIVE_LOSERS[name]
    for interactor in ("python", "cpp"):
        found = at_table.play(game(HEAD.format(body), "cpp", interactor))
        assert found.verdict == verdict, (interactor, found)


def test_a_checker_that_does_not_compile_is_a_test_error(at_table: Table) -> None:
    for language in ("cpp", "python"):
        checker = Checker(code="does not (", form="kattis", language=language, interacts=True)
        test = StdinTest(input="", output="", checker=checker)
        request = VerifyRequest(code=PLAYERS["python"], tests=[test])
        (found,) = at_table.run(at_table.judge.verify(request)).tests
        assert found.verdict is Verdict.TEST_ERROR, found
        assert "the checker does not compile" in found.message


def test_more_games_than_cells_end(at_table: Table) -> None:
    async def play_all() -> list[Verdict]:
        games = [
            game(PLAYERS[language], language, interactor)
            for language in ("cpp", "python")
            for interactor in ("cpp", "python")
        ]
        found = await asyncio.gather(*(at_table.judge.verify(each) for each in games * 3))
        return [each.verdict for each in found]

    at_table.languages.need("cpp")
    assert at_table.run(play_all()) == [Verdict.PASS] * 12


def test_a_row_of_any_language_may_interact() -> None:
    pairs = {"inputs": ["77\n"], "outputs": ["7"]}
    checker = {"code": INTERACTORS["cpp"], "form": "testlib", "language": "cpp", "interacts": True}
    row = {"official_tests": pairs, "prompt": "Play.", "interaction_format": "Ask."}
    problem, _ = read_problem({**row, "checker": checker, "language": "rust"})
    assert problem.language == "rust"
    with pytest.raises(DataError, match="interaction_format=Ask"):
        read_problem(row)
    for wrong in ({"language": "python"}, {"interacts": False}):
        with pytest.raises(DataError, match="has another form"):
            read_problem({**row, "checker": {**checker, **wrong, "form": "printed"}})
