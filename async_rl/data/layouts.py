"""The layouts of rows in data files (layouts.toml): which one a row has, and its prompt."""

import base64
import pickletools
import zlib
from typing import Any, Literal

import msgspec

from async_rl.core.errors import DataError
from async_rl.core.records import read_packaged
from async_rl.data.files import Row


class Layout(msgspec.Struct, frozen=True):
    """A layout of rows; layouts.toml has the meaning of the fields."""

    name: str
    form: str
    has: list[str]
    tests: list[str] = []
    prompt: list[str] = []
    setup: list[str] = []


class _Table(msgspec.Struct, frozen=True):
    layouts: list[Layout]
    prompts: list[str]
    inside: dict[str, list[str]]
    refused: dict[str, list[str]]
    sources: dict[str, Literal["gsm8k", "math", "pairs"]]


TABLE = read_packaged(__package__, "layouts.toml", _Table)


def unfolded(row: Row) -> Row:
    """The row with the keys that `inside` of layouts.toml names as columns."""
    for column, names in TABLE.inside.items():
        value = _decoded(row.get(column))
        if isinstance(value, dict):
            found = {name: value[name] for name in names if name in value}
            row = found | {name: each for name, each in row.items() if each is not None}
    return row


def layout_of(row: Row) -> Layout | None:
    """The layout of an unfolded row, None if it has no tests."""
    for layout in TABLE.layouts:
        has_all = all(row.get(column) is not None for column in layout.has)
        if has_all and (layout.form != "own" or _is_own(row["tests"])):
            return layout
    return None


def with_prompt(row: Row, prompt_key: str) -> Row:
    """The unfolded row with its prompt as column `prompt`, if another column has it.

    A column that the configuration names is never replaced by another one.
    """
    if prompt_key != "prompt":
        return row
    layout = layout_of(row)
    columns = layout.prompt if layout is not None else []
    if not columns and row.get(prompt_key) is None:
        columns = [column for column in TABLE.prompts if row.get(column) is not None][:1]
    texts = [row[column] for column in columns if row.get(column)]
    # A single column may be a chat.
    prompt = texts[0] if len(texts) == 1 else "\n\n".join(map(str, texts))
    return row | {prompt_key: prompt} if texts else row


def unpacked(name: str, text: Any) -> Any:
    """The JSON text of tests that LiveCodeBench has packed; any other value as it is. Raises
    DataError.

    Only for files of the user's: a packed text may be large.
    """
    if not isinstance(text, str) or text.lstrip()[:1] in ("{", "["):
        return text
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
        # The only value is a text. Reading the operations executes nothing.
        return next(arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str))
    except (zlib.error, ValueError, StopIteration) as error:
        raise DataError(
            f"{name} is {text[:80]!r}, which is not JSON and not packed as in LiveCodeBench"
            f" ({error}); write values as JSON"
        ) from error


def _is_own(tests: Any) -> bool:
    """Return whether a column `tests` has our own tests, also if they have errors."""
    tests = _decoded(tests)
    first = tests[0] if isinstance(tests, list) and tests else tests
    return not isinstance(first, dict) or "kind" in first


def _decoded(value: Any) -> Any:
    """The value of a JSON text; any other value as it is."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value
