"""Counts the calls of each file of the product in this process, for tests/e2e/resumed/test_walk.py.

Python imports this module at its start if its directory is on PYTHONPATH. It counts in all threads
while the file `on` is in the directory that WALK names, so it does not slow down the imports.
"""

import collections
import ctypes
import json
import os
import threading
import time
from pathlib import Path
from types import FrameType

_LOOK_S = 0.2
_directory = os.environ.get("WALK", "")
_counts: collections.Counter[str] = collections.Counter()


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p)
def _count(_: object, frame: FrameType, event: int, __: object) -> int:
    _counts[frame.f_code.co_filename] += event == 0  # PyTrace_CALL
    return 0


def _count_in_all_threads() -> None:
    """As threading.setprofile_all_threads of Python 3.12."""
    api = ctypes.pythonapi
    for function in (
        api.PyInterpreterState_Get,
        api.PyInterpreterState_ThreadHead,
        api.PyThreadState_Next,
    ):
        function.restype = ctypes.c_void_p
    thread = api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while thread:
        api._PyEval_SetProfile(ctypes.c_void_p(thread), _count, None)
        thread = api.PyThreadState_Next(ctypes.c_void_p(thread))


def _report(directory: Path) -> None:
    while not (directory / "on").exists():
        time.sleep(_LOOK_S)
    while (directory / "on").exists():
        # Again and again: threads start at any time.
        _count_in_all_threads()
        time.sleep(_LOOK_S)
        # Whole, or the test reads half of it.
        partial = directory / f"{os.getpid()}.partial"
        partial.write_text(json.dumps(dict(_counts)))
        partial.rename(directory / f"{os.getpid()}.json")


if _directory:
    threading.Thread(target=_report, args=[Path(_directory)], daemon=True).start()
