import errno
import itertools
import signal
import struct

import pytest
from sandbox_support import outcome_of, values
from tables import table

from async_rl.sandbox import seccomp
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import NAMESPACES, Profile

KILL, ALLOW = 0x80000000, 0x7FFF0000
DENY, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
X86_64, I386 = 0xC000003E, 0x40000003
HIGHEST = 520
PASSED_BY_THE_KERNEL = {335, 336}
"""uretprobe and uprobe: newer kernels let them past any filter and send SIGILL to whoever is not a
probed function.
"""


def simulate(program: bytes, number: int, arch: int = X86_64, args: tuple[int, ...] = ()) -> int:
    """The answer of the kernel's interpreter, for the instructions that the generator emits."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(args + (0,) * 6)[:6])
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    while True:
        op, jt, jf, k = code[at]
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("=I", data, k)[0]
        elif op == 0x54:
            accumulator &= k
        elif op == 0x15:
            at += jt if accumulator == k else jf
        elif op == 0x35:
            at += jt if accumulator >= k else jf
        else:
            assert op == 0x06
            return k


@pytest.fixture(scope="module")
def program() -> bytes:
    return seccomp.build_filter()


def test_every_number_gets_what_the_table_says(program: bytes) -> None:
    special = {number for number, _ in seccomp.conditional(seccomp.PYTHON).values()} | {435}
    allowed = set(seccomp.allowed(seccomp.PYTHON).values())
    assert not special & allowed
    for number in range(2000):
        if number not in special:
            assert simulate(program, number) == (ALLOW if number in allowed else DENY), number
    assert simulate(program, 435) == ENOSYS
    for arch in (I386, 0):
        assert simulate(program, 39, arch) == KILL


def test_arguments_are_checked(program: bytes) -> None:
    for number, args, is_allowed in table(__file__, "arguments"):
        answer = simulate(program, number, args=tuple(args))
        assert answer == (ALLOW if is_allowed else DENY), (number, args)
    for number, codes, allowed in (
        (16, range(0x5400, 0x5460), [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]),
        (72, itertools.chain(range(64), range(1024, 1050)), [0, 1, 2, 3, 4, 1030]),
    ):
        found = [code for code in codes if simulate(program, number, args=(0, code)) == ALLOW]
        assert found == allowed


@pytest.mark.parametrize("profile", Profile)
def test_no_command_sends_sigkill(profile: Profile) -> None:
    """A command that SIGKILL ends was killed from outside, and is not to blame."""
    own = 4321
    program = seccomp.filter_of_process(seccomp.build_filter(seccomp.KINDS[profile]), own, 7)
    is_tool = profile == Profile.TOOLS
    for number in range(1, 65):
        allowed = DENY if number == 9 else ALLOW
        assert simulate(program, 234, args=(own, own, number)) == allowed
        assert simulate(program, 62, args=(own, number)) == (allowed if is_tool else DENY)
        # The kernel sends this signal to the parent of the new process when it exits.
        starts = ALLOW if is_tool and number in (1, 16, 17) else DENY
        assert simulate(program, 56, args=(number,)) == starts


@pytest.mark.parametrize("profile", Profile)
def test_only_the_call_with_the_secret_starts_a_program(profile: Profile) -> None:
    secret = 0x1234_5678_9ABC_DEF0
    program = seccomp.filter_of_process(seccomp.build_filter(seccomp.KINDS[profile]), 4321, secret)
    assert simulate(program, 322, args=(3, 0, 0, 0, 0x1000, secret)) == ALLOW
    for bit in range(64):
        wrong = (3, 0, 0, 0, 0x1000, secret ^ (1 << bit))
        assert simulate(program, 322, args=wrong) == DENY, bit
    is_tool = profile == Profile.TOOLS
    assert simulate(program, 59, args=(0, 0, 0)) == (ALLOW if is_tool else DENY)


def test_kernel_denies_every_number_outside_the_list() -> None:
    """Arguments of -1 make an allowed call harmless where one slips through, and its error is not
    EPERM for most.
    """
    allowed = set(seccomp.allowed(seccomp.PYTHON).values()) | {435} | PASSED_BY_THE_KERNEL
    denied = [n for n in range(HIGHEST) if n not in allowed]
    calls = [[denied, -1], [denied, 0], [[435], 0]]
    level, (*answers, clone3) = values(Cells.start(1), table(__file__, "probe"), *calls)
    if level != NAMESPACES:
        pytest.skip("this machine has no namespaces")
    for answer in answers:
        assert dict(zip(denied, answer, strict=True)) == dict.fromkeys(denied, errno.EPERM)
    assert clone3 == [errno.ENOSYS]


async def test_kernel_kills_other_entries() -> None:
    codes = {
        "mov eax, 20; int 0x80; ret": "b814000000cd80c3",
        "mov eax, 0x40000027 (x32 getpid); syscall; ret": "b8270000400f05c3",
    }

    async with await Cells.start(1) as cells:
        for name, code in codes.items():
            assert (
                await outcome_of(cells, table(__file__, "enter"), code)
            ).reply.code == signal.SIGSYS, name
