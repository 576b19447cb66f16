"""The numbers of a run for other programs: the newest ones for Prometheus, and each final row for
Weights & Biases.

The only file that imports wandb, which is not a dependency of this project.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import GaugeMetricFamily

from async_rl.config.base import as_builtins
from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError
from async_rl.observability.catalogue import describe


class Endpoint:
    """A read-only HTTP server on a thread of the supervisor, at `url`, until closed.

    A metric of the catalogue is a gauge: `failures/over_age` is `async_rl_failures_over_age`; other
    metrics are left out. The path is a secret, as TensorBoard's, and every other path is 404.
    run: the label `run` of all metrics, so that one Prometheus can scrape several runs. newest:
    returns the step and the newest value of each metric; called from the server's thread.
    """

    def __init__(
        self, host: str, port: int, run: str, newest: Callable[[], tuple[int, Mapping[str, float]]]
    ) -> None:
        self._run = run
        self._newest = newest
        # Without auto_describe it calls `collect` for requests only, when there are numbers.
        registry = CollectorRegistry(auto_describe=False)
        path = f"/{secrets.token_urlsafe()}/metrics"
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise InfrastructureError(
                f"the endpoint for Prometheus cannot listen on {host}:{port}"
                f" (monitoring.prometheus_port): {error.strerror}; set another port, 0 for a free"
                " one, or null for none"
            ) from error
        self._server.set_app(_only_at(path, self._server.get_app()))
        # Only now: the server has been answering on every path.
        registry.register(self)
        self.url = f"http://{host}:{self._server.server_address[1]}{path}"

    def close(self) -> None:
        """Ends the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for `prometheus_client`."""
        step, metrics = self._newest()
        values = {exported_name("step"): ("learner steps done", float(step))}
        # By name: the format forbids a second family of a name.
        for name, value in sorted(metrics.items()):
            if spec := describe(name):
                values[exported_name(name)] = spec.description, value
        for name, (meaning, value) in values.items():
            family = GaugeMetricFamily(name, meaning, labels=["run"])
            family.add_metric([self._run], value)
            yield family


def _only_at(path: str, answer: Any) -> Any:
    """Return the WSGI application `answer` at this path, and 404 elsewhere."""

    def guarded(request: Mapping[str, Any], start: Callable[..., Any]) -> Any:
        if secrets.compare_digest(request["PATH_INFO"].encode(), path.encode()):
            return answer(request, start)
        start("404 Not Found", [])
        return [b""]

    return guarded


def exported_name(name: str) -> str:
    """Return a metric's name in Prometheus."""
    return "async_rl_" + re.sub(r"\W+", "_", name)


class WandbRun:
    """One run, under the name of its directory; a resumed run continues it. WANDB_MODE=offline
    keeps everything in that directory.

    Raises InfrastructureError if wandb cannot start it.
    """

    def __init__(self, project: str, run_dir: Path, config: RunConfig) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                # The id makes a resumed run continue the same curves.
                id=run_dir.name,
                # A new id starts a run, a known one continues it.
                resume="allow",
                dir=str(run_dir),
                config=as_builtins(config),
                # The supervisor owns the terminal and its signals.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise InfrastructureError(
                f"monitoring.wandb={project}: {error}; run wandb login, set WANDB_MODE=offline in"
                " the environment, or set monitoring.wandb=null"
            ) from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the metrics of one step; steps come in order."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """Send the remaining rows and end the run."""
        self._run.finish()
