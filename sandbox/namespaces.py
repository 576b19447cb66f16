"""Level 1: a private root file system and every namespace of the kernel.

Runs in a fresh, single-threaded process, before pid 1 of the cell. Invariants: a program sees
nothing of the host except /usr, the directories of the interpreter and of packages, and five device
nodes, all read-only; only /dev/null and /tmp, to which /dev/shm is a link, can be written. The cell
never has host uid 0: cells of a root server run as `CELL_UID`, the cells of an ordinary user as
that user.
"""

import contextlib
import os
import struct
from collections.abc import Sequence

from . import linux
from .protocol import CELL_UID

SCRATCH = "/tmp"
# What is written there reaches nobody, and programs rely on it.
NOTHING_KEPT = "/dev/null"
WRITABLE = (SCRATCH, NOTHING_KEPT)
# A file system in memory, so all cells together may take this much each.
SCRATCH_BYTES = 16 << 20
# One file per this many bytes of a scratch.
_INODE_BYTES = 1 << 16
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32")
_BUILD = "/mnt" if os.path.isdir("/mnt") else "/tmp"


def become_first_process(readable: Sequence[str], host: int, descriptor: int) -> None:
    """Enter the namespaces and return as their first process, without a scratch.

    The process that entered waits for it outside, and both end with the host process. descriptor:
    of the host's socket, which only the first process keeps. Raises OSError if the kernel or a
    policy refuses.
    """
    # Now: the new root has no /proc.
    process_directory = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    namespaces = (
        linux.CLONE_NEWNS
        | linux.CLONE_NEWPID
        | linux.CLONE_NEWNET
        | linux.CLONE_NEWIPC
        | linux.CLONE_NEWUTS
        | linux.CLONE_NEWCGROUP
    )
    is_root = os.geteuid() == 0
    if is_root:
        linux.unshare(linux.CLONE_NEWNS)
        _build_root(readable)
        # While it still has the right to change groups and users.
        linux.become_user(CELL_UID)
        # A change of user makes /proc/self root's, and the maps of ids are written there.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
    uid = os.geteuid()
    gid = os.getegid()
    linux.unshare(linux.CLONE_NEWUSER | namespaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        fd = os.open(name, os.O_WRONLY, dir_fd=process_directory)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    if not is_root:
        _build_root(readable)
    os.close(process_directory)
    linux.die_with(host)
    # The first process of the new namespaces.
    inner = os.fork()
    if inner:
        os.close(descriptor)
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)


def renew_scratch(size_bytes: int = SCRATCH_BYTES) -> None:
    """Mount an empty file system of this size as scratch, in place of the previous one, and make it
    the working directory.
    """
    with contextlib.suppress(OSError):  # there is none yet
        linux.unmount(SCRATCH)
    linux.mount(
        "scratch",
        SCRATCH,
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC,
        f"size={size_bytes},nr_inodes={size_bytes // _INODE_BYTES},mode=0777",
    )
    os.chdir(SCRATCH)


def scratch_is_clean() -> bool:
    """True if the scratch has no file: the root directory uses one inode."""
    state = os.statvfs(SCRATCH)
    return state.f_files - state.f_ffree <= 1


def _build_root(readable: Sequence[str]) -> None:
    # Otherwise the host would see the mounts of the cell.
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("root", _BUILD, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=0755")
    for path in (*SYSTEM, *readable):
        _show(path)
    for device in filter(os.path.exists, DEVICES):
        _bind(device)
    os.makedirs(f"{_BUILD}{SCRATCH}", exist_ok=True)
    # For the locks of multiprocessing, which its pools of threads use.
    os.symlink(SCRATCH, f"{_BUILD}/dev/shm")
    os.makedirs(f"{_BUILD}/.old")
    os.chdir(_BUILD)
    # Not chroot: a process with descriptors of the old root could leave it.
    linux.syscall("pivot_root", b".", b".old")
    os.chdir("/")
    linux.unmount("/.old")
    os.rmdir("/.old")
    # Last: the directories above had to be made.
    flags = struct.pack("QQQQ", linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID, 0, 0, 0)
    everywhere = linux.AT_FDCWD, b"/", linux.AT_RECURSIVE
    linux.syscall("mount_setattr /", *everywhere, flags, len(flags))


def _show(path: str) -> None:
    """Bind `path` at the same path in the new root; a link is copied as a link."""
    target = f"{_BUILD}{path}"
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(os.readlink(path), target)
    elif os.path.exists(path) and not os.path.ismount(target):
        _bind(path)


def _bind(path: str) -> None:
    target = f"{_BUILD}{path}"
    is_folder = os.path.isdir(path)
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        with open(target, "ab"):
            pass
    linux.mount(path, target, None, linux.MS_BIND | (linux.MS_REC if is_folder else 0))
