"""TensorBoard as a child of the supervisor: bound to loopback or the run's address, and stopped
together with its parent.

The port is chosen before TensorBoard starts, so the URL is known immediately; the page answers a
few seconds later. The child is `python -m async_rl.monitoring.tensorboard_process <parent pid>
<TensorBoard's arguments>`.

TensorBoard has no password, and other users of the machine reach loopback too: every address of it
starts with a secret, which the child has from its environment, since command lines are public. Its
data server, a faster reader, has a port without such an address, and is not used.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from async_rl.core.errors import InfrastructureError
from async_rl.core.os import die_with_parent

_CLOSE_S = 3.0  # it has nothing to save
_NICENESS = 10  # it reads the event file every second, on cores that generators may use
_RELOAD_S = "1"
"""Seconds. Metrics must be visible within 5 s, and writing them takes a part of that."""
_PREFIX = "ASYNC_RL_TENSORBOARD_PREFIX"


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
            *(sys.executable, "-m", "async_rl.monitoring.tensorboard_process", str(os.getpid())),
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
