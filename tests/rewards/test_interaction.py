"""Facts about interactive problems: a program and a checker in any language, in two cells, each
reading what the other prints; and about checkers of rows. What these decide is in programs.yaml.
"""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Literal

import pytest
from rewards_support import HEADERS, Jail
from tables import table

from async_rl.core.programs import Checker, Language
from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest

INTERACTORS, PLAYERS, LOSERS, NATIVE_LOSERS, HEAD = (
    table(__file__, name) for name in ("interactors", "players", "losers", "native losers", "head")
)
Form = Literal["kattis", "testlib"]


def game(interactor: Language, form: Form = "kattis", limit: int = 7) -> StdinTest:
    accepts, number = ("42", "2") if form == "kattis" else ("0", "3")
    code = INTERACTORS[interactor].replace("ACCEPTS", accepts).replace("NUMBER", number)
    checker = Checker(code=code, form=form, language=interactor, interacts=True)
    return StdinTest(input="77\n", output=str(limit), checker=checker)


@pytest.fixture(scope="module", autouse=True)
def _no_cell_breaks(jail: Jail) -> Iterator[None]:
    before = jail.judge.num_replaced
    yield
    assert jail.judge.num_replaced == before


def play(jail: Jail, program: str, language: str, test: StdinTest) -> TestResult:
    found = jail.result(program, test, language, memory_mb=256)
    assert found.verdict.is_score, found
    return found


@pytest.mark.parametrize("language", PLAYERS)
def test_a_program_plays(jail: Jail, language: Language) -> None:
    for interactor in ("python", "cpp"):
        found = play(jail, PLAYERS[language], language, game(interactor))
        assert found.verdict is Verdict.PASS, found


@pytest.mark.parametrize("interactor", INTERACTORS)
def test_a_checker_decides_in_both_forms(jail: Jail, interactor: Language) -> None:
    asks, guesses = PLAYERS["python"], LOSERS["guesses"][0]
    found = play(jail, asks, "python", game(interactor, "testlib"))
    assert found.verdict is Verdict.PASS, found
    found = play(jail, asks, "python", game(interactor, "testlib", limit=5))
    assert (found.verdict, found.message) == (Verdict.WRONG_ANSWER, "too many questions")
    found = play(jail, guesses, "python", game(interactor))
    assert found.verdict is Verdict.WRONG_ANSWER, found


@pytest.mark.parametrize("name", LOSERS)
def test_a_program_that_does_not_play_loses(jail: Jail, name: str) -> None:
    program, verdict = LOSERS[name]
    found = play(jail, program, "python", game("python", "testlib"))
    assert found.verdict == verdict, found


@pytest.mark.parametrize("name", NATIVE_LOSERS)
def test_a_program_in_c_plus_plus_that_does_not_play_loses(jail: Jail, name: str) -> None:
    body, verdict = NATIVE_LOSERS[name]
    found = play(jail, f"{HEAD}int main() {{ {body} }}", "cpp", game("cpp"))
    assert found.verdict == verdict, found


def test_more_games_than_cells_end(jail: Jail) -> None:
    async def play_all() -> list[Verdict]:
        languages: list[Language] = ["cpp", "python"]
        games = [
            VerifyRequest(code=PLAYERS[player], language=player, tests=[game(interactor)])
            for player, interactor in itertools.product(languages, repeat=2)
        ]
        found = await asyncio.gather(*(jail.judge.verify(each) for each in games * 3))
        return [each.verdict for each in found]

    jail.need("cpp")
    assert jail.run(play_all()) == [Verdict.PASS] * 12


@pytest.mark.proves("sandbox.checker_headers")
def test_a_checker_in_c_plus_plus_sees_nothing_but_its_files(jail: Jail) -> None:
    code = table(__file__, "sees").replace("HEADERS", str(HEADERS / "testlib.h"))
    checker = Checker(code=code, form="testlib", language="cpp")
    found = jail.result("print(4, 6)", StdinTest(input="10\n", output="2", checker=checker))
    assert found.verdict is Verdict.WRONG_ANSWER
    assert sorted(found.message.split()) == ["answer", "input", "output"]
