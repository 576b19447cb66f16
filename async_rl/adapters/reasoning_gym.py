"""Tasks of `reasoning_gym`: generators of problems that check their answers themselves.

    reward.terms.right=async_rl.adapters.reasoning_gym:score
    data.train_files=[letters.jsonl]

To write rows, here 500 of the generator `letter_counting`, with a seed and one of its settings:

    python -m async_rl.adapters.reasoning_gym letter_counting 500 seed=7 max_words=6 > letters.jsonl

The answer is the text between the last <answer> and </answer>, as the prompts of the package
request, otherwise the whole response. The generator gives the score, from 0 to 1.

Some generators evaluate an answer as Python. They get only arithmetic, or lists of numbers, which
name nothing that could be called and multiply no list; other answers score 0. A generator is
refused if its own right answers are not of this kind, or do not score 1. So an answer on which its
check fails is the fault of that answer, and scores 0.
"""

import functools
import inspect
import re
import sys
from typing import Any

import msgspec
import reasoning_gym
from reasoning_gym.utils import extract_answer

from async_rl.config.base import by_name
from async_rl.core.errors import DataError

_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
# No power and no product of a list: 9**9**9 would take for ever, and [1]*9**9 all memory.
_HARMLESS = re.compile(r"(?!.*\*\s*\*)[\d\s+\-*/().]*|[\d\s\-.,\[\]'\"]*", re.DOTALL)

_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


def score(sample: Any) -> float:
    """Return the score of a response by the generator of its row, which has the keys of `rows`."""
    task = sample.row["reasoning_gym"]
    answer = extract_answer(sample.response) or sample.response.strip()
    if _evaluates(task["name"]) and not _HARMLESS.fullmatch(answer):
        return 0.0
    try:
        return float(_generator(task["name"]).score_answer(answer, entry=task["entry"]))
    # It cannot read the text, such as a word where it wants a number.
    except _UNREADABLE:
        return 0.0


@functools.cache
def _evaluates(name: str) -> bool:
    """Whether the module of a generator can evaluate text as Python."""
    source = inspect.getsource(sys.modules[type(_generator(name)).__module__])
    return _EVALUATES.search(source) is not None


def rows(name: str, number: int, **settings: Any) -> list[dict[str, Any]]:
    """Return rows of a generator, with the prompts that it writes. settings: of its configuration.
    Raises DataError for a name or a setting that the installed package does not have, and for a
    generator that cannot score its own answers, or only by evaluating any text as Python.
    """
    try:
        dataset = reasoning_gym.create_dataset(name, size=number, **settings)
        entries = list(dataset)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym {name}: {error}") from error
    for entry in entries:
        answer = entry["answer"]
        if _evaluates(name) and not _HARMLESS.fullmatch(str(answer)):
            raise DataError(
                f"reasoning_gym {name}: it evaluates each answer as Python, which may do anything"
                " on this machine; choose another generator"
            )
        # Some generators know no answer and check any.
        if answer is not None and dataset.score_answer(answer, entry=entry) < 1:
            raise DataError(f"reasoning_gym {name}: its own answer {answer!r:.80} scores below 1")
    return [
        {
            "id": f"{name}/{index}",
            "data_source": name,
            "prompt": entry["question"],
            "reasoning_gym": {"name": name, "entry": entry},
        }
        for index, entry in enumerate(entries)
    ]


@functools.cache
def _generator(name: str) -> Any:
    # The check of an answer needs no problem but the entry.
    return reasoning_gym.create_dataset(name, size=1)


def main() -> None:
    """Write rows as lines of JSON."""
    name, number, *words = sys.argv[1:]
    settings = {key: msgspec.json.decode(value) for key, value in by_name(words).items()}
    lines = msgspec.json.Encoder().encode_lines(rows(name, int(number), **settings))
    sys.stdout.write(lines.decode())


if __name__ == "__main__":
    main()
