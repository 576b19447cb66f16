"""Counts the calls of each file of the product in this process, for tests/e2e/resumed/test_walk.py.

Python imports this module at its start if its directory is on PYTHONPATH. Counting starts when the
file `on` appears in the directory that WALK names.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

_LOOK_S = 0.2
_directory = os.environ.get("WALK", "")
_counts: collections.Counter[str] = collections.Counter()
_is_on = threading.Event()


def _count(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and _is_on.is_set():
        _counts[frame.f_code.co_filename] += 1


def _report(directory: Path) -> None:
    while True:
        time.sleep(_LOOK_S)
        if (directory / "on").exists():
            _is_on.set()
            # Whole, or the test reads half of it.
            partial = directory / f"{os.getpid()}.partial"
            partial.write_text(json.dumps(dict(_counts)))
            partial.rename(directory / f"{os.getpid()}.json")


if _directory:
    threading.setprofile(_count)
    sys.setprofile(_count)
    threading.Thread(target=_report, args=[Path(_directory)], daemon=True).start()
