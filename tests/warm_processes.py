"""Processes of tests that need torch: forked from a server that has imported it once.

Importing it takes two to eight seconds of processor time, the learner's modules included.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

# By their full names: the server of Python 3.11 does not know the path of the tests, and ignores a
# module of theirs without a word. One list for all tests, because a worker of the suite has one
# server, which the first process starts.
_IMPORTS = ["async_rl.weights.transport.table", "async_rl.learner.trainer"]


def warm_context() -> ForkServerContext:
    """Return a context of multiprocessing whose processes have torch and the learner's modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    return context
