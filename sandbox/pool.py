"""A fixed number of warm cells, handed out one job at a time; a broken one is replaced while the
others work on.

Takes a job; waits for a free cell; gives an Outcome or raises CellFailed (the caller tries again or
reports an infrastructure error). Woken by: a cell that becomes free.  `level` says how strong the
jail is here; `start` refuses a machine below level 2 unless told so.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import TracebackType

from .cell import Cell, CellFailed, Job, Outcome
from .linux import MACHINE_SUPPORTED
from .protocol import Hello

NAMESPACES, LANDLOCK, NOTHING = 1, 2, 3


class Unsafe(Exception):
    """Neither namespaces nor Landlock with seccomp work here."""


def interpreter_paths() -> list[str]:
    """Directories a cell must read to run Python: the interpreter's own, links resolved."""
    paths = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    return sorted(path for path in paths if path not in ("/", "/usr"))


def package_paths(package: str) -> list[str]:
    """Where an installed package lies: its directory or file, then the folder of shared libraries
    that wheels put beside it, if any.

    Raises CellFailed if it is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or not (found.submodule_search_locations or found.has_location):
        raise CellFailed(
            f"the package {package!r} (sandbox.packages) is not installed here; install it or take"
            " it off the list"
        )
    path = os.path.realpath((found.submodule_search_locations or [str(found.origin)])[0])
    libraries = os.path.join(os.path.dirname(path), f"{package}.libs")
    return [path, *([libraries] if os.path.isdir(libraries) else [])]


class Pool:
    """`num_cells` cells. Use as an async context manager, or call start and close. packages: what
    programs find imported in each cell.
    """

    def __init__(
        self,
        num_cells: int,
        *,
        allow_unsafe: bool = False,
        best_level: int = NAMESPACES,
        packages: Sequence[str] = (),
    ) -> None:
        self._num_cells, self._allow_unsafe, self._best_level = num_cells, allow_unsafe, best_level
        self._wanted, self._packages = packages, dict[str, list[str]]()
        self._free: asyncio.Queue[Cell] = asyncio.Queue()
        self._cells: set[Cell] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.level = 0
        self.hello: Hello | None = None
        self.reasons: list[str] = []
        self.num_replaced = 0

    async def start(self) -> None:
        """Find the strongest level that works, and warm all cells. Raises Unsafe with the reason of
        each level, or CellFailed.
        """
        self._packages = {package: package_paths(package) for package in self._wanted}
        first = await self._probe()
        self.hello = first.hello
        self._add(first)
        for cell in await asyncio.gather(
            *(self._start_cell(self.level) for _ in range(self._num_cells - 1))
        ):
            self._add(cell)

    async def _probe(self) -> Cell:
        levels = [NAMESPACES, LANDLOCK] if MACHINE_SUPPORTED else []
        for level in [*levels, *([NOTHING] if self._allow_unsafe else [])]:
            if level < self._best_level:
                continue
            try:
                cell = await self._start_cell(level)
            except CellFailed as error:
                self.reasons.append(str(error))
            else:
                self.level = level
                return cell
        raise Unsafe(
            "no jail works on this machine: " + ("; ".join(self.reasons) or "it is not Linux on x86-64")
            + ". Allow user namespaces, or set sandbox.allow_unsafe=true if every program is trusted"
        )  # fmt: skip

    async def _start_cell(self, level: int) -> Cell:
        found = self._packages
        readable = [*interpreter_paths(), *(path for paths in found.values() for path in paths)]
        return await Cell.start(
            level,
            readable,
            {package: os.path.dirname(paths[0]) for package, paths in found.items()},
        )

    def _add(self, cell: Cell) -> None:
        self._cells.add(cell)
        self._free.put_nowait(cell)

    async def run(self, job: Job) -> Outcome:
        """Run one job in the next free cell. Raises CellFailed if the cell broke."""
        if self._is_closed:
            raise CellFailed("the pool is closed")
        cell = await self._free.get()
        try:
            return await cell.run(job)
        finally:
            if cell.is_alive:
                self._free.put_nowait(cell)
            else:
                self._cells.discard(cell)
                if not self._is_closed:
                    task = asyncio.create_task(self._replace(), name="replace-cell")
                    self._replacing.add(task)
                    task.add_done_callback(self._replacing.discard)

    async def _replace(self) -> None:
        """A new cell for a broken one; tries on with growing pauses, since a pool without cells
        answers nobody.
        """
        self.num_replaced += 1
        pause_s = 0.05
        while not self._is_closed:
            try:
                cell = await self._start_cell(self.level)
            except CellFailed:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
            else:
                if self._is_closed:
                    cell.kill()
                else:
                    self._add(cell)
                return

    @property
    def num_free(self) -> int:
        """Cells that wait for a job."""
        return self._free.qsize()

    async def close(self) -> None:
        """End every cell."""
        self._is_closed = True
        for task in list(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for cell in self._cells:
            cell.kill()
        self._cells.clear()

    async def __aenter__(self) -> Pool:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
