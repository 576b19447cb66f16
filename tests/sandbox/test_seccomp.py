from __future__ import annotations

import asyncio
import errno
import itertools
import json
import struct

import pytest

from async_rl.sandbox import seccomp
from async_rl.sandbox.cell import job
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import NAMESPACES, JobSpec, Mode, Profile, read_frames

KILL, DENY, ENOSYS, ALLOW = (
    0x80000000,
    0x00050000 | errno.EPERM,
    0x00050000 | errno.ENOSYS,
    0x7FFF0000,
)
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


def test_other_entries_into_the_kernel_kill(program: bytes) -> None:
    for number in range(600):
        assert simulate(program, number, I386) == KILL
        assert simulate(program, number, 0) == KILL
        assert simulate(program, number | 0x40000000) == KILL
    assert simulate(program, 0xFFFFFFFF) == KILL


def test_clone_makes_threads_only(program: bytes) -> None:
    assert simulate(program, 56, args=(0x3D0F00,)) == ALLOW
    assert simulate(program, 56, args=(0x7D0F00,)) == ALLOW
    for flags in (
        0,
        17,
        0x4111,
        0x3D0F00 | 0x10000000,
        0x3D0F00 | 0x02000000,
        0x3D0F00 & ~0x10000,
        0x01200011,
        0x3D0F00 | 0x2000,
    ):
        assert simulate(program, 56, args=(flags,)) == DENY, hex(flags)


def test_arguments_are_checked(program: bytes) -> None:
    assert simulate(program, 53, args=(1, 1)) == ALLOW
    assert simulate(program, 53, args=(1, 1 | 0o4000 | 0o2000000)) == ALLOW
    for domain, kind in ((2, 1), (1, 2), (1, 5), (16, 3), (40, 1)):
        assert simulate(program, 53, args=(domain, kind)) == DENY
    assert {c for c in range(0x5400, 0x5460) if simulate(program, 16, args=(0, c)) == ALLOW} == {
        0x5401,
        0x5413,
        0x541B,
        0x5421,
        0x5450,
        0x5451,
    }
    assert [
        c
        for c in itertools.chain(range(64), range(1024, 1050))
        if simulate(program, 72, args=(0, c)) == ALLOW
    ] == [0, 1, 2, 3, 4, 1030]
    assert simulate(program, 302, args=(0, 7, 0, 4096)) == ALLOW
    assert simulate(program, 302, args=(0, 7, 4096, 0)) == DENY
    assert simulate(program, 302, args=(0, 7, 1 << 32, 0)) == DENY
    assert simulate(program, 302, args=(1, 7, 0, 4096)) == DENY


@pytest.mark.parametrize("profile", Profile)
def test_no_command_sends_sigkill(profile: Profile) -> None:
    """A command that SIGKILL ends was killed from outside, and is not to blame."""
    own = 4321
    program = seccomp.filter_of_process(seccomp.build_filter(seccomp.KINDS[profile]), own, 7)
    for signal in range(1, 65):
        allowed = DENY if signal == 9 else ALLOW
        assert simulate(program, 234, args=(own, own, signal)) == allowed
        is_tool = profile == Profile.TOOLS
        assert simulate(program, 62, args=(own, signal)) == (allowed if is_tool else DENY)
        # The kernel sends this signal to the parent of the new process when it exits.
        assert simulate(program, 56, args=(signal,)) == (
            ALLOW if is_tool and signal in (1, 16, 17) else DENY
        )


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


PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def f(numbers, first):
    out = []
    for n in numbers:
        ctypes.set_errno(0)
        r = libc.syscall(ctypes.c_long(n), ctypes.c_long(first), *[ctypes.c_long(-1)] * 5)
        out.append(ctypes.get_errno() if r == -1 else 0)
    return out
"""


def test_kernel_denies_every_number_outside_the_list() -> None:
    """Arguments of -1 make an allowed call harmless where one slips through, and its error is not
    EPERM for most.
    """
    denied = [
        n
        for n in range(HIGHEST)
        if n not in set(seccomp.allowed(seccomp.PYTHON).values()) | {435} | PASSED_BY_THE_KERNEL
    ]
    request = JobSpec(Mode.CALLS, 1, cpu_s=5, memory_bytes=256 << 20, output_bytes=1 << 16)

    async def run() -> list[bytes]:
        async with await Cells.start(1, best_level=NAMESPACES) as cells:
            bodies = []
            for first in (-1, 0):
                outcome = await cells.run(
                    job(request, (PROBE, [("f", [denied, first])], False, False))
                )
                bodies.append(read_frames(outcome.contents[0], 1).frames[-1].body)
            outcome = await cells.run(job(request, (PROBE, [("f", [[435], 0])], False, False)))
            bodies.append(read_frames(outcome.contents[0], 1).frames[-1].body)
            return bodies

    *answers, clone3 = map(json.loads, asyncio.run(run()))
    for answer in answers:
        assert dict(zip(denied, answer, strict=True)) == dict.fromkeys(denied, errno.EPERM)
    assert clone3 == [errno.ENOSYS]


@pytest.mark.parametrize(
    "code",
    [
        "b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3'",  # mov eax, 20; int 0x80; ret
        # mov eax, 0x40000027 (x32 getpid); syscall; ret
        "b'\\xb8\\x27\\x00\\x00\\x40\\x0f\\x05\\xc3'",
    ],
    ids=["int 0x80", "x32"],
)
def test_kernel_kills_other_entries(code: str) -> None:
    source = f"""
import ctypes, mmap
def f():
    code = {code}
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
    request = JobSpec(Mode.CALLS, 1, cpu_s=5, memory_bytes=256 << 20, output_bytes=1 << 16)

    async def run() -> int:
        async with await Cells.start(1) as cells:
            outcome = await cells.run(job(request, (source, [("f", [])], False, False)))
            return outcome.reply.code

    assert asyncio.run(run()) == 31  # SIGSYS
