"""Containers of Podman, for programs whose task names an image.

It knows the engine; `container_run.py` judges one command. Invariants: a container has no network,
no capability and no file of the host except its own, which are read-only; its writable files are in
memory and bounded; no image is fetched; a container stops with its command, with the cancellation
of its run, and with this process, even if it is killed (`_KEEPER`).
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from async_rl.core.errors import Unsupported
from async_rl.core.types import ContainerTest
from async_rl.rewards.verifier.languages import output_of
from async_rl.sandbox.protocol import CELL_UID

PID = "pid"
REPORT = "report"
"""Files of a container's directory: process id of the command, written when it starts."""
# A test suite starts more processes than a program, but a fork bomb must end.
MAX_TASKS = 256
# In memory, which the limit of the container therefore has to include twice.
SCRATCH_MB = 256
_WORK = "/work"
# Host user of the containers of a root server; not `CELL_UID`, because the tasks of cells count
# against the same limit of processes.
_ROOTS_USER = CELL_UID + 1
_MAX_OPEN = 1024
_RUN = (
    "run --rm --interactive --pull=never --network=none --no-hosts --hostname=container --read-only"
    " --read-only-tmpfs=false --cap-drop=all --security-opt=no-new-privileges --http-proxy=false"
    f" --log-driver=none --systemd=false --shm-size=16m --workdir={_WORK}"
).split()
_MIB = 1 << 20
# Podman waits for its locks when many containers start at the same time.
_ENGINE_S = 60.0
# An engine that does not end within ten seconds is killed; the keeper removes what remains.
_TRIES = 20
_PAUSE_S = 0.5
_CROWDED = 8
# The memory limit of one process, in units of the container's: the processes together are
# measured only every now and then, and one may allocate this much between two measurements.
_DATA_FACTOR = 2
_KEEPER = """
cat
for _ in 1 2 3; do
    left=$("$@" ps --all --quiet --filter "label=$LABEL")
    [ -z "$left" ] || "$@" rm --force --time 0 $left
    [ -n "$left" ] || break
done
rm -rf "$FOLDER"
"""
"""Waits for the end of its input, which the verifier keeps open, and removes the containers that
remain. It is in another session, so a signal to the verifier's group does not reach it.
"""


