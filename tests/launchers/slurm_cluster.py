"""A real Slurm of one node for one test: munged, slurmctld and slurmd with everything they write
below one directory.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo")
_READY_S = 60.0
_CONFIG = Path(__file__).with_name("slurm.conf")


def missing() -> list[str]:
    """Return the requirements that this machine lacks; empty if none."""
    lacks = [command for command in _COMMANDS if shutil.which(command) is None]
    return lacks if os.geteuid() == 0 else ["root", *lacks]


class SlurmCluster:
    """As a context manager: the daemons run within. `env` is what Slurm's commands need."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.env = {"SLURM_CONF": str(root / "slurm.conf")}

    def __enter__(self) -> Self:
        root = self._root
        for name in ("state", "spool"):
            (root / name).mkdir(parents=True)
        root.chmod(0o755)  # munged wants every directory above its socket closed to writers
        key = root / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        ports = {"control_port": _free_port(), "node_port": _free_port()}
        config = _CONFIG.read_text().format(root=root, host=host, **ports)
        (root / "slurm.conf").write_text(config)
        files = {name: root / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = (f"--{name}{'' if name == 'socket' else '-file'}={files[name]}" for name in files)
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._until(files["socket"].exists, "munged")
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D", "-c", "-N", host)
        self._until(
            lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"), "an idle node"
        )
        return self

    def run(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        env = {**os.environ, **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout

    def _start(self, *command: str) -> None:
        with (self._root / f"{command[0]}.out").open("wb") as sink:
            self._daemons.append(
                subprocess.Popen(command, env={**os.environ, **self.env}, stdout=sink, stderr=sink)
            )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not condition():
            paths = filter(Path.is_file, self._root.glob("*.[lo]*"))
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in paths)
            assert time.monotonic() < deadline_s, f"no {what} within {_READY_S:g} s:\n{logs}"
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
