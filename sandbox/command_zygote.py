"""The process of a command cell that starts one command at a time and reports how it ended.

It is the first process of its namespaces: every orphan becomes its child, and one signal ends all
other processes. Invariants: a command starts in an empty working directory and with no other
process in the cell; nothing of it is left when its reply is sent.
"""

from __future__ import annotations

import _socket
import contextlib
import gc
import mmap
import os
import select
import signal
import stat
import time
import zipfile
from collections.abc import Sequence
from typing import IO, NamedTuple

from . import command_child, command_filters, linux, namespaces, one_exec
from .command_child import Start
from .command_protocol import (
    FIRST_FILE,
    MAX_SPEC_BYTES,
    PRODUCT,
    STDERR,
    STDERR_BYTES,
    CommandSpec,
    Profile,
)
from .process_tree import ProcessTree
from .protocol import MAX_DESCRIPTORS, NAMESPACES, Ending, Hello, Reply

_FIRST_TICK_S, _TICK_S = 0.01, 0.03
_PATIENCE, _PATIENCE_S = 4, 10.0
"""A command whose processes hide their CPU time ends after this many times its limits and these
seconds more.
"""
_PIECE = 1 << 16


def main(arguments: list[str]) -> None:
    """Enter the namespaces, then serve. Arguments: level, host pid, socket, readable paths."""
    level, host, descriptor = map(int, arguments[:3])
    if level != NAMESPACES:
        raise ValueError(f"a command cell needs namespaces (level {NAMESPACES}), not level {level}")
    # Before the namespaces hide it: the limits of a command are watched there.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    namespaces.become_first_process(arguments[3:], host, descriptor)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.drop_capability_bounds()
    # The first process of a namespace gets only the signals that it handles: a command must not
    # reach Python's handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _serve(_socket.socket(fileno=descriptor), proc)


