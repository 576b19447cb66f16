"""Runs commands in a cell: compilers, and programs of other languages than Python.

The cell is the first process of its namespaces: every orphan becomes its child, and one signal ends
all other processes. Invariants: a command starts in an empty working directory and with no other
process in the cell; nothing of it is left when its reply is sent.
"""

import contextlib
import json
import os
import resource
import select
import signal
import stat
import time
from collections.abc import Sequence

from . import child, linux, namespaces, seccomp
from .protocol import (
    FIRST_FILE,
    PRODUCT,
    SLEEP_S,
    STDERR,
    STDERR_BYTES,
    CommandSpec,
    Ending,
    Reply,
)
from .watch import Budget, ProcessTree

# Most programs exit before the first look, which lists the processes of the whole host.
_FIRST_TICK_S = 0.01
_TICK_S = 0.03
# A command whose processes hide their CPU time is stopped after this many times its limits and
# these seconds more.
_PATIENCE = 4
_PATIENCE_S = 10.0
# The size of a pipe.
_PIECE = 1 << 16


class Commands:
    """The commands of one cell, one at a time."""

    def __init__(self, proc: int) -> None:
        linux.drop_capability_bounds()
        # The first process of a namespace gets only the signals that it handles: a command must not
        # reach Python's handler.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._proc = proc
        self._page = child.Page()
        self._filters = {
            int(profile): seccomp.build_filter(kinds) for profile, kinds in seccomp.KINDS.items()
        }

    def run(self, spec: bytes, descriptors: list[int], host: int) -> Reply:
        """Run one command and leave nothing of it."""
        command = _Command(CommandSpec(*json.loads(spec)), descriptors, self._page, self._proc)
        try:
            return command.run(self._filters, host)
        finally:
            command.end()
            for descriptor in descriptors[STDERR:]:
                os.close(descriptor)


class _Command(child.Children):
    """One command from its start until nothing of it is left."""

    def __init__(
        self, spec: CommandSpec, descriptors: Sequence[int], page: child.Page, proc: int
    ) -> None:
        super().__init__(page)
        self._spec = spec
        self._descriptors = descriptors
        self._proc = proc
        self._errors = bytearray()

    def run(self, filters: dict[int, bytes], host: int) -> Reply:
        """Start the command, watch it, end all its processes, and return its product."""
        spec = self._spec
        namespaces.renew_scratch(spec.scratch_bytes)
        first = FIRST_FILE + (not spec.executable)
        for name, source in zip(spec.files, self._descriptors[first:], strict=True):
            with open(name, "xb") as file:
                file.write(os.pread(source, os.fstat(source).st_size, 0))
        errors, errors_in = os.pipe()
        os.set_blocking(errors, False)
        calls = filters[spec.profile]
        limits = _limits(spec)
        process = self.fork(self._become, limits, calls, errors_in)
        # A forgotten end of a pipe would hide from a peer that the program has closed its own.
        for descriptor in (errors_in, *self._descriptors[:STDERR]):
            os.close(descriptor)
        try:
            ending = self._watch(process, host, errors)
            # Before the last read: a process that lives on could still write.
            self.end()
            self._drain(errors)
        finally:
            os.close(process)
            os.close(errors)
        os.pwrite(self._descriptors[STDERR], self._errors, 0)
        if ending == Ending.EXITED and spec.product:
            _return_product(spec.product, self._descriptors[PRODUCT])
        return self.reply(ending)

    def _become(self, limits: child.Limits, calls: bytes, errors: int) -> None:
        """In the child: lock down and execute the command.

        calls: the filter of system calls; errors: write end of a pipe.
        """
        spec = self._spec
        stdin, stdout, *_ = self._descriptors
        # Python ignores these two signals, and an ignored signal stays ignored after an execve.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if spec.executable:
            executable = os.open(spec.executable, os.O_PATH | os.O_CLOEXEC)
        else:
            executable = self._descriptors[FIRST_FILE]
            os.set_inheritable(executable, False)
        readable = [*spec.readable, *spec.runnable, "/dev/urandom"]
        ruleset = linux.create_ruleset(readable, namespaces.WRITABLE, spec.runnable)
        confine = linux.prepare_confinement(ruleset)
        for target, source in enumerate((stdin, stdout, errors)):
            os.dup2(source, target)
        secret = int.from_bytes(os.urandom(8), "little")
        become = linux.prepare_execveat(executable, spec.arguments, spec.environment, secret)
        seal = linux.prepare_seccomp(seccomp.filter_of_process(calls, os.getpid(), secret))
        child.lock_down(confine, [executable], limits, [seal])
        become()

    def _watch(self, process: int, host: int, errors: int) -> Ending:
        """Wait until the first process exits, or all together exceed a limit."""
        spec = self._spec
        tick_s = _FIRST_TICK_S
        poller = select.poll()
        # Standard error is read all the time: a program must not wait for room in the pipe.
        for descriptor in (process, host, errors):
            poller.register(descriptor, select.POLLIN)
        patience_s = _PATIENCE * (2 * spec.cpu_s + SLEEP_S) + _PATIENCE_S
        tree = ProcessTree(self._proc)
        budget = Budget(spec, self._proc, tree.use_of_all, patience_s)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(tick_s * 1000)}
            if errors in ready and not self._drain(errors):
                poller.unregister(errors)
            # Orphans too: what they used counts, and a zombie would count as a task.
            while self.collect(os.WNOHANG):
                pass
            if self.code is not None:
                return Ending.EXITED
            if host in ready:
                return Ending.CANCELLED
            if time.monotonic() - budget.looked < tick_s:
                continue  # standard error woke us
            ending = budget.exceeded(tick_s, self.cpu_s)
            tick_s = _TICK_S
            self.peak_bytes = max(self.peak_bytes, budget.memory_bytes)
            if budget.memory_bytes > spec.memory_bytes:
                # As if the kernel had killed it.
                return Ending.SIGNALED
            if ending is not None:
                return ending

    def end(self) -> None:
        """End all processes of the cell except this one, and wait for them."""
        is_left = True
        while is_left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            is_left = self.collect()

    def _drain(self, errors: int) -> bool:
        """Read the available text of standard error; False at its end."""
        while True:
            try:
                piece = os.read(errors, _PIECE)
            except BlockingIOError:
                return True
            if not piece:
                return False
            self._errors += piece[: STDERR_BYTES - len(self._errors)]


def _limits(spec: CommandSpec) -> child.Limits:
    # Pages that cannot be swapped, and queues that no process holds.
    memory = ((resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0))
    limits = child.limits_of(spec.cpu_s, spec.file_bytes, (*memory, *spec.process_limits))
    # Raise the stack to its hard limit, as contests do: the main stack may then use all memory that
    # the limit on address space allows. Without a limit glibc gives each thread only 2 MB.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    return [*limits, (resource.RLIMIT_STACK, (hard, hard))]


def _return_product(name: str, target: int) -> None:
    """Copy a regular file of the working directory; nothing for a link, a device or a directory,
    whatever it refers to.
    """
    try:
        # The program may have made the file a link, which could lead outside the directory, or a
        # named pipe, whose opening would wait for a writer.
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if stat.S_ISREG(os.fstat(source).st_mode):
            while piece := os.read(source, _PIECE):
                os.write(target, piece)
    finally:
        os.close(source)
