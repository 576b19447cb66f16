"""`launcher=ray`: every process is an actor of a Ray cluster (ray_actors.py)."""

import socket
from collections.abc import Iterator
from pathlib import Path

from async_rl.config.launchers import RayLaunch
from async_rl.config.run import RunConfig
from async_rl.core.extras import missing
from async_rl.launchers.backends.backend import Backend
from async_rl.supervision.launcher import Launcher

# A head on the same network answers in milliseconds; a wrong address never answers.
_CONNECT_S = 5.0


def _make(run_dir: Path, config: RunConfig) -> Launcher:
    # Ray is an extra: `_problems` must be able to say that it is missing.
    from async_rl.launchers.backends.ray_actors import RayLauncher

    return RayLauncher(run_dir, config)


def _problems(config: RunConfig) -> Iterator[str]:
    assert isinstance(config.launcher, RayLaunch)
    address = config.launcher.address
    problem = missing("ray", "launcher=ray")
    if problem is not None:
        yield f"{problem}, on every node"
    host, _, port = address.rpartition(":")
    # "auto" and "local" name no address to try.
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        yield (
            f"launcher.address={address}: no answer ({error}); give HOST:PORT of the cluster's head"
        )


BACKEND = Backend(make=_make, problems=_problems)
