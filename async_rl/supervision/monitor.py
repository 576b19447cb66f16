"""Turns the reports of processes into metrics files, TensorBoard, the live line and the numbers of
`async-rl status`.

Opens and closes the outputs in `monitoring/`, including the TensorBoard process.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from async_rl.config.pools import evaluates_only
from async_rl.config.run import RunConfig
from async_rl.monitoring.console import Console
from async_rl.monitoring.prometheus import Endpoint
from async_rl.monitoring.rates import Rates
from async_rl.monitoring.recorder import Recorder, is_evaluated
from async_rl.monitoring.status import NOTHING_REWARDED
from async_rl.monitoring.tensorboard_process import TensorBoard
from async_rl.monitoring.wandb_run import WandbRun
from async_rl.observability.logs import log_path
from async_rl.protocol.membership import ReportMetrics
from async_rl.supervision.liveness import Liveness, StallWatch
from async_rl.supervision.registry import Registry
from async_rl.wire.addresses import host_for_people

_LEARNER = "learner-0"


class Monitor:
    """The numbers of one run, and the outputs that show them.

    step: the newest learner step, at first the step of the newest checkpoint. newest: the newest
    value of every scalar. stalled: the reason why no step completes, or empty.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        step: int,
        registry: Registry,
        liveness: Liveness,
        console: Console,
        log: logging.Logger,
    ) -> None:
        self._config = config
        self._registry = registry
        self._liveness = liveness
        self._console = console
        self._log = log
        self._rates = Rates(time.monotonic(), is_aside=functools.partial(evaluates_only, config))
        self._evaluated: set[int] = set()
        self._news = asyncio.Event()
        self.newest: dict[str, float] = {}
        self.step = step
        self.stalled = ""
        self.restarted_because: dict[str, str] = {}
        self.restarts: collections.Counter[str] = collections.Counter()
        # If one output cannot open, the stack closes those before it.
        with contextlib.ExitStack() as outputs:
            self._recorder = _open_recorder(config, run_dir, outputs)
            self.tensorboard_url = _open_tensorboard(config, run_dir, outputs, log)
            # Read on the endpoint's thread: copying a dict with str keys is atomic in CPython.
            self.prometheus_url = _open_prometheus(
                config, run_dir, lambda: (self.step, dict(self.newest)), outputs, log
            )
            self._outputs = outputs.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outputs.close()

    def refresh(self) -> None:
        """Update rates, silent processes and the live line from the newest heartbeats."""
        self._rates.observe(self._registry.members)
        self.newest.update(self._rates.now())
        for sentence in self._liveness.changes():
            self._note("run/silent", sentence)
        self._show()

    def on_stall(self, sentence: str) -> None:
        """Record why the run is stalled; an empty sentence means that it continues."""
        self.stalled = sentence
        if sentence:
            self._log.warning("%s", sentence)
        self._record_text("run/stalled", sentence or "the run continues")

    async def report_stalls(self, stall_watch: StallWatch) -> None:
        """Record each stall and its end."""
        async for sentence in stall_watch.reports():
            self.on_stall(sentence)

    def on_restart(self, name: str, reason: str) -> None:
        """Record that a process restarts."""
        self._rates.restarted(name)
        self.restarts[name] += 1
        self.restarted_because[name] = reason
        self._record_text("run/restarts", f"{name} is restarted: {reason}")

    def start_from(self, version: int) -> None:
        """Continue from this learner version; numbers of later steps belong to a lost history."""
        self.step = version
        self._evaluated = {step for step in self._evaluated if step <= version}
        self._recorder.start_from(version)

    def on_metrics(self, message: ReportMetrics) -> None:
        """Record the numbers of a step."""
        scalars = message.scalars
        if message.source == _LEARNER:
            # Evaluations and late reports of other steps must not move it back.
            self.step = max(self.step, message.step)
            self._rates.observe(self._registry.members)
            scalars = scalars | self._rates.step(time.monotonic(), scalars)
            for pool in self._registry.pools():
                scalars[f"scale/{pool.pool}_wanted"] = pool.wanted
                scalars[f"scale/{pool.pool}_live"] = pool.live
        # An alarm at the first step without a rewarded sample, and again only after one with.
        is_unrewarded = scalars.get("reward/failed_share") == 1
        if is_unrewarded and self.newest.get("reward/failed_share") != 1:
            self._note("run/alarm", f"step {message.step}: {NOTHING_REWARDED}", step=message.step)
        if "eval/pass_at_1" in scalars:
            self._evaluated.add(message.step)
        self._recorder.record(
            message.step, message.source, scalars, message.histograms, message.texts
        )
        self.newest.update(scalars)
        self._show()
        self._news.set()

    async def until_evaluated(self, step: int, *, timeout_s: float) -> None:
        """Wait for the evaluation of `step` if one is due; log if it does not come in time."""
        if not is_evaluated(self._config, step):
            return
        try:
            async with asyncio.timeout(timeout_s):
                while step not in self._evaluated:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self._log.warning(
                "the evaluation of version %d did not arrive within %g s; the run finishes without"
                " it",
                step,
                timeout_s,
            )

    def _note(self, name: str, sentence: str, *, step: int | None = None) -> None:
        self._log.warning("%s", sentence)
        self._record_text(name, sentence, step=step)

    def _record_text(self, name: str, text: str, *, step: int | None = None) -> None:
        step = self.step if step is None else step
        self._recorder.record(step, "supervisor", texts={name: text})

    def _show(self) -> None:
        self._console.progress(
            self.step,
            self.newest,
            self._registry.members,
            evaluated_step=max(self._evaluated, default=None),
        )


def _open_recorder(config: RunConfig, run_dir: Path, outputs: contextlib.ExitStack) -> Recorder:
    project = config.monitoring.wandb
    if project is None:
        recorder = Recorder(run_dir, config)
    else:
        wandb = WandbRun(project, run_dir, config)
        outputs.callback(wandb.close)
        recorder = Recorder(run_dir, config, on_row=wandb.log, on_media=wandb.hold)
    outputs.callback(recorder.close)
    return recorder


def _open_tensorboard(
    config: RunConfig, run_dir: Path, outputs: contextlib.ExitStack, log: logging.Logger
) -> str:
    """Return the URL; empty if monitoring.tensorboard_port is null."""
    port = config.monitoring.tensorboard_port
    if port is None:
        return ""
    host = host_for_people(config.network)  # it has no password
    log_file = log_path(run_dir, "tensorboard")
    board = TensorBoard([run_dir], host=host, port=port, log=log_file)
    outputs.callback(board.close)
    log.info("TensorBoard at %s", board.url)
    return board.url


def _open_prometheus(
    config: RunConfig,
    run_dir: Path,
    newest: Callable[[], tuple[int, dict[str, float]]],
    outputs: contextlib.ExitStack,
    log: logging.Logger,
) -> str:
    """Return the URL; empty without monitoring.prometheus_port."""
    port = config.monitoring.prometheus_port
    if port is None:
        return ""
    endpoint = Endpoint(host_for_people(config.network), port, run_dir.name, newest)
    outputs.callback(endpoint.close)
    log.info("Prometheus endpoint at %s", endpoint.url)
    return endpoint.url
