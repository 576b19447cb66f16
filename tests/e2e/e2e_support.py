"""Start real runs as a person would, watch them from outside, and count what they leave."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import psutil
from documents import DOCS
from nbclient import NotebookClient
from warm_processes import run_command

from async_rl.runs.control import ask_status, living_pid

_COMMAND = [str(Path(sys.executable).with_name("async-rl"))]
_LOOK_S = 0.1


def async_rl(*words: str) -> subprocess.CompletedProcess[str]:
    """What a person gets who runs `async-rl` with these words in another terminal."""
    return run_command(words)


SMALL = (
    "conf=grpo_code",
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
)
"""A run whose steps take a second: the transformers engine stands in for vLLM, whose start adds
nothing to these facts.
"""


def cores_of_worker() -> list[str]:
    """Settings that exchange the cores of the generators and of the others, for the second worker
    of the suite. By default the generators are on the first core: those of the runs of two workers
    would share it, while the other core waits.
    """
    cores = sorted(os.sched_getaffinity(0))
    if os.environ.get("PYTEST_XDIST_WORKER") != "gw1" or len(cores) < 2:
        return []
    first, second = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    return [f"generators.cores={second}", f"learner.cores={first}", f"verifiers.cores={first}"]


class LiveRun:
    """`async-rl launch`, or `async-rl resume`, in a process of its own, its output in a file. copy:
    what is resumed instead.
    """

    def __init__(
        self,
        output_dir: Path,
        *settings: str,
        name: str = "run",
        resumes: bool = False,
        prefix: Sequence[str] = (),
        copy: str = "",
    ) -> None:
        # The last value of a setting: tests pass a tuple of common settings, then their own.
        is_here = not resumes and not any(word.startswith("launcher=") for word in settings)
        settings = (*(cores_of_worker() if is_here else ()), *settings)
        settings = tuple({word.partition("=")[0]: word for word in settings}.values())
        self.run_dir = output_dir / name
        self._output = output_dir / f"{name}.terminal"
        output_dir.mkdir(parents=True, exist_ok=True)
        if resumes:
            arguments = ["resume", copy or str(self.run_dir), *settings]
            arguments += ["--output-dir", str(output_dir)] if copy else []
        else:
            arguments = ["launch", *settings, f"output_dir={output_dir}", f"run_name={name}"]
            if not any(word.startswith("monitoring.tensorboard_port=") for word in settings):
                arguments.append("monitoring.tensorboard_port=null")
        with self._output.open("wb") as sink:
            self.process = subprocess.Popen(
                [*prefix, *_COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def terminal(self) -> str:
        """What a person saw."""
        return self._output.read_text(errors="replace")

    @property
    def pid(self) -> int | None:
        """The id of the supervisor."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The complete rows of metrics.jsonl."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        except OSError:
            return []
        return [msgspec.json.decode(line) for line in lines]

    @property
    def step(self) -> int:
        """The last step that was recorded."""
        rows = self.rows
        return int(rows[-1]["step"]) if rows else -1

    def until(
        self,
        condition: Callable[[], bool],
        what: str,
        *,
        timeout_s: float = 240,
        look_s: float = _LOOK_S,
    ) -> None:
        """Waits for something that the run does; fails with the run's own words if it ends or takes
        too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.is_alive, f"the run ended before {what}:\n{self.terminal}"
            assert time.monotonic() < deadline_s, (
                f"{what} did not come within {timeout_s} s:\n{self.terminal}"
            )
            time.sleep(look_s)

    def pid_of(self, process: str) -> int:
        """The process id of one process of the run."""
        for found in self.processes():
            if f'"name":"{process}"' in found.info["cmdline"][-1]:
                return int(found.pid)
        raise AssertionError(f"{process} is not running")

    def processes(self) -> list[psutil.Process]:
        """Every living process that belongs to the run, whoever its parent is."""
        # TensorBoard reads links to runs, and its command line names the supervisor instead.
        mine, supervisor = str(self.run_dir), str(self.pid)
        own = {self.pid, os.getpid()}
        return [
            p
            for p in psutil.process_iter(["cmdline", "status"])
            if p.pid not in own
            and any(part == supervisor or mine in part for part in p.info["cmdline"] or [])
            and p.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def blocks(self) -> set[Path]:
        """The named files in /dev/shm that its processes have mapped."""
        maps = [part.path for p in self.processes() for part in p.memory_maps(grouped=True)]
        return {Path(path) for path in maps if path.startswith("/dev/shm/")}

    def kill(self, process: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one process of the run."""
        os.kill(self.pid_of(process), number)

    def kill_all(self) -> None:
        """The machine goes down: the supervisor first, everything else with it."""
        self.process.kill()
        self.process.wait()
        self._wait_for_the_others()
        assert not self.processes(), f"left running: {self.processes()}"

    def _wait_for_the_others(self) -> None:
        deadline_s = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)

    def now(self) -> dict[str, Any]:
        """Return the reply behind `async-rl status`, without members while the run does not answer.

        For conditions that are polled: a command takes a third of a second of one of two cores,
        which the run needs itself.
        """
        reply = ask_status(self.run_dir)
        if reply is None:
            return {"members": [], "pools": [], "restarted_because": {}}
        answer: dict[str, Any] = msgspec.to_builtins(reply)
        return answer

    def member(self, name: str) -> dict[str, Any]:
        """Return what the status has of one process; empty while there is no answer about it."""
        return next((found for found in self.now()["members"] if found["name"] == name), {})

    def serves_again(self, name: str, killed: int) -> None:
        """Wait for the next life of a process, in which a generator has weights."""
        self.until(
            lambda: (
                self.member(name).get("pid") not in (killed, None)
                and (not name.startswith("generator") or self.member(name).get("version", -1) >= 0)
            ),
            f"the next life of {name}, a generator with weights",
        )

    def audit(self) -> dict[str, Any]:
        """What `async-rl ledger --audit` finds; its exit code says the same."""
        done = async_rl("ledger", str(self.run_dir), "--audit", "--json")
        found = msgspec.json.decode(done.stdout)
        assert (done.returncode == 0) == (found["problems"] == []), done
        assert open_to_others(self.run_dir) == []
        return found

    def wait(self, *, timeout_s: float = 240) -> int:
        """The run's exit code."""
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """Ends the run whatever it does; for fixtures."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._wait_for_the_others()


class Attached(LiveRun):
    """A run that a Python program has started, as other terminals see it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._output = run_dir / "logs" / "supervisor.out"

    @property
    def pid(self) -> int | None:
        return living_pid(self.run_dir)

    @property
    def is_alive(self) -> bool:
        return self.pid is not None


