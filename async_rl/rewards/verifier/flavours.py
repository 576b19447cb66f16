"""Cells with packages beside the plain ones: which programs need them, and a pool of them that
starts with the first such program.

A cell with numpy takes twice the time to start and more memory to fork than a plain one, so
programs that never name a package of `sandbox.packages` do not pay for it.  The scan looks for the
package's name as a word in the program and its tests: a name in a comment costs a little time, a
name put together at run time finds no package. Used by `judging.py`; made by `serving.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence

from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.sandbox.cell import CellFailed
from async_rl.sandbox.pool import Pool, Unsafe, package_paths


class PackagedPool:
    """Cells at the level of `plain` in which `packages` are loaded; none before one is needed.
    Raises ConfigError for a missing one.
    """

    def __init__(
        self, plain: Pool, num_cells: int, packages: Sequence[str], *, allow_unsafe: bool
    ) -> None:
        for package in packages:
            try:
                package_paths(package)
            except CellFailed as error:
                raise ConfigError(str(error)) from error
        self._plain, self._num_cells, self._packages, self._allow_unsafe = (
            plain,
            num_cells,
            tuple(packages),
            allow_unsafe,
        )
        self._word = (
            re.compile(r"\b(?:" + "|".join(map(re.escape, packages)) + r")\b") if packages else None
        )
        self._pool: Pool | None = None
        self._lock = asyncio.Lock()

    async def pool_for(self, texts: Iterable[str]) -> Pool:
        """The pool for a program with these texts. Raises InfrastructureError if the cells with
        packages cannot be had.
        """
        if self._word is None or not any(map(self._word.search, texts)):
            return self._plain
        async with self._lock:
            if self._pool is None:
                pool = Pool(
                    self._num_cells,
                    allow_unsafe=self._allow_unsafe,
                    best_level=self._plain.level,
                    packages=self._packages,
                )
                try:
                    await pool.start()
                    self._pool = pool
                except (CellFailed, Unsafe) as error:
                    raise InfrastructureError(
                        f"no cell with {', '.join(self._packages)} could be started: {error}"
                    ) from error
                finally:
                    if self._pool is None:
                        await pool.close()
        return self._pool

    @property
    def num_replaced(self) -> int:
        """Cells with packages that broke and were replaced."""
        return self._pool.num_replaced if self._pool else 0

    async def close(self) -> None:
        """End the cells, if there are any."""
        if self._pool is not None:
            await self._pool.close()
