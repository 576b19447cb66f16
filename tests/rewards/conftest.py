from __future__ import annotations

from collections.abc import Iterator

import pytest
from language_support import Languages
from rewards_support import Jail

from async_rl.sandbox.cells import Unsafe
from async_rl.sandbox.protocol import LANDLOCK, NAMESPACES


@pytest.fixture(scope="session", params=[NAMESPACES, LANDLOCK], ids=["namespaces", "landlock"])
def jail(request: pytest.FixtureRequest) -> Iterator[Jail]:
    try:
        made = Jail(request.param)
    except Unsafe as error:
        pytest.skip(str(error))
    if made.cells.level != request.param:
        made.close()
        pytest.skip(f"this machine has no level {request.param}: {made.cells.reasons}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def languages() -> Iterator[Languages]:
    made = Languages()
    yield made
    made.close()
