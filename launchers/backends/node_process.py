"""One process of a run on a node of a cluster, with the files it needs and the logs it writes.

Runs inside an actor. Knows nothing of Ray, which only ray.py imports.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from async_rl.launchers.backends.local import LocalLauncher, LocalProcess
from async_rl.launchers.backends.node_directory import NodeDirectory
from async_rl.observability.logs import log_path, output_path
from async_rl.planning.topology import ProcessSpec
from async_rl.runtime.context import Control, load_config, load_control

_POLL_S = 0.5  # how late the run's directory shows a log line


class NodeProcess:
    """A process and its directory. files: by path below the run's directory; if empty, the node
    shares the run's directory.
    """

    def __init__(
        self, spec: ProcessSpec, run_dir: str, files: dict[str, bytes], model: dict[str, bytes]
    ) -> None:
        self._spec = spec
        self._run_dir = Path(run_dir)
        self._files = files
        self._model = model
        # Both are empty or have one element: an actor is made before it may block.
        self._directories: list[NodeDirectory] = []
        self._processes: list[LocalProcess] = []

    async def start(self) -> int:
        """Start the process and return its id."""
        if self._files:
            await asyncio.to_thread(self._unpack)
        process = await LocalLauncher(self._run_dir).start(self._spec)
        self._processes.append(process)
        return process.pid

    async def wait(self) -> int:
        """Return the exit code, once the process has exited."""
        (process,) = self._processes
        return await process.wait()

    async def follow(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (file name, bytes) of what the process adds to its logs, until its end."""
        name = self._spec.name
        offsets = {output_path(self._run_dir, name): 0, log_path(self._run_dir, name): 0}
        # One more reading after the end, so that the last lines are not lost.
        end = asyncio.create_task(self.wait(), name="end of the process")
        is_over = False
        while not is_over:
            done, _ = await asyncio.wait({end}, timeout=_POLL_S)
            is_over = bool(done)
            for path, offset in offsets.items():
                data = await asyncio.to_thread(_read_from, path, offset)
                offsets[path] += len(data)
                if data:
                    yield path.name, data

    async def terminate(self) -> None:
        """Send SIGTERM."""
        for process in self._processes:
            process.terminate()

    async def kill(self) -> None:
        """Send SIGKILL to the process and everything it has started."""
        for process in self._processes:
            process.kill()

    async def leave(self) -> None:
        """Remove the unpacked files."""
        for directory in self._directories:
            await asyncio.to_thread(directory.remove)

    def _unpack(self) -> None:
        """Write the files into a directory that replaces the run's directory for this process."""
        directory = NodeDirectory(f"{self._run_dir.name}-{self._spec.name}")
        self._directories.append(directory)
        self._run_dir = directory.path
        for name, data in self._files.items():
            directory.write(name, data)
        for name, data in self._model.items():
            directory.write(f"model/{name}", data)
        control = load_control(self._run_dir)
        # The path in the file is one of the supervisor's machine.
        moved = msgspec.structs.replace(control, model_path=str(self._model_path(control)))
        (self._run_dir / "control.json").write_bytes(msgspec.json.encode(moved))

    def _model_path(self, control: Control) -> Path:
        if self._model:
            return self._run_dir / "model"
        if Path(control.model_path).is_dir():
            return Path(control.model_path)
        # A hub name: the node has it in its cache or downloads it.
        from async_rl.data.prepare import prepare_model

        return prepare_model(load_config(self._run_dir), lambda *_: None)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""  # not written yet
