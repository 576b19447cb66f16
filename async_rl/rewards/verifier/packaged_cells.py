"""Cells in which packages are loaded, beside plain cells: which programs need them, and when they
start.

A cell with numpy takes twice the time to start and more memory to fork than a plain one, so only
programs that name a package of `sandbox.packages` use it. The scan looks for the package's name as
a word in the program and its tests. A name in a comment costs a little time; a program that builds
the name at run time cannot import the package.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence

from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.sandbox.cell import CellFailed
from async_rl.sandbox.cells import Cells, Unsafe, package_paths


class PackagedCells:
    """Plain cells, and as many cells with `packages` once a program needs them.

    Raises ConfigError if a package is not installed.
    """

    def __init__(
        self,
        plain: Cells,
        num_cells: int = 1,
        packages: Sequence[str] = (),
        *,
        allow_unsafe: bool = False,
    ) -> None:
        try:
            for package in packages:
                package_paths(package)
        except CellFailed as error:
            raise ConfigError(str(error)) from error
        self._plain, self._num_cells = plain, num_cells
        self._packages, self._allow_unsafe = packages, allow_unsafe
        self._word = re.compile(rf"\b(?:{'|'.join(map(re.escape, packages))})\b")
        self._packaged: Cells | None = None
        self._starting = asyncio.Lock()

    async def cells_for(self, texts: Iterable[str]) -> Cells:
        """The cells for a program with these texts.

        Raises InfrastructureError if the cells with packages cannot start.
        """
        if not self._packages or not any(map(self._word.search, texts)):
            return self._plain
        async with self._starting:
            if self._packaged is None:
                self._packaged = await self._start()
        return self._packaged

    async def _start(self) -> Cells:
        try:
            return await Cells.start(
                self._num_cells,
                allow_unsafe=self._allow_unsafe,
                best_level=self._plain.level,
                packages=self._packages,
            )
        except (CellFailed, Unsafe) as error:
            raise InfrastructureError(
                f"no cell with {', '.join(self._packages)} could be started: {error}"
            ) from error

    @property
    def level(self) -> int:
        """Strength of the jail."""
        return self._plain.level

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        num_packaged = self._packaged.num_replaced if self._packaged else 0
        return self._plain.num_replaced + num_packaged

    async def close(self) -> None:
        """End the cells with packages. The plain ones belong to the caller."""
        if self._packaged is not None:
            await self._packaged.close()
