"""Files of lines are read from their end."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from async_rl.core import records
from async_rl.core.records import line_number, lines_backwards


@given(
    lines=st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"x")), max_size=20),
    torn=st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"x")),
    block=st.integers(1, 50),
)
def test_every_complete_line_comes_with_its_offset_from_the_last_to_the_first(
    lines: list[bytes], torn: bytes, block: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines) + torn)
        before = records.BLOCK_BYTES
        records.BLOCK_BYTES = block
        try:
            found = list(lines_backwards(path))
        finally:
            records.BLOCK_BYTES = before
        assert [line for _, line in reversed(found)] == lines
        data = path.read_bytes()
        for number, (offset, line) in enumerate(reversed(found), start=1):
            assert data[offset : offset + len(line) + 1] == line + b"\n"
            assert line_number(path, offset) == number
