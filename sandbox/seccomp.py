"""The allow-list of system calls for a program (`system_calls.json`), and the BPF code generated
from it.

Invariants
- Anything but x86-64's own entry (int 0x80, x32) kills the process; a number not listed answers
  EPERM (clone3: ENOSYS, so that glibc falls back to clone).
- A program is one process: no fork, vfork or exec, no signals to processes, no sockets except a
  connected local pair, no ptrace, no mount, no namespaces, no limits raised. Threads are allowed.
- Commands (native programs, runtimes of other languages, and tools that start other programs) may
  make more calls, but neither list has network, ptrace, mount, namespaces, memfd or io_uring;
  shared anonymous memory is refused, because no limit on a process counts it; a PROGRAM can signal
  only itself, and start nothing: its one execveat has a random number as sixth argument, which the
  kernel ignores, which the filter requires, and which is gone with the memory of the caller; none
  sends SIGKILL, so that a command that SIGKILL ends was killed from outside.
- The jumps come from one recursive generator over the number line, because one wrong jump in a
  hand-written program allowed everything. `tests/sandbox/test_seccomp.py` runs the code in a
  simulator for every number and tries each denied number in the kernel.
"""

import errno
import struct
from collections.abc import Iterable, Sequence

from .linux import SYSTEM_CALLS
from .protocol import Profile

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
RET_KILL_PROCESS = 0x80000000
RET_ERRNO = 0x00050000
RET_ALLOW = 0x7FFF0000

_LOAD = 0x20
_JEQ = 0x15
_JGE = 0x35
_AND = 0x54
_RET = 0x06
_NR_OFFSET = 0
_ARCH_OFFSET = 4

Condition = tuple[int, int, int]
"""(byte offset in seccomp_data, mask, value): the masked 32-bit word must equal value; must differ
from it if the value is given as ~value.
"""


def allowed(kinds: Iterable[str]) -> dict[str, int]:
    """The system calls that programs of all these kinds may make, by name."""
    groups = [group for kind in kinds for group in SYSTEM_CALLS[kind].values()]
    return {name: number for group in groups for name, number in group.items()}


PYTHON = ("all", "python")
"""The kinds of system calls of programs in Python."""
KINDS = {Profile.PROGRAM: ("all", "commands"), Profile.TOOLS: ("all", "commands", "tools")}
"""The kinds of system calls of commands. Apply `filter_of_process` to their filters before use."""
Conditional = tuple[int, list[list[Condition]]]
"""The number of a system call, which is allowed if all conditions of one alternative are true."""
# The number of the process, which is known only after the fork, and the secret of its execveat.
_PLACEHOLDERS = {"OWN_PID": 0x7F3A91C5, "SECRET_LOW": 0x7F3A91C6, "SECRET_HIGH": 0x7F3A91C7}
_WHOLE_WORD = 0xFFFFFFFF


def _condition(text: str) -> Condition:
    """Read `word argument [& mask] == value`.

    low, high: of the argument. The kernel ignores the high word of int arguments and of clone's
    flags.
    """
    word, argument, *mask, comparison, written = text.split()
    offset = 16 + 8 * int(argument) + (4 if word == "high" else 0)
    value = _PLACEHOLDERS[written] if written in _PLACEHOLDERS else int(written, 0)
    return offset, int(mask[1], 0) if mask else _WHOLE_WORD, value if comparison == "==" else ~value


def conditional(kinds: Iterable[str]) -> dict[str, Conditional]:
    """The system calls that programs of these kinds may make with some arguments; the last kind
    decides.

    All: clone only for threads; ioctl TCGETS, FIONBIO, FIONREAD, TIOCGWINSZ, FIONCLEX, FIOCLEX;
    fcntl without owners, signals and leases; prlimit64 only to read the process's own limits.
    Commands: mmap without shared anonymous memory; prctl for names; threads as Go makes them;
    signals to the process itself, but no SIGKILL. Tools: processes that end with SIGCHLD or no
    signal, in the same namespaces; locks of files; the pair of sequenced packets with which rustc
    starts its linker.
    """
    calls: dict[str, Conditional] = {}
    for kind in kinds:
        for name, (number, *alternatives) in SYSTEM_CALLS["conditional"][kind].items():
            calls[name] = number, [[*map(_condition, each)] for each in alternatives]
    return calls


_CLONE3 = 435


def _ins(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jt, jf, k)


def _leaf(alternatives: list[list[Condition]]) -> list[bytes]:
    code: list[bytes] = []
    for conditions in alternatives:
        for position, (offset, mask, value) in enumerate(conditions):
            rest = 3 * (len(conditions) - position - 1) + 1
            jumps = (0, rest) if value >= 0 else (rest, 0)
            code += [_ins(_LOAD, offset), _ins(_AND, mask), _ins(_JEQ, max(value, ~value), *jumps)]
        code.append(_ins(_RET, RET_ALLOW))
    return [*code, _ins(_RET, RET_ERRNO | errno.EPERM)]


def _tree(ranges: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Binary search for the leaf of the last range that starts at or below the number.

    The number is in the accumulator.
    """
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    # Equal leaves are repeated. Sharing them would save a third of the instructions, but only 10 us
    # of the 100 us that the kernel takes to accept a filter.
    below = _tree(ranges[:middle])
    above = _tree(ranges[middle:])
    # A jump over more than 255 instructions does not fit its field, and struct refuses it.
    return [_ins(_JGE, ranges[middle][0], len(below)), *below, *above]


def build_filter(kinds: Sequence[str] = PYTHON) -> bytes:
    """The program, 8 bytes per instruction."""
    allow = [_ins(_RET, RET_ALLOW)]
    deny = [_ins(_RET, RET_ERRNO | errno.EPERM)]
    leaves = dict.fromkeys(allowed(kinds).values(), allow)
    leaves |= {number: _leaf(each) for number, each in conditional(kinds).values()}
    # ENOSYS and not EPERM, so that glibc tries clone.
    leaves[_CLONE3] = [_ins(_RET, RET_ERRNO | errno.ENOSYS)]
    ranges: list[tuple[int, list[bytes]]] = []
    for number in range(max(leaves) + 2):
        leaf = leaves.get(number, deny)
        if not ranges or ranges[-1][1] is not leaf:
            ranges.append((number, leaf))
    ranges.append((X32_BIT, [_ins(_RET, RET_KILL_PROCESS)]))
    head = [
        _ins(_LOAD, _ARCH_OFFSET),
        _ins(_JEQ, AUDIT_ARCH_X86_64, 1, 0),
        _ins(_RET, RET_KILL_PROCESS),
        _ins(_LOAD, _NR_OFFSET),
    ]
    return b"".join(head + _tree(ranges))


def filter_of_process(program: bytes, pid: int, secret: int) -> bytes:
    """The filter of the process with this number. secret: 64 bits, the sixth argument of the only
    execveat that is allowed.
    """
    words = pid, secret & _WHOLE_WORD, secret >> 32
    for placeholder, word in zip(_PLACEHOLDERS.values(), words, strict=True):
        program = program.replace(struct.pack("=I", placeholder), struct.pack("=I", word))
    return program
