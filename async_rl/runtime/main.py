"""The entry point of every child process: `python -m async_rl.runtime.main '{"spec": ...}'`.

Sets cores and the death with the parent before heavy imports, then runs the role's `run(context)`.
One of the two places that catch every exception: it writes the log, reports the root cause to the
supervisor, and exits 1.
"""

import asyncio
import faulthandler
import gc
import importlib
import logging
import os
import sys
import traceback
from pathlib import Path

import msgspec

from async_rl.core.errors import AsyncRLError, DataError, RestartNeeded, RewardError, root_cause
from async_rl.core.os import RESTART_CODE, die_with_parent, leave, owner_only
from async_rl.observability.logs import configure_logging
from async_rl.planning.topology import ProcessSpec
from async_rl.protocol.supervisor import ReportFatal
from async_rl.runtime import context as contexts
from async_rl.runtime.context import connect_control, open_context
from async_rl.runtime.start import Start

# The supervisor answers immediately if it lives; without it the process should end soon.
_REPORT_S = 5.0
_OF_SERVICES = {"learner": "service.training", "gateway": "service.front"}
"""The programs of a training service, in place of those of these roles. No other run imports them:
the gateway has no GPU, and needs neither optimizers nor checkpoints.
"""


def describe(error: BaseException) -> str:
    """Return one line for errors of this project, and the traceback for others."""
    cause = root_cause(error)
    if isinstance(cause, AsyncRLError):
        return f"{type(cause).__name__}: {cause}"
    return "".join(traceback.format_exception(cause)).strip()


async def run_role(spec: ProcessSpec, run_dir: Path, log: logging.Logger) -> None:
    """Import the role's module and run it."""
    program = f"processes.{spec.role}"
    if contexts.load_config(run_dir).agent.is_service:
        program = _OF_SERVICES.get(spec.role, program)
    # Imports make half a million objects that stay: searching them took a seventh of the start of a
    # learner, and each later full collection would search them again.
    gc.disable()
    process = importlib.import_module(f"async_rl.{program}")
    gc.freeze()
    gc.enable()
    async with open_context(spec, run_dir, log) as context:
        await process.run(context)


async def report_error(run_dir: Path, name: str, error: Exception) -> None:
    """Tell the supervisor why this process exits."""
    # A user's reward function or data would fail again in the next life.
    ends_run = isinstance(root_cause(error), RewardError | DataError)
    report = ReportFatal(name=name, pid=os.getpid(), text=describe(error), ends_run=ends_run)
    async with connect_control(run_dir) as supervisor:
        await supervisor.call(report, timeout_s=_REPORT_S)


@owner_only()
def main() -> int:
    """Run one process to its end; return its exit code."""
    start = msgspec.json.decode(sys.argv[1], type=Start)
    spec = start.spec
    if start.announces:
        sys.stdout.write(f"{os.getpid()}\n")
        sys.stdout.flush()
    # Before anything slow: an orphan would keep its memory and cores.
    die_with_parent(start.parent_pid)
    # Before heavy imports, which size their thread pools by the cores.
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    run_dir = Path(start.run_dir)
    log = configure_logging(run_dir, spec.name)
    try:
        asyncio.run(run_role(spec, run_dir, log))
    except Exception as error:  # the process boundary: every failure surfaces, none is swallowed
        if isinstance(root_cause(error), RestartNeeded):
            log.warning("has to be started again: %s", root_cause(error))
            return RESTART_CODE
        log.error("fatal", exc_info=error)
        try:
            asyncio.run(report_error(run_dir, spec.name, error))
        except AsyncRLError as unreachable:
            log.error("the cause could not be reported to the supervisor: %s", unreachable)
        return 1
    log.info("finished")
    return 0


if __name__ == "__main__":
    # A crash in native code then leaves what each thread did in the output of the process.
    faulthandler.enable()
    leave(main())
