"""A pool of cells of one kind: a cell starts when work needs it, stays warm afterwards, and is
replaced when it breaks.

Takes a job or a command, waits for a free cell, and returns an outcome or raises CellFailed; the
caller retries or reports an infrastructure error. Woken by: a cell that becomes free. `level` is
the strength of the jail on this machine; a machine below level 2 is refused unless `allow_unsafe`
is set.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from .cell import Cell, CellFailed, Outcome, Work
from .protocol import COMMANDS, LANDLOCK, NAMESPACES, NOTHING

IS_SUPPORTED = sys.platform == "linux" and os.uname().machine == "x86_64" and sys.maxsize > 2**32
"""The numbers of system calls are for this kind of machine."""
# A machine that is short of memory or processes recovers in seconds.
_PAUSE_S = 0.5


class Unsafe(Exception):
    """Neither namespaces nor Landlock with seccomp work on this machine."""


def package_paths(package: str) -> list[str]:
    """The directory or file of an installed package, then its folder of shared libraries, if any.

    Wheels put their shared libraries next to the package. Raises CellFailed if the package is not
    installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        raise CellFailed(
            f"the package {package!r} (sandbox.packages) is not installed here; install it or"
            " remove it from the list"
        )
    path = os.path.realpath((spec.submodule_search_locations or [str(spec.origin)])[0])
    libraries = os.path.join(os.path.dirname(path), f"{package}.libs")
    return [path, libraries] if os.path.isdir(libraries) else [path]


class Cells(AbstractAsyncContextManager["Cells"]):
    """At most `num_cells` cells, each made by `start_cell`, and one more for each checker that
    interacts. Closed as an async context manager or by `close`.

    level: strength of the jail, 1 namespaces, 2 Landlock and seccomp, 3 nothing; reasons: why each
    stronger level does not work; places: to run programs; alive: the cells that have started.
    """

    def __init__(
        self, num_cells: int, level: int, start_cell: Callable[[], Awaitable[Cell]]
    ) -> None:
        self.level = level
        self._start_cell = start_cell
        self.places = asyncio.Semaphore(num_cells)
        self._free: list[Cell] = []
        self.alive: set[Cell] = set()
        self._is_closed = False
        self.reasons: list[str] = []
        self.num_replaced = 0

    @classmethod
    async def start(
        cls,
        num_cells: int,
        *,
        allow_unsafe: bool = False,
        best_level: int = NAMESPACES,
    ) -> Cells:
        """Find the strongest level that works, from `best_level` on, by a first cell.

        Raises Unsafe with the reason of each level.
        """
        levels = [NAMESPACES, LANDLOCK] if IS_SUPPORTED else []
        if allow_unsafe:
            levels.append(NOTHING)
        reasons: list[str] = []
        for level in (level for level in levels if level >= best_level):
            cells = cls.of_programs(num_cells, level)
            try:
                cells._free.append(await cells._started())
            except CellFailed as error:
                reasons.append(str(error))
            else:
                cells.reasons = reasons
                return cells
        raise Unsafe(
            f"no jail works on this machine: {'; '.join(reasons) or 'it is not Linux on x86-64'}."
            " Allow user namespaces, or set sandbox.allow_unsafe=true if every program is trusted"
        )

    @classmethod
    def of_programs(cls, num_cells: int, level: int, packages: Sequence[str] = ()) -> Cells:
        """Cells for Python programs that may import the packages. Raises CellFailed if a package is
        not installed.
        """
        paths = {package: package_paths(package) for package in packages}
        readable = [path for entries in paths.values() for path in entries]
        folders = {package: os.path.dirname(entries[0]) for package, entries in paths.items()}
        return cls(num_cells, level, lambda: Cell.start(level, readable, folders))

    @classmethod
    def of_commands(cls, num_cells: int, readable: Sequence[str]) -> Cells:
        """Cells for commands. readable: everything that any of the commands may read."""
        return cls(num_cells, NAMESPACES, lambda: Cell.start(NAMESPACES, readable, kind=COMMANDS))

    async def _started(self) -> Cell:
        cell = await self._start_cell()
        self.alive.add(cell)
        return cell

    async def run(self, work: Work) -> Outcome:
        """Run one piece of work in the next free cell. Raises CellFailed if the cell broke."""
        async with self.places, self.cell() as cell:
            return await cell.run(work)

    @asynccontextmanager
    async def cell(self) -> AsyncIterator[Cell]:
        """A free cell, or a new one, for one who has a place. Raises CellFailed."""
        # Asked after the wait for a place: the pool may have closed in the meantime.
        if self._is_closed:
            raise CellFailed("the cells are closed")
        cell = self._free.pop() if self._free else await self._replacement()
        try:
            yield cell
        finally:
            # Not only after an error: a cell may have been killed while its job was cancelled.
            if cell.is_alive and not self._is_closed:
                self._free.append(cell)
            else:
                cell.kill()
                self.alive.discard(cell)
                self.num_replaced += not self._is_closed

    async def _replacement(self) -> Cell:
        """A new cell. Only the first start may fail: later ones are repeated.

        A machine that has started a cell before is short of something now, and work that waits is
        better than work that fails.
        """
        while True:
            try:
                return await self._started()
            except CellFailed:
                if self._is_closed or not (self.alive or self.num_replaced):
                    raise
            # Nothing reports that the machine has recovered.
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """End every cell."""
        self._is_closed = True
        for cell in self.alive:
            cell.end()
        self.alive.clear()
        self._free.clear()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
