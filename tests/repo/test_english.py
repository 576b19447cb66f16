"""Prose stays plain: habits of phrase listed in english.toml become rarer, never more frequent.

Counted per 1,000 words in documents (without code), docstrings, comments, and strings of at least
four words. A low rate is necessary for good English, not sufficient.
"""

import ast
import functools
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import files, name, product, syntax

RULES = tomllib.loads((Path(__file__).with_name("english.toml")).read_text())
LIMITS: dict[str, float] = RULES["limits"]
HABITS = [
    (re.compile(rf"\b(?:{habit['phrase']})\b", re.MULTILINE), habit["write"])
    for habit in RULES["habits"]
]
CODE_IN_MARKDOWN = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
MIN_MESSAGE_WORDS = 4
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A piece of prose: where it begins, and its kind, a key of the limits."""

    kind: str
    file: str
    line: int
    words: str


def texts() -> Iterator[Text]:
    """All prose of the repository, except that of its tests."""
    for path in files():
        file = name(path)
        if file.startswith("tests/"):
            continue
        if path.suffix == ".md":
            words = CODE_IN_MARKDOWN.sub(" ", path.read_text())
            yield Text(kind="docs", file=file, line=1, words=words)
        elif path.suffix == ".py":
            yield from python_texts(path.read_text(), file)


def python_texts(source: str, file: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            docstrings.add(statement.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        kind = "docstrings" if node in docstrings else "messages"
        if kind == "docstrings" or len(node.value.split()) >= MIN_MESSAGE_WORDS:
            yield Text(kind=kind, file=file, line=node.lineno, words=node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            yield Text(kind="comments", file=file, line=token.start[0], words=words)


def findings(text: Text) -> Iterator[str]:
    for phrase, write in HABITS:
        for match in phrase.finditer(text.words):
            line = text.line + text.words[: match.start()].count("\n")
            yield f"{text.file}:{line}: {match.group()!r}; write: {write}"


@functools.cache
def counted() -> tuple[Counter[str], dict[str, list[str]]]:
    """Return (number of words, findings) of each kind of text."""
    num_words: Counter[str] = Counter()
    found: dict[str, list[str]] = {kind: [] for kind in LIMITS}
    for text in texts():
        num_words[text.kind] += len(text.words.split())
        found[text.kind].extend(findings(text))
    return num_words, found


@pytest.mark.parametrize("kind", LIMITS)
def test_habits_of_phrase_do_not_become_more_frequent(kind: str) -> None:
    num_words, found = counted()
    rate = 1000 * len(found[kind]) / num_words[kind]
    assert rate <= LIMITS[kind], f"{rate:.2f} per 1,000 words\n" + "\n".join(found[kind])


def test_names_say_what_they_hold() -> None:
    names: list[str] = []
    for path in product():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append(node.id)
            elif isinstance(node, ast.arg):
                names.append(node.arg)
    habits = Counter(word for word in names if word.lstrip("_") in RULES["names"]["words"])
    assert 1000 * habits.total() / len(names) <= RULES["names"]["limit"], habits


def test_each_habit_matches_in_a_sentence_and_common_phrases_pass() -> None:
    def found(words: str) -> list[str]:
        text = Text(kind="docs", file="x.md", line=1, words=words)
        return [finding.split("'")[1] for finding in findings(text)]

    found_here = ["tells", "gives", "goes on", "at once", "nobody", "Who gives"]
    assert found("It goes on at once.\nWho gives up tells nobody.") == found_here
    assert found("It no longer stands for a body; not so much that it matters.") == []
