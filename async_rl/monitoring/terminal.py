"""A terminal that shows text of a model or a data set without acting on its control characters,
and tables that a narrow terminal shows row by row.
"""

import contextlib
import os
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table

from async_rl.core.text import visible

_UNLIMITED = 10_000  # columns


class WideTable(Table):
    """A table whose rows are printed as blocks of `title value` lines where a word of it would be
    cut otherwise.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its rows."""
        # With the terminal's own limit every table would claim to fit.
        unlimited = options.update(max_width=_UNLIMITED)
        if Measurement.get(console, unlimited, self).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        yield self.title or ""
        for row in zip(*(column.cells for column in self.columns), strict=True):
            block = Table.grid(Column(style="bold", no_wrap=True), "", padding=(0, 2, 0, 0))
            block.columns[1].overflow = "fold"
            for column, cell in zip(self.columns, row, strict=True):
                if cell:
                    block.add_row(column.header, cell)
            yield block
            yield ""


def open_table(*titles: str) -> WideTable:
    """Return a table without lines, with a bold header."""
    return WideTable(*titles, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))


class VisibleConsole(Console):
    """A rich console that sends no control character of the text itself to the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments; rich's own control codes are kept."""
        for segment in super().render(renderable, options):
            if segment.is_control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


class Terminal(VisibleConsole):
    """A console whose output may be lost: text that cannot be written is dropped."""

    def on_broken_pipe(self) -> None:
        """Continue without output. The default kills the process, and with it a run."""
        self.drop()

    def drop(self) -> None:
        """Write nothing from now on."""
        self.quiet = True
        # Python flushes stdout at its end, which would fail again and change the exit code.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.file.fileno())