def notebook(name: str) -> tuple[nbformat.NotebookNode, list[nbformat.NotebookNode]]:
    """Return a notebook of docs/notebooks, and its cells with code, which a test may change."""
    found = nbformat.read(DOCS / "notebooks" / name, as_version=4)
    return found, [cell for cell in found.cells if cell.cell_type == "code"]


def outputs(found: nbformat.NotebookNode, directory: Path) -> list[str]:
    """Execute a notebook in a kernel in a directory; return the text, or the types, of each cell's
    outputs.
    """
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(found, timeout=90, resources=resources).execute()
    return [
        "".join(o.text if o.output_type == "stream" else " ".join(o.data) for o in cell.outputs)
        for cell in found.cells
        if cell.cell_type == "code"
    ]


def open_to_others(*folders: Path) -> list[str]:
    """What others may read, write or enter of these folders, or of single files."""
    paths = {path for folder in folders for path in (folder, *folder.rglob("*"))}
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if mode & 0o077 and not path.is_symlink():
                found.append(f"{path} {mode & 0o777:o}")
    return found


def shared_memory() -> set[str]:
    """Names of the files in /dev/shm that no living process uses.

    Other tests may run at the same time, so only what a dead process has left counts. A process
    that was just killed may still be ending, so each name must stay unused for some seconds.
    """
    deadline_s = time.monotonic() + 5
    left = _unused(set(os.listdir("/dev/shm")))
    while left and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        left = _unused(left & set(os.listdir("/dev/shm")))
    return left


def _unused(names: set[str]) -> set[str]:
    folder = "/dev/shm/"
    # Tests of engines of several workers run at the same time, and kill workers, which leave vLLM's
    # segments and Python's semaphores; no run of these tests has several.
    names = {name for name in names if not name.startswith(("vllm_dist_", "sem.mp-"))}
    names = {name for name in names if os.path.isfile(folder + name)}
    if not names:
        return names
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used |= {part.path for part in process.memory_maps(grouped=True)}
            used |= {file.path for file in process.open_files()}
    return {name for name in names if folder + name not in used}
