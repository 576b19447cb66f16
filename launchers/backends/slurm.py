"""Runs a run as one job of Slurm: its supervisor in the batch step, every other process in another
step, which `srun` starts.

Invariants
- The job is only an allocation: a restart, and a process that joins later, is another `srun` in it.
  A step waits until the allocation has free CPUs for it.
- Steps exit with the supervisor: `srun` dies with it, Slurm cancels the job with its batch step,
  and a process that cannot reach the supervisor exits.
- SIGTERM makes `srun` kill its task, so a process is stopped by SIGUSR1, which `srun` passes on.
- The run's directory is on a filesystem that the nodes share; the buffer, which writes the store,
  stays on the supervisor's node.
Docs: docs/cluster.md.
"""

import asyncio
import contextlib
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from async_rl.config.launchers import SlurmLaunch
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.launchers.backends.backend import Backend, Job, PlacedProcess
from async_rl.launchers.backends.cluster import cluster_cpus, kind_of_node, needs, on_cluster
from async_rl.launchers.backends.local import child_command
from async_rl.observability.logs import output_path
from async_rl.planning.topology import ProcessSpec
from async_rl.runs.status import JOB_FILE
from async_rl.wire.addresses import AUTO

# srun needs a moment to signal its task and to report the end.
_KILL_S = 5.0
# A busy controller may take tens of seconds to answer.
_SUBMIT_S = 60.0


def is_inside_job() -> bool:
    """Return whether this process runs in an allocation and therefore starts steps, not a job."""
    return "SLURM_JOB_ID" in os.environ


def job_script(config: RunConfig, run_dir: Path) -> str:
    """Return the job's script: the options as #SBATCH lines, then the supervisor."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(config, run_dir))]
    # exec: Slurm's signals reach the supervisor, not a shell in between.
    command = [sys.executable, "-m", "async_rl.launchers.supervise_run", str(run_dir)]
    lines.append(f"exec {shlex.join(command)}")
    return "\n".join(lines) + "\n"


def submit(config: RunConfig, run_dir: Path) -> str:
    """Write the script into the run's directory, submit it and return the job's number. Raises
    ConfigError if Slurm refuses it.
    """
    script = run_dir / JOB_FILE
    script.write_text(job_script(config, run_dir))
    # With several clusters --parsable prints JOB;CLUSTER.
    return _sbatch("--parsable", str(script)).strip().partition(";")[0]


def _sbatch(*arguments: str, text: str = "") -> str:
    """Return what sbatch prints. Raises ConfigError if it refuses the job or cannot be run."""
    try:
        return subprocess.run(
            ["sbatch", *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            timeout=_SUBMIT_S,
        ).stdout
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"launcher=slurm: sbatch {' '.join(arguments)} refuses the job:"
            f" {' '.join(error.stderr.split())}; correct launcher.*"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"launcher=slurm: sbatch cannot be run here ({error}); launch from a machine that"
            " submits jobs"
        ) from error


def _options(config: RunConfig, run_dir: Path) -> Iterator[str]:
    slurm = config.launcher
    assert isinstance(slurm, SlurmLaunch)
    yield f"--job-name={run_dir.name}"
    yield f"--output={run_dir}/logs/slurm.out"
    # A requeued job continues the file.
    yield "--open-mode=append"
    yield f"--nodes={slurm.nodes}"
    # One place per node for the batch step; the processes are further steps.
    yield "--ntasks-per-node=1"
    if not slurm.cpus_per_node:
        yield "--exclusive"
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    # A day, and not the partition's default, which may be minutes or have no end. sbatch uses the
    # last value of an option, so launcher.extra replaces it.
    yield "--time=24:00:00"
    yield f"--signal=B:TERM@{config.timeouts.before_time_limit_s}"
    yield "--no-kill"  # a lost node takes its processes, not the job
    yield from slurm.extra


class SlurmProcess(PlacedProcess):
    """One `srun` with one task, whose first line of output is its process id."""

    def __init__(self, srun: asyncio.subprocess.Process, output: Path, waits_for: str) -> None:
        super().__init__(waits_for)
        self._srun = srun
        self._output = output
        self._reading = asyncio.create_task(self._read(), name="output of srun")

    async def wait(self) -> int:
        """Return the task's exit code; -N if signal N killed it."""
        code = await self._srun.wait()
        await asyncio.shield(self._reading)
        # srun reports signal N as 128 + N, Python as -N.
        return 128 - code if code > 128 else code

    def terminate(self) -> None:
        """Ask the task to end, through srun."""
        # Before the task has a process, nothing could receive its signal: end srun instead.
        self._signal(signal.SIGUSR1 if self.pid else signal.SIGTERM)

    def kill(self) -> None:
        """End the task now, and srun in any case."""
        if not self._killing and self._srun.returncode is None:
            self._killing.add(asyncio.create_task(self._kill(), name="kill the step"))

    async def _kill(self) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_S):
                await self._srun.wait()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._srun.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._srun.send_signal(number)

    async def _read(self) -> None:
        """Read the process id, then append everything else to the process's file."""
        assert self._srun.stdout is not None
        try:
            # announces: srun does not know the id of its task.
            first = await self._srun.stdout.readline()
            self.pid = int(first) if first.strip().isdigit() else 0
            self._is_placed.set()
            while data := await self._srun.stdout.read(2**16):
                with self._output.open("ab") as file:
                    file.write(data)
        finally:
            self._is_placed.set()