class Containers:
    """At most `num` containers at a time. engine: command of Podman; rootfs: directories by name.
    Both are found when the first container is requested.
    """

    def __init__(self, engine: Sequence[str], rootfs: Mapping[str, str], num: int) -> None:
        self._engine = engine
        self._rootfs = rootfs
        self._places = asyncio.Semaphore(num)
        self._label = f"async_rl.verifier={os.getpid()}-{secrets.token_hex(8)}"
        self._opening = asyncio.Lock()
        self.controllers: list[str] | None = None
        self._images: set[str] = set()
        self._folder: Path | None = None
        self._keeper: Process | None = None
        self.removing: set[asyncio.Task[None]] = set()

    async def require(self, image: str) -> None:
        """Raise Unsupported with the reason if no container of the image can run here."""
        async with self._opening:
            if self.controllers is None:
                status, said = await self._ask(
                    "info", "--format", "{{json .Host.CgroupControllers}}"
                )
                if status:
                    raise Unsupported(
                        f"containers need {self._engine[0]}, which does not work here:"
                        f" {said[-300:]}; correct sandbox.container_engine={list(self._engine)}"
                    )
                # Options that need control groups: the limits hold without them, but less exactly.
                known = json.loads(said) or ()
                self.controllers = [name for name in ("memory", "pids") if name in known]
            if image in self._images:
                return
            if image in self._rootfs:
                folder = self._rootfs[image]
                if not await asyncio.to_thread(os.path.isdir, folder):
                    raise Unsupported(
                        f"sandbox.rootfs.{image}={folder} is not a directory of this machine;"
                        " unpack the root file system there"
                    )
            elif (await self._ask("image", "exists", image))[0]:
                raise Unsupported(
                    f"{self._engine[0]} has no image {image} on this machine, and none is fetched;"
                    f" run `{' '.join(self._engine)} pull {image}`, or name a directory in"
                    " sandbox.rootfs"
                )
            self._images.add(image)

    async def _ask(self, *words: str) -> tuple[int, str]:
        """Exit status and text of a command of the engine."""
        return await asyncio.to_thread(output_of, [*self._engine, *words], _ENGINE_S)

    @contextlib.asynccontextmanager
    async def place(self, image: str) -> AsyncIterator[Path]:
        """The right to run a container of the image, and an empty directory for its files.

        Raises Unsupported.
        """
        await self.require(image)
        async with self._places:
            await self._start_keeper()
            folder = await asyncio.to_thread(self._new_folder)
            try:
                yield folder
            finally:
                shutil.rmtree(folder)

    def _new_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="async-rl-container-", dir=self._folder))
        # A root server's containers run as another user and read their files below.
        folder.chmod(0o711)
        return folder

    async def _start_keeper(self) -> None:
        async with self._opening:
            if self._keeper is not None:
                return
            self._folder = await asyncio.to_thread(self._new_folder)
            self._keeper = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                _KEEPER,
                "sh",
                *self._engine,
                env={**os.environ, "LABEL": self._label, "FOLDER": str(self._folder)},
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=DEVNULL,
                # A signal to the group of the verifier must not end its keeper.
                start_new_session=True,
            )

    def command(self, name: str, test: ContainerTest, folder: Path) -> list[str]:
        """The command that starts a container. folder: its files by number, the program first,
        and its report.
        """
        assert self.controllers is not None
        limits = {
            "memory": f"--memory={test.memory_mb + 2 * SCRATCH_MB}m",
            "pids": f"--pids-limit={MAX_TASKS}",
        }
        paths = (test.program, *test.files)
        mounts = [f"{folder}/{index}:{path}:ro" for index, path in enumerate(paths)]
        if test.report is not None:
            mounts.append(f"{folder}/{REPORT}:{test.report}:rw")
        # The first user of a rootless engine is the one who runs it.
        user = _ROOTS_USER if os.geteuid() == 0 else 0
        data = test.memory_mb * _MIB * _DATA_FACTOR
        # A directory of the image lends its mode to a mount, so the owner must fit.
        scratch = f"chown=true,tmpfs-mode=1777,tmpfs-size={SCRATCH_MB}m"
        # Podman stops the container after this time if both this process and its keeper were
        # killed.
        longest_s = int(_CROWDED * (test.timeout_s + _ENGINE_S))
        root = [test.image]
        if test.image in self._rootfs:
            root = ["--rootfs", f"{self._rootfs[test.image]}:O"]
        return [
            *self._engine, *_RUN, f"--name={name}", f"--label={self._label}",
            f"--pidfile={folder}/{PID}", f"--timeout={longest_s}", f"--user={user}:{user}",
            *(limits[name] for name in self.controllers),
            *(f"--ulimit={name}={value}:{value}" for name, value in (
                ("core", 0), ("nofile", _MAX_OPEN), ("nproc", MAX_TASKS), ("data", data),
                ("fsize", SCRATCH_MB * _MIB),
            )),
            *(f"--mount=type=tmpfs,destination={path},{scratch}" for path in (_WORK, "/tmp")),
            *(f"--volume={mount}" for mount in mounts),
            f"--entrypoint={json.dumps(test.command[:1])}", *root, *test.command[1:],
        ]  # fmt: skip

    def remove(self, name: str, process: Process) -> None:
        """End a container and everything in it; `close` waits for that. process: the engine's."""
        task = asyncio.create_task(self._remove(name, process), name="remove a container")
        self.removing.add(task)
        task.add_done_callback(self.removing.discard)

    async def _remove(self, name: str, process: Process) -> None:
        for _ in range(_TRIES):
            await self._ask("rm", "--force", "--time", "0", name)
            # A container that was not there yet may come while its engine runs.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await process.wait()
                    return
        process.kill()

    async def close(self) -> None:
        """Remove the containers that are left."""
        # Before the keeper ends: it would remove the same containers.
        await asyncio.gather(*self.removing)
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            await self._keeper.wait()
