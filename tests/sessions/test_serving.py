"""The HTTP server of a gateway does not stop all calls to look for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from async_rl.sessions.server import spare_heap


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations of the collections from now on; afterwards the collector is as before."""
    before, found = gc.get_threshold(), []
    # A buffer that ran in the same process has set others.
    gc.set_threshold(700, 10, 10)

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_open_sessions_cause_no_search_of_the_whole_heap(collections: list[int]) -> None:
    spare_heap()
    collections.clear()
    # As many objects as some thousand calls of open sessions keep.
    kept = [[] for _ in range(500_000)]  # type: ignore[var-annotated]
    assert 2 not in collections
    # As long as ten of the newest together, a search of young objects would stop all calls for 20
    # to 74 ms.
    assert collections.count(1) > len(collections) / 4
    assert len(kept) == 500_000
