"""The supervisor's eyes: what processes tell becomes metrics files, TensorBoard, the live line and
the answer to `status`.

Joins the pieces of `monitoring/`; owns the TensorBoard process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
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
from async_rl.protocol.membership import ReportMetrics
from async_rl.supervision.registry import Registry
from async_rl.supervision.silence import Silence
from async_rl.wire.addresses import host_for_people

_LEARNER = "learner-0"


class Monitor:
    """Everything that is measured in one run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        registry: Registry,
        console: Console,
        log: logging.Logger,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._registry = registry
        self._console = console
        self._log = log
        self._rates = Rates(time.monotonic(), is_aside=functools.partial(evaluates_only, config))
        self.silence = Silence(registry, config, self._on_silence)
        self._open = contextlib.ExitStack()
        self._evaluated: set[int] = set()
        self._news = asyncio.Event()
        self.newest: dict[str, float] = {}
        self.step = 0
        self.tensorboard_url = self.prometheus_url = ""
        self.stalled = ""
        self.restarted_because: dict[str, str] = {}

    def __enter__(self) -> Self:
        if (project := self._config.monitoring.wandb) is not None:
            wandb = WandbRun(project, self._run_dir, self._config)
            self._open.callback(wandb.close)
            self._recorder = Recorder(self._run_dir, self._config, on_row=wandb.log)
        else:
            self._recorder = Recorder(self._run_dir, self._config)
        self._open.callback(self._recorder.close)
        if self._config.monitoring.tensorboard:
            board = TensorBoard(
                self._run_dir,
                host=host_for_people(self._config.network),
                port=self._config.monitoring.tensorboard_port,
            )
            self._open.callback(board.close)
            self.tensorboard_url = board.url
            self._log.info("TensorBoard at %s", board.url)
        if (port := self._config.monitoring.prometheus_port) is not None:
            # Read on the endpoint's thread: copying a dict with plain keys is one step of the
            # interpreter.
            endpoint = Endpoint(
                host_for_people(self._config.network), port, lambda: (self.step, dict(self.newest))
            )
            self._open.callback(endpoint.close)
            self.prometheus_url = endpoint.url
            self._log.info("Prometheus is answered at %s", endpoint.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def on_heartbeat(self) -> None:
        """A process has told what it does."""
        self._rates.observe(self._registry.members)
        self.newest.update(self._rates.now())
        self.silence.look()
        self._show()

    def _on_silence(self, sentence: str) -> None:
        self._log.warning("%s", sentence)
        self._recorder.record(self.step, "supervisor", texts={"run/silent": sentence})

    def on_stall(self, sentence: str) -> None:
        """The run stands still, for the reason given; or goes on, if it is empty."""
        self.stalled = sentence
        if sentence:
            self._log.warning("%s", sentence)
        self._recorder.record(
            self.step, "supervisor", texts={"run/stalled": sentence or "the run goes on"}
        )

    def start_from(self, version: int) -> None:
        """The learner starts at this version: what was told of later steps is of a history that is
        given up.
        """
        self.step = version
        self._evaluated = {step for step in self._evaluated if step <= version}
        self._recorder.start_from(version)

    def on_metrics(self, message: ReportMetrics) -> None:
        """A process has told the numbers of a step."""
        scalars = message.scalars
        if message.source == _LEARNER:
            self.step = max(self.step, message.step)
            scalars = scalars | self._rates.step(time.monotonic(), scalars)
            for pool in self._registry.pools():
                scalars |= {
                    f"scale/{pool.pool}_wanted": pool.wanted,
                    f"scale/{pool.pool}_live": pool.live,
                }
        if (failed := scalars.get("reward/failed_share")) is not None:
            self._on_failed_share(message.step, failed)
        if "eval/pass_at_1" in scalars:
            self._evaluated.add(message.step)
        self._recorder.record(
            message.step, message.source, scalars, message.histograms, message.texts
        )
        self.newest.update(scalars)
        self._show()
        self._news.set()

    def _on_failed_share(self, step: int, share: float) -> None:
        """Alarm at the first step of which no sample is rewarded, and again only after one that
        was.
        """
        if share == 1 and self.newest.get("reward/failed_share") != 1:
            sentence = f"step {step}: {NOTHING_REWARDED}"
            self._log.warning("%s", sentence)
            self._recorder.record(step, "supervisor", texts={"run/alarm": sentence})

    def _show(self) -> None:
        self._console.progress(
            self.step,
            self.newest,
            self._registry.members,
            evaluated_step=max(self._evaluated, default=None),
        )

    def on_restart(self, name: str, reason: str) -> None:
        """A process is being started again."""
        self._rates.restarted(name)
        self.restarted_because[name] = reason
        self._recorder.record(
            self.step, "supervisor", texts={"run/restarts": f"{name} is started again: {reason}"}
        )

    async def until_evaluated(self, step: int, *, timeout_s: float) -> None:
        """Returns once the evaluation of `step` has come, if one is due; logs if it did not come in
        time.
        """
        if not is_evaluated(self._config, step):
            return
        try:
            async with asyncio.timeout(timeout_s):
                while step not in self._evaluated:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self._log.warning(
                "the evaluation of version %d did not come within %g s; the run ends without it",
                step,
                timeout_s,
            )
