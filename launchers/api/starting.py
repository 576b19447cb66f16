"""Starts a run: composes and checks its configuration, creates its directory, and supervises it in
this process or in a background process.

Invariants: nothing is started or written unless the configuration fits this machine; the
configuration in the run's directory is complete before the first process starts.
"""

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from async_rl.config.base import replace
from async_rl.config.generation import is_local_model
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine
from async_rl.core.os import sync
from async_rl.launchers.backends.backend import backend_of, job_to_submit
from async_rl.runs.control import leave_mark
from async_rl.runs.directory import unique_name

OUTPUT_FILE = Path("logs", "supervisor.out")


def checked_config(conf: str, overrides: Sequence[str], machine: Machine) -> tuple[RunConfig, str]:
    """Return a configuration that can run on this machine, with a run_name, and the hardware preset
    that it uses. Raises ConfigError with one line per problem.
    """
    # Hydra takes half a second to import.
    from async_rl.composition.compose import compose_for
    from async_rl.launchers.preflight.checks import preflight

    config, preset = compose_for(machine, conf, overrides)
    preflight(config, machine)
    if config.run_name is None:
        name = unique_name(Path(config.output_dir), rng=random.Random(), now=time.localtime())
        config = replace(config, run_name=name)
    return config, preset


def make_run_dir(config: RunConfig) -> Path:
    """Create the run's directory with its configuration, which is never changed later. Raises
    ConfigError, also if the model is neither in the hub's cache nor can be downloaded.
    """
    from async_rl.composition.compose import write_config
    from async_rl.data import model_files

    run_dir = Path(config.output_dir) / str(config.run_name)
    model = config.model.path
    # A node of a cluster may have a cache or a network that this machine lacks.
    if model is not None and not is_local_model(model) and config.launcher.is_one_machine:
        model_files.require(model)
    try:
        # Prompts and responses are as private as the data that they come from.
        run_dir.mkdir(mode=0o700, parents=True)
        (run_dir / "logs").mkdir()
        write_config(config, run_dir / "config.yaml")
        leave_mark(run_dir)
        # The name of the run: without it a power loss would take the first checkpoints too.
        sync(run_dir.parent)
    except OSError as error:
        raise ConfigError(
            f"output_dir={config.output_dir}: {run_dir} cannot be made ({error.strerror}); choose"
            " another"
        ) from error
    return run_dir


def supervise(config: RunConfig, run_dir: Path) -> int:
    """Run to the end in this process, print what the run achieved, and return the exit code."""
    from async_rl.monitoring.terminal import Terminal
    from async_rl.processes.supervisor import run_supervised
    from async_rl.runs.certificate.certify import note_origin
    from async_rl.runs.status import result_lines

    note_origin(run_dir)
    code = run_supervised(
        config=config,
        run_dir=run_dir,
        launcher=backend_of(config).make(run_dir, config),
    )
    # The run is complete; a closed terminal must not change its exit code.
    with contextlib.suppress(OSError):
        for line in result_lines(run_dir):
            Terminal(highlight=False).print(line, markup=False, soft_wrap=True)
    return code


def start(config: RunConfig, run_dir: Path) -> None:
    """Supervise the run in a background process, or in a job, which this process does not own."""
    job = job_to_submit(config)
    if job is not None:
        job.submit(config, run_dir)
        return
    with (run_dir / OUTPUT_FILE).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "async_rl.launchers.supervise_run", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A notebook's kernel is often interrupted and restarted; training must survive that.
            start_new_session=True,
        )
    # Before the process does it itself, so that the run counts as alive from now on.
    leave_mark(run_dir, process.pid)
    # Somebody must collect the exit code, or the process remains in the process table as a zombie.
    threading.Thread(target=process.wait, name=f"end of {run_dir.name}", daemon=True).start()