class SlurmLauncher:
    """Starts steps in the job that this process runs in."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        assert isinstance(config.launcher, SlurmLaunch)
        self._run_dir = run_dir.absolute()
        self._config = config
        self._num_nodes = config.launcher.nodes
        self._node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._started: list[SlurmProcess] = []

    async def open(self) -> str:
        """Return this node's address. Raises ConfigError outside a job, or if other nodes cannot
        reach the address of the node's name.
        """
        if not is_inside_job():
            raise ConfigError(
                "launcher=slurm: not running inside a Slurm job; start with async-rl launch, which"
                " submits one"
            )
        try:
            address = await asyncio.to_thread(socket.gethostbyname, self._node)
        except OSError as error:
            raise ConfigError(
                f"launcher=slurm: the name of this node, {self._node}, has no address ({error});"
                " set network.host"
            ) from error
        is_chosen = self._config.network.host != AUTO
        # Debian writes the name of a machine as 127.0.1.1 into /etc/hosts.
        if address.startswith("127.") and self._num_nodes > 1 and not is_chosen:
            raise ConfigError(
                f"launcher=slurm: {self._node} has the address {address} here, which other nodes"
                " cannot reach; set network.host to a network interface"
            )
        return address

    async def close(self) -> None:
        """End every step."""
        for process in self._started:
            process.kill()
        await asyncio.gather(*(process.wait() for process in self._started), return_exceptions=True)

    async def start(self, spec: ProcessSpec) -> SlurmProcess:
        """Start an srun, which waits until the job has room for its step. Raises
        InfrastructureError if srun cannot be run.
        """
        placed = on_cluster(self._config, spec)
        output = output_path(self._run_dir, spec.name)
        try:
            with output.open("ab") as errors:
                srun = await asyncio.create_subprocess_exec(
                    *self.srun_command(spec),
                    *child_command(placed, self._run_dir, parent_pid=0, announces=True),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    # srun's own messages, such as why a step cannot start.
                    stderr=errors,
                    start_new_session=True,
                    env={**os.environ, **placed.env},
                )
        except OSError as error:
            raise InfrastructureError(f"{spec.name} could not be started: srun: {error}") from error
        process = SlurmProcess(srun, output, needs(self._config, spec))
        self._started.append(process)
        return process

    def srun_command(self, spec: ProcessSpec) -> list[str]:
        """Return the words that start a process."""
        # --mem=0: a step may use all memory of its node, which the job owns anyway.
        options = [
            *("srun", "--exact", "--nodes=1", "--ntasks=1", "--mem=0", f"--job-name={spec.name}"),
            f"--cpus-per-task={cluster_cpus(self._config, spec)}",
            f"--gpus-per-node={math.ceil(spec.gpus)}" if spec.gpus else "--gres=none",
        ]
        if kind := kind_of_node(self._config, spec):
            options.append(f"--constraint={kind}")
        if spec.role == "buffer":
            options.append(f"--nodelist={self._node}")
        return options


def _problems(config: RunConfig) -> Iterator[str]:
    tools = ["srun"] if is_inside_job() else ["sbatch", "srun"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        yield f"launcher=slurm: {missing[0]} is missing here; launch from a machine that has Slurm"
    elif not is_inside_job():
        try:
            run_dir = Path(config.output_dir) / str(config.run_name)
            _sbatch("--test-only", text=job_script(config, run_dir))
        except ConfigError as error:
            yield str(error)


BACKEND = Backend(
    make=SlurmLauncher,
    problems=_problems,
    job=Job(script=job_script, submit=submit, is_inside=is_inside_job),
)