def _serve(host: _socket.socket, proc: int) -> None:
    with open("/dev/null", "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    filters = {int(profile): command_filters.build(profile) for profile in Profile}
    hello = Hello(NAMESPACES, linux.landlock_abi(), True, os.geteuid(), os.getpid())
    fault = mmap.mmap(-1, mmap.PAGESIZE)
    gc.collect()
    gc.freeze()
    host.send(hello.pack())
    space = _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
    while True:
        data, ancillary, _flags, _address = host.recvmsg(MAX_SPEC_BYTES, space)
        if not data:
            os._exit(0)
        if not ancillary:
            continue  # a cancellation that came after the end of its command
        descriptors = memoryview(ancillary[0][2]).cast("i").tolist()
        command = _Command(CommandSpec.unpack(data), descriptors, fault, proc)
        try:
            reply = command.run(filters, host.fileno())
        finally:
            command.end()
            for descriptor in descriptors:
                os.close(descriptor)
        host.send(reply.pack())


class _End(NamedTuple):
    """The end of the first process or the limit that was exceeded; its exit status or signal."""

    ending: Ending
    code: int = 0


class _Command:
    """One command from its start until nothing of it is left."""

    def __init__(
        self, spec: CommandSpec, descriptors: Sequence[int], fault: mmap.mmap, proc: int
    ) -> None:
        self._spec, self._descriptors, self._fault = spec, descriptors, fault
        self._tree = ProcessTree(proc)
        self._leader = 0
        self._code: int | None = None
        self._reaped_s, self._peak_bytes = 0.0, 0
        self._head, self._tail = bytearray(), bytearray()
        self._errors, self._errors_in = os.pipe()
        os.set_blocking(self._errors, False)

    def run(self, filters: dict[int, bytes], host: int) -> Reply:
        """Start the command, watch it, end all its processes, and return its product."""
        started = time.monotonic()
        self._fault[:] = bytes(mmap.PAGESIZE)
        try:
            self._prepare_directory()
        except OSError as error:  # the files do not fit
            os.close(self._errors_in)
            os.close(self._errors)
            return Reply(Ending.FAULT, 0, 0.0, 0.0, 0, f"no directory: {error}".encode()[:200])
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._leader = linux.fork()
        if self._leader == 0:
            start = Start(filters, self._errors_in, theirs, self._fault)
            command_child.main(self._spec, self._descriptors, start)
        theirs.close()
        os.close(self._errors_in)
        process = os.pidfd_open(self._leader)
        try:
            if self._spec.profile == Profile.PROGRAM:
                one_exec.allow_one(ours, process)
            end = self._watch(process, host, started)
        finally:
            os.close(process)
            ours.close()
        self.end()
        self._drain()
        self._write_errors()
        wall_s = time.monotonic() - started
        fault = command_child.fault_of(self._fault)
        if fault:
            return Reply(Ending.FAULT, 0, self._reaped_s, wall_s, 0, fault)
        if end.ending == Ending.EXITED and self._spec.product:
            target = self._descriptors[PRODUCT]
            try:
                _return_product(self._spec.product, target)
            except (OSError, RecursionError, ValueError):  # deep directories, odd names
                os.ftruncate(target, 0)
        return Reply(end.ending, end.code, self._reaped_s, wall_s, self._peak_bytes)

    def _prepare_directory(self) -> None:
        namespaces.renew_scratch(self._spec.scratch_bytes)
        os.chdir(namespaces.SCRATCH)
        first = FIRST_FILE + (not self._spec.executable)
        for name, source in zip(self._spec.files, self._descriptors[first:], strict=True):
            with open(name, "xb") as file:
                file.write(os.pread(source, os.fstat(source).st_size, 0))

    def _watch(self, process: int, host: int, started: float) -> _End:
        spec, asleep_s, tick_s = self._spec, 0.0, _FIRST_TICK_S
        longest_s = _PATIENCE * (spec.cpu_s + spec.sleep_s) + _PATIENCE_S
        poller = select.poll()
        for descriptor in (process, host, self._errors):
            poller.register(descriptor, select.POLLIN)
        looked = time.monotonic()
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(tick_s * 1000)}
            if self._errors in ready and not self._drain():
                poller.unregister(self._errors)
            self._reap()
            if self._code is not None:
                ending = Ending.SIGNALED if self._code < 0 else Ending.EXITED
                return _End(ending, abs(self._code))
            if host in ready:
                return _End(Ending.CANCELLED)
            now = time.monotonic()
            if now - looked < tick_s:
                continue  # standard error woke us
            # At most two ticks: a stalled machine makes no command late.
            usage = self._tree.use(min(now - looked, 2 * tick_s))
            looked, tick_s = now, _TICK_S
            asleep_s += usage.asleep_s
            self._peak_bytes = max(self._peak_bytes, usage.memory_bytes)
            if usage.cpu_s + self._reaped_s > spec.cpu_s:
                return _End(Ending.CPU)
            if usage.memory_bytes > spec.memory_bytes:
                return _End(Ending.SIGNALED, signal.SIGKILL)
            if asleep_s > spec.sleep_s or now - started > longest_s:
                return _End(Ending.WALL)

    def _reap(self) -> None:
        """Collect the processes that ended: the first one, and orphans."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._count(pid, status, usage.ru_utime + usage.ru_stime)
            if pid == self._leader and self._spec.profile == Profile.PROGRAM:
                self._peak_bytes = max(self._peak_bytes, usage.ru_maxrss * 1024)

    def _count(self, pid: int, status: int, cpu_s: float) -> None:
        self._reaped_s += cpu_s
        if pid == self._leader:
            self._code = os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """End all processes of the cell but this one, and wait for them."""
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                return
            self._count(pid, status, usage.ru_utime + usage.ru_stime)

    def _drain(self) -> bool:
        """Read the available text of standard error; False at its end."""
        while True:
            try:
                piece = os.read(self._errors, _PIECE)
            except BlockingIOError:
                return True
            if not piece:
                return False
            room = STDERR_BYTES - len(self._head)
            self._head += piece[:room]
            self._tail = (self._tail + piece[max(room, 0) :])[-STDERR_BYTES:]

    def _write_errors(self) -> None:
        os.close(self._errors)
        os.pwrite(self._descriptors[STDERR], self._head + self._tail, 0)


def _return_product(name: str, target: int) -> None:
    """Copy a file of the working directory, or pack a directory; nothing if it is not there."""
    with open(target, "wb", closefd=False) as file:
        if not name.endswith("/"):
            _copy(name, None, file)
            return
        with zipfile.ZipFile(file, "w") as archive:
            for folder, _, names, descriptor in os.fwalk(name):
                for each in sorted(names):
                    inside = os.path.relpath(os.path.join(folder, each), name)
                    with archive.open(zipfile.ZipInfo(inside), "w") as member:
                        _copy(each, descriptor, member)


def _copy(name: str, folder: int | None, target: IO[bytes]) -> None:
    """Copy a regular file; links and devices are left out, whatever they refer to."""
    try:
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return
    try:
        if stat.S_ISREG(os.fstat(source).st_mode):
            while piece := os.read(source, _PIECE):
                target.write(piece)
    finally:
        os.close(source)
