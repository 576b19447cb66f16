"""Linux calls that the jail needs and Python does not offer, through ctypes.

Each raises OSError on failure. The numbers are for x86-64 (`cells.IS_SUPPORTED`).
"""

import ctypes
import errno
import json
import os
import struct
from collections.abc import Callable, Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
_AT_EMPTY_PATH = 0x1000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
_PR_CAPBSET_DROP = 24
SIGKILL = 9

_CAPABILITY_VERSION_3 = 0x20080522

_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_REMOVE_DIR = 16
_REMOVE_FILE = 32
_MAKE_DIR = 128
_MAKE_REG = 256
_TRUNCATE = 1 << 14
_READ = _READ_FILE | _READ_DIR | _EXECUTE
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
_NETWORK_ABI = 4
_SCOPE_ABI = 6

# Not pathlib, which would add a third of a megabyte to each fork.
with open(os.path.join(os.path.dirname(__file__), "system_calls.json"), "rb") as _file:
    SYSTEM_CALLS = json.load(_file)
# PyDLL keeps the interpreter's lock: these processes have one thread, and a fork between the
# release and the return of the lock would leave it locked.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def prepare(call: str, *args: object) -> Callable[[], int]:
    """A system call whose arguments are converted now: integers to 64 bit, bytes and paths to
    pointers. call: its name, then what it is about, for the error.

    A child that makes the call then touches few pages, and each page costs it more than the call.
    """
    number = SYSTEM_CALLS["jail"][call.split()[0]]
    prepared: list[object] = [ctypes.c_long(number), *map(_converted, args)]
    # Some calls, such as prctl, require unused arguments to be 0.
    prepared += [ctypes.c_ulong(0)] * (7 - len(prepared))
    make_call = _libc.syscall

    return lambda: _checked(call, make_call(*prepared))


def _checked(call: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
    return result


def syscall(call: str, *args: object) -> int:
    """Make a system call."""
    return prepare(call, *args)()


def _converted(argument: object) -> object:
    if isinstance(argument, int):
        return ctypes.c_ulong(argument)
    if isinstance(argument, str):
        argument = os.fsencode(argument)
    return ctypes.c_char_p(argument) if isinstance(argument, bytes) else argument


def fork() -> int:
    """fork(2) of a process with one thread; the interpreter's lock stays locked.

    os.fork also runs every at-fork hook (one of them seeds `random`) and touches 180 more pages:
    0.5 ms of CPU per child, a fifth of a program's cost. A process with one thread needs no hook,
    and an unseeded `random` is the same for each program.
    """
    return _checked("fork", _libc.fork())


def become_user(number: int) -> None:
    """Become the user and the only group with this number, for good."""
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def unshare(flags: int) -> None:
    """Leave the parent's namespaces that `flags` names."""
    syscall(f"unshare {flags:#x}", flags)


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """mount(2)."""
    syscall(f"mount {source} on {target}", source, target, kind, flags, data)


def unmount(target: str) -> None:
    """Detach a mount, even if it is in use."""
    syscall(f"umount2 {target}", target, MNT_DETACH)


def prctl(option: int, value: int = 0) -> None:
    """prctl(2) with one argument."""
    syscall(f"prctl {option}", option, value)


def prepare_confinement(ruleset: int) -> list[Callable[[], int]]:
    """Empty the permitted, effective and inheritable sets of capabilities, then restrict the paths
    by a Landlock ruleset. ruleset: of `create_ruleset`.
    """
    steps = [prepare("capset", struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))]
    if ruleset >= 0:
        steps.append(prepare("landlock_restrict_self", ruleset))
    return steps


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def prepare_seccomp(program: bytes) -> Callable[[], int]:
    """Filter every system call of the calling thread by a BPF program, irrevocably.

    program: 8 bytes per instruction.
    """
    head = ctypes.byref(_Filter(len(program) // 8, program))
    return prepare("prctl seccomp", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head)


def drop_capability_bounds() -> None:
    """Empty the bounding set: no later execve of this process or a child gains a capability."""
    for capability in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:  # the first number that this kernel does not know
                return
            raise


def prepare_execveat(
    executable: int, arguments: Sequence[str], environment: Sequence[str], secret: int
) -> Callable[[], int]:
    """Become the program behind a descriptor. secret: for a filter; the kernel ignores it."""
    texts = [
        (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts))
        for texts in (arguments, environment)
    ]
    return prepare("execveat", executable, b"", *texts, _AT_EMPTY_PATH, secret)


def die_with(host: int) -> None:
    """Die with the host process, or now if it has exited."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != host:
        os._exit(0)


def create_ruleset(
    readable: Sequence[str], writable: Sequence[str], runnable: Sequence[str] | None = None
) -> int:
    """Descriptor of a Landlock ruleset; -1 if the kernel has no Landlock.

    Create it after the last mount: a rule on a directory that a later mount hides does not apply.
    runnable: the only paths whose files can be executed; None for all readable and writable ones.
    Paths that do not exist are left out.
    """
    try:
        abi = syscall("landlock_create_ruleset version", None, 0, 1)
    except OSError:
        return -1
    handled = (1 << _ACCESS_BITS.get(abi, 16)) - 1
    # Older kernels refuse fields that they do not know, so the last known field is the last of the
    # structure.
    fields = [handled]
    if abi >= _NETWORK_ABI:
        fields.append(3)  # bind and connect
    if abi >= _SCOPE_ABI:
        fields.append(3)  # abstract sockets and signals
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    write = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
    rules = [(readable, _READ), (writable, write)]
    if runnable is not None:
        rules = [(paths, access & ~_EXECUTE) for paths, access in rules]
        rules.append((runnable, _READ))
    for paths, access in rules:
        for path in filter(os.path.exists, paths):
            # The kernel refuses rights of directories for a file.
            kept = handled if os.path.isdir(path) else handled & _FILE_ONLY
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", access & kept, fd)
                syscall(f"landlock_add_rule {path}", ruleset, 1, rule, 0)
            finally:
                os.close(fd)
    return ruleset
