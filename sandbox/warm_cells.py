"""A fixed number of warm cells that run jobs; a broken cell is replaced while the others work.

Takes a job, waits for a free cell, and returns an Outcome or raises CellFailed; the caller retries
or reports an infrastructure error. Woken by: a cell that becomes free. `level` is the strength of
the jail on this machine; a machine below level 2 is refused unless `allow_unsafe` is set.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from .cell import Cell, CellFailed, Job, Outcome
from .linux import MACHINE_SUPPORTED
from .protocol import LANDLOCK, NAMESPACES, NOTHING

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


class Unsafe(Exception):
    """Neither namespaces nor Landlock with seccomp work on this machine."""


def interpreter_paths() -> list[str]:
    """Directories that a cell must read to run Python, with links resolved."""
    paths = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    return sorted(paths - {"/", "/usr"})


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


class WarmCells:
    """Cells of one level. Made by `start`; closed as an async context manager or by `close`."""

    def __init__(
        self, first: Cell, start_cell: Callable[[], Awaitable[Cell]], reasons: list[str]
    ) -> None:
        self._start_cell = start_cell
        self._free: asyncio.Queue[Cell] = asyncio.Queue()
        self._cells: set[Cell] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.hello = first.hello
        self.reasons = reasons
        self.num_replaced = 0
        self._add(first)

    @classmethod
    async def start(
        cls,
        num_cells: int,
        *,
        allow_unsafe: bool = False,
        best_level: int = NAMESPACES,
        packages: Sequence[str] = (),
    ) -> WarmCells:
        """Find the strongest level that works, from `best_level` on, and warm all cells.

        packages: what programs can import besides the standard library. Raises Unsafe with the
        reason of each level, or CellFailed.
        """
        paths = {package: package_paths(package) for package in packages}
        readable = [*interpreter_paths(), *(path for entries in paths.values() for path in entries)]
        folders = {package: os.path.dirname(entries[0]) for package, entries in paths.items()}
        levels = [NAMESPACES, LANDLOCK] if MACHINE_SUPPORTED else []
        if allow_unsafe:
            levels.append(NOTHING)
        reasons: list[str] = []
        for level in levels:
            if level < best_level:
                continue

            def start_cell(level: int = level) -> Awaitable[Cell]:
                return Cell.start(level, readable, folders)

            try:
                cells = cls(await start_cell(), start_cell, reasons)
            except CellFailed as error:
                reasons.append(str(error))
                continue
            try:
                await cells._grow(num_cells - 1)
            except BaseException:
                await cells.close()
                raise
            return cells
        raise Unsafe(
            f"no jail works on this machine: {'; '.join(reasons) or 'it is not Linux on x86-64'}."
            " Allow user namespaces, or set sandbox.allow_unsafe=true if every program is trusted"
        )

    async def _grow(self, count: int) -> None:
        for cell in await asyncio.gather(*(self._start_cell() for _ in range(count))):
            self._add(cell)

    def _add(self, cell: Cell) -> None:
        self._cells.add(cell)
        self._free.put_nowait(cell)

    @property
    def level(self) -> int:
        """Strength of the jail: 1 namespaces, 2 Landlock and seccomp, 3 nothing."""
        return self.hello.level

    async def run(self, job: Job) -> Outcome:
        """Run one job in the next free cell. Raises CellFailed if the cell broke."""
        if self._is_closed:
            raise CellFailed("the cells are closed")
        cell = await self._free.get()
        try:
            return await cell.run(job)
        finally:
            if cell.is_alive:
                self._free.put_nowait(cell)
            else:
                self._cells.discard(cell)
                if not self._is_closed:
                    self.num_replaced += 1
                    task = asyncio.create_task(self._replace(), name="replace-cell")
                    self._replacing.add(task)
                    task.add_done_callback(self._replacing.discard)

    async def _replace(self) -> None:
        """Start a cell for a broken one; retry with growing pauses until it works.

        Giving up would leave jobs waiting forever once the last cell has broken.
        """
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed:
            try:
                cell = await self._start_cell()
            except CellFailed:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if self._is_closed:
                cell.kill()
            else:
                self._add(cell)
            return

    async def close(self) -> None:
        """End every cell."""
        self._is_closed = True
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for cell in self._cells:
            cell.end()
        self._cells.clear()

    async def __aenter__(self) -> WarmCells:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
