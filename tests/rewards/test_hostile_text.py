"""Text that a policy wrote in order to stall its reader: the time of every reader grows linearly
with the text, and one that cannot promise that runs where it can be ended.
"""

import ast
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tables import table

from async_rl.core.programs import OutputRules
from async_rl.core.types import AnswerTest, CallTest, CodeProblem
from async_rl.rewards import responses, scoring
from async_rl.rewards.responses import (
    answer_of,
    boxed,
    complete_blocks,
    extract_code,
    is_right,
    is_well_formed,
    vote_of,
)
from async_rl.rewards.verifier.languages import source_names
from async_rl.rewards.verifier.outcomes import printable
from async_rl.sandbox.comparison import Comparison

ROOT = Path(responses.__file__).parents[1]
SIZE = 1 << 17
GSM8K = AnswerTest(rule="gsm8k", expected="#### 7")
MATH = AnswerTest(rule="math", expected="7")
EXACT = AnswerTest(rule="exact", expected="7")
CODE = CodeProblem(tests=[CallTest(function="f", args=[1], expected=1)])

COMPARISON = Comparison(relative_tolerance=0)
NEAR = OutputRules(relative_tolerance=0.1)
LOOSE = OutputRules(layout="tokens", absolute_tolerance=float("inf"))

LINEAR: dict[str, Callable[[str], object]] = {
    "fences": lambda text: extract_code(text, "auto"),
    "blocks of steps": complete_blocks,
    "number": lambda text: is_right(GSM8K, text),
    "vote by number": lambda text: answer_of(GSM8K, text),
    "box": boxed,
    "vote by box": lambda text: answer_of(MATH, text),
    "last line": lambda text: is_right(EXACT, text),
    "form": is_well_formed,
    "words": re.compile(r"\b(?:numpy|torch)\b").search,
    "output": lambda text: COMPARISON.outputs_equal(text, text + " 1.5", NEAR),
    "output, all wrong": lambda text: COMPARISON.outputs_equal(
        text, "2.5 " * (len(text) // 2), LOOSE
    ),
    "paragraphs": scoring.PARAGRAPH_END.findall,
    "java names": source_names,
    "compiler's text": lambda text: printable(text.encode(), 2000),
    "vote by program": lambda text: vote_of(CODE, text, "auto"),
}
PIECES = table(__file__, "pieces")
"""Reader -> texts whose repetition it must read in linear time."""
ENDABLE = {"rewards/responses.py:re.search": "the rule regex: runs in a child, TextProcess"}
"""Regular expressions without a bound, and the process that can be ended."""
READERS = table(__file__, "readers")
"""Regular expressions that read what a policy wrote, and their reader in LINEAR."""


def _seconds(read: Callable[[str], object], text: str) -> float:
    started = time.process_time()
    read(text)
    return time.process_time() - started


@pytest.mark.parametrize("name", PIECES)
def test_time_of_a_reader_grows_linearly_with_a_hostile_text(name: str) -> None:
    for start in ("", "<think>", "#### ", "```python\n", "f'"):
        for piece in PIECES[name]:
            text = start + piece * (SIZE // len(piece))
            # Of 128 KB, which is 32,000 tokens, a quadratic reader takes half a minute and more.
            assert _seconds(LINEAR[name], text) < 3.0, (name, start, piece)


def test_every_regular_expression_over_model_output_has_a_bound() -> None:
    found = {place for folder in ("rewards", "rollouts", "generation") for place in _places(folder)}
    assert found == {*ENDABLE, *READERS}


def _places(folder: str) -> Iterator[str]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Assign(targets=[target], value=ast.Call(func=ast.Attribute() as used)):
                    if ast.unparse(used) == "re.compile":
                        yield f"{file}:{ast.unparse(target)}"
                case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name)):
                    if name not in ("compile", "escape"):
                        yield f"{file}:re.{name}"


def test_no_more_than_the_limit_is_parsed_beginning_with_the_last_block() -> None:
    half = "x = 1\n" * (responses.MAX_PARSED_CHARS // 12)
    response = "".join(f"```\ny = {index}234567890123456\n{half}```\n" for index in range(3))
    assert [block.code[4] for block in complete_blocks(response)] == ["2"]
    assert extract_code(f"```\n{half * 3}```\n", "auto") == half * 3
