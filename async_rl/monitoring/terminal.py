"""A terminal that shows text of a model or a data set without acting on its control characters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from async_rl.core.visible import visible


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
