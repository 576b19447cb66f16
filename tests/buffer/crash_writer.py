"""Writes big groups without end and prints each id once it is stored, until it is killed; run by
test_store.py.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from buffer_support import Clock, make_group
from test_store import admitted, completed

from async_rl.buffer.store.store import Store


async def main() -> None:
    async with Store(Path(sys.argv[1]), clock=Clock()) as store:
        group_id = 0
        while True:
            store.write([completed(make_group(admitted(store, group_id), versions=[0] * 20_000))])
            await store.flush()
            sys.stdout.write(f"{group_id}\n")
            sys.stdout.flush()
            group_id += 1


asyncio.run(main())
