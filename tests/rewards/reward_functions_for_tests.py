import asyncio
import os
import sys
import threading
import time
from collections import Counter

from async_rl.rewards.verifier.protocol import RewardSample

NOT_A_FUNCTION = 3


def as_in_verl(data_source: str, solution_str: str, ground_truth: str) -> float:
    return 1.0


def letters(sample: RewardSample) -> int:
    print("what a function prints goes to its own log")  # noqa: T201
    return len(sample.response)


async def in_parts(sample: RewardSample) -> dict[str, float]:
    await asyncio.sleep(0.01)
    return {
        "short": 1.0 - len(sample.response) / 10,
        "wanted": float(sample.row["wanted"] in sample.response),
    }


def by_response(sample: RewardSample) -> object:
    """Fail in the way that the response names."""
    what = sample.response
    if what == "raise":
        raise ZeroDivisionError("my mistake")
    if what == "exit":
        os._exit(7)
    if what == "sys.exit":
        sys.exit(9)
    if what == "hang":
        time.sleep(1000)
    return {
        "nan": float("nan"),
        "text": "0.5",
        "none": None,
        "list": [1.0],
        "empty": {},
        "parts": {"a": "b"},
        "inf": 1e999,
    }.get(what, 1.0)


_may_go = asyncio.Event()


async def held(sample: RewardSample) -> float:
    """Answers once it was asked about the response "go"."""
    if sample.response == "go":
        _may_go.set()
    await _may_go.wait()
    return 1.0


async def blocks(sample: RewardSample) -> float:
    if sample.response == "block":
        time.sleep(1000)  # noqa: ASYNC251
    return 1.0


async def slow(sample: RewardSample) -> float:
    await asyncio.sleep(0.3)
    return 1.0


_running = Counter[str]()
_two_threads = threading.Barrier(2)


def threads(sample: RewardSample) -> int:
    """How many calls run now, once there are two."""
    _running["threads"] += 1
    _two_threads.wait(30)
    seen = _running["threads"]
    # Both have looked before one ends.
    _two_threads.wait(30)
    _running["threads"] -= 1
    return seen
