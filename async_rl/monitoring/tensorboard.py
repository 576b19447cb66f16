"""TensorBoard of a run: its event file, written with TensorBoard's own classes and without torch or
TensorFlow, and the program as a child of the supervisor.

The only file that imports TensorBoard. The child is `python -m async_rl.monitoring.tensorboard
<parent pid> <TensorBoard's arguments>`, bound to loopback or the run's address. The port is chosen
before it starts, so the URL is known immediately; the page answers a few seconds later.

TensorBoard has no password, and other users of the machine reach loopback too: every address of it
begins with a secret, which the child has from its environment, since command lines are public. Its
data server, a faster reader, has a port without such an address, and is not used.
"""

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from async_rl.core.errors import InfrastructureError
from async_rl.core.os import die_with_parent
from async_rl.observability.catalogue import FIRST_SCREEN, describe, with_unit

_CLOSE_S = 3.0  # it has nothing to save
_NICENESS = 10  # it reads the event file every second, on cores that generators may use
_RELOAD_S = "1"
"""Seconds. Metrics must be visible within 5 s, and writing them takes a part of that."""
_PREFIX = "ASYNC_RL_TENSORBOARD_PREFIX"


class EventFile:
    """One run's events, in a file for each start of the run. What `flush` has written survives a
    kill. Raises OSError if it cannot be written.

    Each metric has its meaning from the catalogue with its first value.
    """

    def __init__(self, directory: Path) -> None:
        self._described: set[str] = set()
        directory.mkdir(exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names. Its own writer
        # has a thread, whose error would come as a traceback before the one of the next call.
        path = directory / f"events.out.tfevents.{time.time_ns()}.async-rl"
        self._records = RecordWriter(path.open("xb"))
        self._add(file_version="brain.Event:2")
        self._add(summary=_first_screen())

    def scalar(self, name: str, value: float, step: int) -> None:
        """Add a point of a curve; with the first one, title with unit, and meaning."""
        summary = scalar_pb(name, value)
        # Once per metric: with every point it would double the size of the file.
        if name not in self._described and (spec := describe(name)):
            self._described.add(name)
            metadata = summary.value[0].metadata
            metadata.display_name = with_unit(name, name)
            metadata.summary_description = spec.description
        self._add(step=step, summary=summary)

    def text(self, name: str, markdown: str, step: int) -> None:
        """Add a page of Markdown."""
        self._add(step=step, summary=text_pb(name, markdown))

    def restart(self, step: int) -> None:
        """Continue the run at `step`: TensorBoard discards its earlier values and later steps."""
        # TensorBoard drops later steps only at a START event.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=step, session_log=start)

    def flush(self) -> None:
        """Let TensorBoard see everything that was added."""
        self._records.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._records.close()

    def _add(self, **fields: Any) -> None:
        event = event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


def _first_screen() -> summary_pb2.Summary:
    """Return the layout of the custom-scalars page: the ten numbers to watch."""
    layout = layout_pb2.Layout()
    category = layout.category.add(title="The ten numbers to watch")
    for title, chart in FIRST_SCREEN.items():
        # TensorBoard takes names for patterns: eval/pass_at_1 would also match
        # eval/pass_at_1_error.
        patterns = [f"^{re.escape(name)}$" for name in chart.metrics]
        category.chart.add(title=with_unit(title, chart.metrics[0]), multiline={"tag": patterns})
    summary = summary_pb2.Summary()
    summary.value.add(
        tag=custom_scalar_metadata.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar_metadata.create_summary_metadata(),
        tensor=tensor_util.make_tensor_proto(layout.SerializeToString(), dtype=np.object_),
    )
    return summary


class TensorBoard:
    """A running TensorBoard of a run. log: the file for its output. Raises InfrastructureError if
    `port` is taken; 0 takes a free one.
    """

    def __init__(self, run_dir: Path, *, host: str, port: int, log: Path) -> None:
        port = _claim(host, port)
        # TensorBoard calls a run after its directory, and its event files are in
        # <run>/tensorboard. Its --logdir_spec could name it, but reads with a slower loader.
        self._logdir = tempfile.TemporaryDirectory(prefix="async-rl-tensorboard-")
        target = (run_dir / "tensorboard").absolute()
        Path(self._logdir.name, run_dir.name).symlink_to(target)
        prefix = f"/{secrets.token_urlsafe()}"
        self.url = f"http://{host}:{port}{prefix}/#custom_scalars"
        command = [
            *(sys.executable, "-m", "async_rl.monitoring.tensorboard", str(os.getpid())),
            *("--logdir", self._logdir.name, "--window_title", run_dir.name),
            *("--host", host, "--port", str(port)),
            *("--reload_interval", _RELOAD_S, "--load_fast", "false"),
        ]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, _PREFIX: prefix},
            )

    def close(self) -> None:
        """End TensorBoard, which has no children without its data server."""
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._logdir.cleanup()


def _claim(host: str, port: int) -> int:
    """Return `port`, or any free port if it is 0. Raises InfrastructureError if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # As TensorBoard's own server: a port in TIME_WAIT from an earlier run is free.
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise InfrastructureError(
            f"TensorBoard cannot listen on {host}:{port} (monitoring.tensorboard_port):"
            f" {os.strerror(error.errno or 0)}; set another port, 0 for a free one, or null for"
            " none"
        ) from error


def main() -> None:
    """Run TensorBoard at a low priority; it dies with its parent."""
    die_with_parent(int(sys.argv[1]))
    os.nice(_NICENESS)
    from tensorboard.main import run_main  # slow to import: after the above

    sys.argv = ["tensorboard", *sys.argv[2:], "--path_prefix", os.environ.pop(_PREFIX)]
    run_main()


if __name__ == "__main__":
    main()
