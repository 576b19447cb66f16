"""The preparation of a run as the supervisor sees it: the processes start, then prompts come."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from async_rl.core.errors import RunFailed
from async_rl.supervision.preparation import prepare


class Outcome:
    """model: the directory after the call; seen: the progress; has_prompts: they are complete."""

    def __init__(self, run_dir: Path, child: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (run_dir / "logs").mkdir()
        script = run_dir / "child"
        script.write_text(f"#!/bin/sh\n{child}\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))
        self.seen: list[tuple[float, str]] = []
        self.error: Exception | None = None
        asyncio.run(self._prepare(run_dir))

    async def _prepare(self, run_dir: Path) -> None:
        model: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        prompts = asyncio.Event()
        task = asyncio.create_task(
            prepare(run_dir, lambda *step: self.seen.append(step), model=model, prompts=prompts)
        )
        complete = asyncio.create_task(prompts.wait())
        await asyncio.wait({task, complete}, return_when=asyncio.FIRST_COMPLETED)
        self.model = model.result() if model.done() else None
        self.has_prompts = prompts.is_set()
        for each in (task, complete):
            each.cancel()
        (result, _) = await asyncio.gather(task, complete, return_exceptions=True)
        self.error = result if isinstance(result, Exception) else None


START = """echo '{"fraction": 1, "text": "model ready", "path": "/the/model"}'"""


def test_the_processes_may_start_before_the_prompts_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = """echo '{"fraction": 0.5, "text": "5 of 10 prompts"}'"""
    outcome = Outcome(tmp_path, f"{counted}\n{START}", monkeypatch)
    assert (outcome.model, outcome.has_prompts, outcome.error) == (Path("/the/model"), True, None)
    assert outcome.seen == [(0.5, "5 of 10 prompts"), (1, "model ready")]


def test_data_that_cannot_be_used_ends_the_run_though_its_processes_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = '{"error": "DataError: row 3 is bad"}'
    outcome = Outcome(tmp_path, f"{START}\necho '{error}'\nexit 1", monkeypatch)
    assert isinstance(outcome.error, RunFailed)
    assert str(outcome.error) == "DataError: row 3 is bad"
    assert not outcome.has_prompts


def test_a_preparation_that_is_killed_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(tmp_path, f"{START}\nkill -9 $$", monkeypatch)
    assert "exited with code -9; see " in str(outcome.error)
    assert not outcome.has_prompts
