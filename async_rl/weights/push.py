"""One version to every generator at once, each with the same deadline; who fails is named, the others are not held up.

Called by the learner, which expels the failed ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from async_rl.errors import AsyncRLError
from async_rl.messages import LoadReport, LoadWeights, Manifest


class Caller(Protocol):
    """The part of an RpcClient that a push needs."""

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        """Sends the request; the reply, or an AsyncRLError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """Who holds the version now, and why the others do not."""

    reports: dict[str, LoadReport]
    failures: dict[str, str]


async def push(manifest: Manifest, generators: Mapping[str, Caller], deadline_s: float) -> PushResult:
    """Sends LoadWeights to all generators side by side and waits for each, at most deadline_s in all."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            name: group.create_task(_push_one(manifest, caller, deadline_s), name=f"push {manifest.version} to {name}")
            for name, caller in generators.items()
        }
    results = {name: task.result() for name, task in tasks.items()}
    return PushResult(
        reports={name: result for name, result in results.items() if isinstance(result, LoadReport)},
        failures={name: result for name, result in results.items() if isinstance(result, str)},
    )


async def _push_one(manifest: Manifest, caller: Caller, deadline_s: float) -> LoadReport | str:
    try:
        async with asyncio.timeout(deadline_s):
            report: LoadReport = await caller.call(LoadWeights(manifest=manifest), timeout_s=deadline_s)
    except TimeoutError:
        return f"DeadlineExceeded: version {manifest.version} was not loaded within {deadline_s:g} s (weights.deadline_s)"
    except AsyncRLError as error:
        return f"{type(error).__name__}: {error}"
    if report.version != manifest.version:
        return f"WeightsError: it loaded version {report.version} instead of {manifest.version}"
    return report
