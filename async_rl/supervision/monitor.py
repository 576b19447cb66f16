"""Turns the reports of processes into metrics files, TensorBoard, the live line and the numbers of
`async-rl status`.

Opens and closes the outputs in `monitoring/`, including the TensorBoard process.
"""

import asyncio
import collections
import contextlib
import functools
import logging
import time
from pathlib import Path

from msgspec.structs import replace

from async_rl.config.pools import evaluates_only
from async_rl.config.run import RunConfig
from async_rl.core.closing import Closing
from async_rl.core.errors import require_life
from async_rl.monitoring.console import Console
from async_rl.monitoring.exports import Endpoint, WandbRun
from async_rl.monitoring.rates import Rates
from async_rl.monitoring.recorder import Recorder
from async_rl.monitoring.status import NOTHING_REWARDED
from async_rl.monitoring.tensorboard_process import TensorBoard
from async_rl.observability.logs import log_path
from async_rl.protocol.buffer import StartFrom
from async_rl.protocol.supervisor import ReportMetrics, StatusReply
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry
from async_rl.wire.addresses import host_for_people

_log = logging.getLogger(__name__)
_LEARNER = "learner-0"


class Monitor(Closing):
    """The numbers of one run, and the outputs that show them.

    step: the newest learner step, at first the step of the newest checkpoint. newest: the newest
    value of every scalar.
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
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._registry = registry
        self._liveness = liveness
        self._console = console
        self._rates = Rates(time.monotonic(), is_aside=functools.partial(evaluates_only, config))
        self._learner_life = 0
        self._evaluated: set[int] = set()
        self._news = asyncio.Event()
        self.newest: dict[str, float] = {}
        self.step = step
        self._started_s = time.time()
        self._restarted_because: dict[str, str] = {}
        self._restarts: collections.Counter[str] = collections.Counter()
        # If one output cannot open, the stack closes those before it.
        with contextlib.ExitStack() as outputs:
            if config.monitoring.wandb is None:
                recorder = Recorder(run_dir, config)
            else:
                wandb = WandbRun(config.monitoring.wandb, run_dir, config)
                recorder = Recorder(
                    run_dir, config, on_row=outputs.enter_context(contextlib.closing(wandb)).log
                )
            self._recorder = outputs.enter_context(contextlib.closing(recorder))
            self.tensorboard_url = ""
            host = host_for_people(config.network)
            port = config.monitoring.tensorboard_port
            if port is not None:
                file = log_path(run_dir, "tensorboard")
                board = TensorBoard(run_dir, host=host, port=port, log=file)
                self.tensorboard_url = outputs.enter_context(contextlib.closing(board)).url
                _log.info("TensorBoard at %s", self.tensorboard_url)
            self.prometheus_url = ""
            port = config.monitoring.prometheus_port
            if port is not None:
                # Read on the endpoint's thread: copying a dict with str keys is atomic in CPython.
                endpoint = Endpoint(
                    host, port, run_dir.name, lambda: (self.step, dict(self.newest))
                )
                self.prometheus_url = outputs.enter_context(contextlib.closing(endpoint)).url
                _log.info("Prometheus endpoint at %s", self.prometheus_url)
            self._outputs = outputs.pop_all()

    def close(self) -> None:
        """Close the outputs."""
        self._outputs.close()

    def refresh(self) -> None:
        """Update progress, rates, silent processes and the live line from the newest heartbeats.
        Raises RunFailed if the run has stalled for too long.
        """
        # The learner of a service steps when a program asks, which may be tomorrow.
        if not self._config.agent.is_service and self._liveness.observe():
            stalled = self._liveness.stalled
            if stalled:
                _log.warning("%s", stalled)
            self._recorder.note("stalled", stalled or "the run continues", self.step)
        self._rates.observe(self._registry.members)
        # Also between steps: status and console must not show numbers of the last step for minutes.
        self.newest.update(self._rates.now())
        for sentence in self._liveness.changes():
            self._note("silent", sentence, self.step)
        self._show()

    def status(self) -> StatusReply:
        """Return the answer of `async-rl status`."""
        return StatusReply(
            run_name=self._run_dir.name,
            run_dir=str(self._run_dir),
            step=self.step,
            num_steps=self._config.num_steps,
            started_s=self._started_s,
            tensorboard_url=self.tensorboard_url,
            # With silent processes, which the registry alone would show as they were at their last
            # heartbeat.
            members=self._liveness.members(),
            metrics=self.newest,
            stalled=self._liveness.stalled,
            restarted_because=self._restarted_because,
            restarts=self._restarts,
            pools=self._registry.pools(),
        )

    def on_restart(self, name: str, reason: str) -> None:
        """Record that a process restarts."""
        self._rates.restarted(name)
        self._restarts[name] += 1
        self._restarted_because[name] = reason
        self._recorder.note("restarts", f"{name} is restarted: {reason}", self.step)

    def start_from(self, message: StartFrom) -> None:
        """Continue from this learner version; numbers of later steps belong to a lost history.
        Raises Superseded for an earlier life.
        """
        require_life(message.life, self._learner_life)
        self._learner_life = message.life
        version = message.version
        self.step = version
        # An evaluation after the step that the learner returned to is repeated.
        self._evaluated = {step for step in self._evaluated if step <= version}
        self._recorder.start_from(version)

    def on_metrics(self, message: ReportMetrics) -> None:
        """Record the numbers of a step."""
        scalars = message.scalars
        if message.source == _LEARNER:
            # Evaluations and late reports of other steps must not move it back.
            self.step = max(self.step, message.step)
            self._rates.observe(self._registry.members)
            # The learner's report is the clock of a step; reports of other processes come at any
            # time.
            scalars = scalars | self._rates.step(time.monotonic(), scalars)
            for pool in self._registry.pools():
                scalars[f"scale/{pool.pool}_wanted"] = pool.wanted
                scalars[f"scale/{pool.pool}_live"] = pool.live
        # An alarm at the first step without a rewarded sample, and again only after one with.
        is_unrewarded = scalars.get("reward/failed_share") == 1
        if is_unrewarded and self.newest.get("reward/failed_share") != 1:
            self._note("alarm", f"step {message.step}: {NOTHING_REWARDED}", message.step)
        if "eval/pass_at_1" in scalars:
            self._evaluated.add(message.step)
        self._recorder.record(replace(message, scalars=scalars))
        self.newest.update(scalars)
        self._show()
        self._news.set()

    async def until_evaluated(self, step: int, *, timeout_s: float) -> None:
        """Wait for the evaluation of `step` if one is due; log if it does not come in time."""
        if not self._config.is_evaluated(step):
            return
        try:
            async with asyncio.timeout(timeout_s):
                # The evaluation may have arrived before this call, and other reports wake this task
                # too.
                while step not in self._evaluated:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            _log.warning(
                "the evaluation of version %d did not arrive within %g s; the run finishes without"
                " it",
                step,
                timeout_s,
            )

    def _note(self, kind: str, sentence: str, step: int) -> None:
        _log.warning("%s", sentence)
        self._recorder.note(kind, sentence, step)

    def _show(self) -> None:
        self._console.progress(
            self.step,
            self.newest,
            self._registry.members,
            evaluated_step=max(self._evaluated, default=None),
        )
