"""From a program and its limits to the command that runs it, and from how the command ended to a
verdict. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from async_rl.config.rewards import OUTPUT_KB, SandboxConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import Verdict
from async_rl.rewards.verifier.checks import Ruling
from async_rl.rewards.verifier.compiling import ENVIRONMENT, Program, printable
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.cell import CommandOutcome
from async_rl.sandbox.checker import ENDS
from async_rl.sandbox.protocol import CommandSpec, Ending, Kind, Profile

_MAX_TASKS = 64
_SCRATCH_BYTES = 16 << 20
_LARGE_SHARE = 0.9
_MESSAGE_CHARS = 300
_MIB = 1 << 20
_CHECKED = ("input", "output", "answer")


@frozen
class Limits:
    """The limits of one test; cpu_s does not include the start of the runtime."""

    cpu_s: float
    memory_mb: int
    output_bytes: int

    @classmethod
    def of(cls, request: VerifyRequest, config: SandboxConfig) -> Limits:
        """Return the limits of the request, or those of the configuration."""
        return cls(
            cpu_s=request.timeout_s or config.timeout_s,
            memory_mb=request.memory_mb or config.memory_mb,
            output_bytes=(request.output_kb or OUTPUT_KB) * 1024,
        )


@frozen
class Ran:
    """The result of one run of a program. verdict: pass if it ended without an error; the output
    is not compared yet.
    """

    verdict: Verdict
    output: bytes
    message: str
    cpu_s: float
    wall_s: float
    memory_mb: float


class RunFault(Exception):
    """The program never ran, or was ended from outside. It is not to blame."""


def command_spec(program: Program, limits: Limits) -> CommandSpec:
    """The command that runs the program once."""
    toolchain, run = program.toolchain, program.toolchain.row.run
    places = {**program.names, "memory_mb": str(limits.memory_mb)}
    (path,) = toolchain.fill([run.program])
    pairs = (text.split("=", 1) for text in toolchain.fill(run.environment))
    memory = (limits.memory_mb + run.extra_mb) * _MIB
    files = []
    if path:
        is_source = toolchain.row.compile is None
        files = toolchain.fill([toolchain.row.source], places) if is_source else ["program"]
    cpu_s = limits.cpu_s + run.startup_s
    return CommandSpec(
        profile=Profile.TOOLS if run.tools else Profile.PROGRAM,
        executable=path,
        arguments=[path or "solution", *toolchain.fill(run.arguments, places)],
        environment={**ENVIRONMENT, **dict(pairs)},
        files=files,
        product="",
        readable=toolchain.paths(run.reads),
        runnable=toolchain.runnable(run.runs) if path else [],
        cpu_s=cpu_s,
        sleep_s=cpu_s + 1,
        memory_bytes=memory,
        address_space_bytes=memory if run.limit == "address_space" else 0,
        data_bytes=memory + run.reserve_mb * _MIB if run.limit == "data" else 0,
        file_bytes=limits.output_bytes + 1,
        scratch_bytes=_SCRATCH_BYTES + 2 * len(program.content) if path else _SCRATCH_BYTES,
        max_tasks=_MAX_TASKS,
    )


def check_spec(program: Program, limits: Limits, form: str, files: Sequence[bytes]) -> CommandSpec:
    """The command that runs a checker. files: input, output and answer."""
    arguments = ["checker", *_CHECKED]
    if form == "kattis":
        arguments = ["checker", "input", "answer", "./"]
    return command_spec(program, limits)._replace(
        arguments=arguments,
        files=list(_CHECKED),
        product="judgemessage.txt",
        scratch_bytes=_SCRATCH_BYTES + 2 * sum(map(len, files)),
    )


def read_check(
    outcome: CommandOutcome, form: str, program: Program, spec: CommandSpec, limits: Limits
) -> Ruling:
    """The ruling of a checker by how it ended. Raises RunFault."""
    reply = outcome.reply
    kind = ENDS[form].get(reply.code) if reply.ending == Ending.EXITED else None
    if kind is Kind.PASSED:
        return Ruling(Verdict.PASS)
    if kind is Kind.FAILED:
        said = printable(outcome.product or outcome.errors, _MESSAGE_CHARS)
        return Ruling(Verdict.WRONG_ANSWER, said or "the checker rejects the output")
    message = read_run(outcome, program, spec, limits).message
    message = message or f"it ended with status {reply.code}"
    return Ruling(Verdict.TEST_ERROR, f"the checker failed: {message}")


def read_run(outcome: CommandOutcome, program: Program, spec: CommandSpec, limits: Limits) -> Ran:
    """The verdict of a run by how it ended. Raises RunFault."""
    reply = outcome.reply
    verdict, message = _ending(outcome, program, spec, limits)
    output = outcome.output[: limits.output_bytes]
    return Ran(
        verdict=verdict, output=output, message=message, cpu_s=reply.cpu_s, wall_s=reply.wall_s,
        memory_mb=reply.peak_bytes / _MIB,
    )  # fmt: skip


def _ending(
    outcome: CommandOutcome, program: Program, spec: CommandSpec, limits: Limits
) -> tuple[Verdict, str]:
    reply, errors = outcome.reply, outcome.errors
    is_large = reply.peak_bytes > _LARGE_SHARE * spec.memory_bytes
    if reply.ending in (Ending.FAULT, Ending.CANCELLED):
        raise RunFault(reply.fault.decode(errors="replace") or "the command was cancelled")
    if len(outcome.output) > limits.output_bytes:
        return Verdict.OUTPUT_LIMIT, f"printed more than {limits.output_bytes // 1024} KB"
    if reply.ending == Ending.CPU:
        return Verdict.TIMEOUT, f"used more than {spec.cpu_s:g} s of CPU time"
    if reply.ending == Ending.WALL:
        return Verdict.TIMEOUT, f"slept for {spec.sleep_s:g} s"
    if reply.ending == Ending.EXITED and reply.code == 0:
        return Verdict.PASS, ""
    marks = program.toolchain.row.run.memory_marks
    if is_large or any(mark.encode() in errors for mark in marks):
        return Verdict.MEMORY, "out of memory"
    said = printable(errors[-_MESSAGE_CHARS:], _MESSAGE_CHARS)
    if reply.ending == Ending.EXITED:
        return Verdict.RUNTIME_ERROR, f"exited with status {reply.code}: {said}".rstrip(": ")
    if reply.code == signal.SIGKILL and reply.cpu_s < spec.cpu_s:
        raise RunFault("the program was killed from outside")
    if reply.code == signal.SIGXFSZ:
        return Verdict.OUTPUT_LIMIT, "wrote too much"
    if reply.code in (signal.SIGXCPU, signal.SIGKILL):
        return Verdict.TIMEOUT, f"used {reply.cpu_s:.1f} s of CPU time"
    try:
        name = signal.Signals(reply.code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {reply.code}"
    return Verdict.RUNTIME_ERROR, f"ended by {name}: {said}".rstrip(": ")
