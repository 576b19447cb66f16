"""From the output of a child or a command to rulings. Pure.

A child that runs Python writes frames, which are the program's claims; the ending is the zygote's
observation. A claim can only choose among failures or offer a value. The frames become one answer
per call or stream: a value, an output, or a failing verdict.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from async_rl.core.types import Verdict
from async_rl.rewards.verifier.protocol import TestResult
from async_rl.sandbox.cell import CommandOutcome, Outcome
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import (
    CHECKER_ACCEPTS,
    CommandSpec,
    Ending,
    Frame,
    JobSpec,
    Kind,
    Mode,
    Reply,
)

# A child that was killed with this share of its memory limit in use counts as out of memory: the
# kernel kills before the last page fits.
_LARGE_SHARE = 0.9
# A message goes into logs and samples; the rest of a long one rarely helps.
_MESSAGE_CHARS = 300
_UNPRINTABLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")
MIB = 1 << 20


class Ruling(NamedTuple):
    """pass, or the verdict and its reason."""

    verdict: Verdict = Verdict.PASS
    message: str = ""


def rejected(reason: str) -> Ruling:
    """The ruling of a checker that rejects an output or fails on it."""
    return Ruling(Verdict.WRONG_ANSWER, reason[:_MESSAGE_CHARS] or "the checker rejects the output")


class ChildFault(Exception):
    """The program never ran, or was killed from outside. The program is not to blame."""


class Answer(NamedTuple):
    """The result of one run.

    value: the bytes that a call returned or a stream printed; None if the run was judged or failed.
    """

    value: bytes | None
    ruling: Ruling = Ruling()
    cpu_s: float = 0.0


class Answers(NamedTuple):
    """Answers of the first runs.

    is_slow: the next run needs a separate child, because the runs together exceeded a limit.
    """

    answers: list[Answer]
    is_slow: bool = False


def read_job(outcome: Outcome, spec: JobSpec) -> Answers:
    """One answer per run that was reached. Raises ChildFault."""
    reply, (frames, is_malformed) = outcome.reply, outcome.frames
    if reply.ending == Ending.FAULT:
        raise ChildFault(f"the child could not be locked down: {reply.fault}")
    if frames and frames[0].kind is not Kind.LOADED:
        return Answers([_failed(frames[0])] * spec.num_runs)
    answers = [_answer(frame, outcome, spec) for frame in frames[1 : spec.num_runs + 1]]
    num_missing = spec.num_runs - len(answers)
    # Before the ending: after the last answer it does not matter how the child exited.
    if num_missing == 0:
        return Answers(answers)
    if is_malformed:
        broken = Answer(None, Ruling(Verdict.WRONG_ANSWER, "the answer is malformed"))
        return Answers(answers + [broken] * num_missing)
    end = _end(outcome, spec)
    is_late = reply.ending in (Ending.CPU, Ending.WALL)
    # The time that was left for this run depends on the runs before it.
    is_early = reply.ending == Ending.CPU and reply.cpu_s < spec.cpu_s
    if is_late and spec.num_tests > 1 and (answers or is_early):
        return Answers(answers, is_slow=True)
    # The code itself did not finish, so no run can.
    if not frames:
        return Answers([end] * spec.num_runs)
    if spec.mode == Mode.STREAMS:
        # The child exited during a run, without a frame: os._exit(0) after printing is a pass.
        has_left = reply.ending == Ending.EXITED and reply.code == 0
        end = _printed(outcome, spec, len(answers), is_done=has_left) or end
    return Answers([*answers, end])


def _answer(frame: Frame, outcome: Outcome, spec: JobSpec) -> Answer:
    """The answer of a frame. Only a judging child may decide: any program can write any frame."""
    kind = frame.kind
    if spec.mode == Mode.STREAMS:
        is_done = kind is Kind.DONE or (kind is Kind.EXIT and frame.body == b"0")
        answer = _printed(outcome, spec, frame.run, is_done=is_done) or _failed(frame)
    elif spec.mode != Mode.CALLS:
        answer = Answer(None, Ruling()) if kind is Kind.PASSED else _failed(frame, _DECIDED)
    else:
        answer = Answer(frame.body) if kind is Kind.VALUE else _failed(frame)
    return answer._replace(cpu_s=frame.cpu_s)


def _printed(outcome: Outcome, spec: JobSpec, run: int, *, is_done: bool) -> Answer | None:
    """The answer by the output of a run; None if the run failed in another way."""
    output = outcome.outputs[run]
    if len(output) > spec.output_bytes:
        return Answer(None, Ruling(Verdict.OUTPUT_LIMIT, f"printed more than {_limit(spec)}"))
    return Answer(output) if is_done else None


# Without a message the body of the frame has it.
_FAILED = {
    Kind.ERROR: Ruling(Verdict.RUNTIME_ERROR),
    Kind.COMPILE_ERROR: Ruling(Verdict.COMPILE_ERROR),
    Kind.MEMORY: Ruling(Verdict.MEMORY, "out of memory"),
    Kind.TOO_LARGE: Ruling(Verdict.OUTPUT_LIMIT, "too large a value"),
}
_DECIDED = {
    **_FAILED,
    Kind.FAILED: Ruling(Verdict.WRONG_ANSWER),
    Kind.BROKEN_TEST: Ruling(Verdict.TEST_ERROR),
}


def _failed(frame: Frame, known: Mapping[Kind, Ruling] = _FAILED) -> Answer:
    if frame.kind is Kind.EXIT:
        status = frame.body[:8].decode(errors="replace")
        ruling = Ruling(Verdict.RUNTIME_ERROR, f"exited with status {status}")
    else:
        ruling = known.get(frame.kind, Ruling(Verdict.WRONG_ANSWER, "no answer"))
    return Answer(None, ruling if ruling.message else Ruling(ruling.verdict, _text(frame.body)))


def _text(body: bytes) -> str:
    try:
        # A frame of the program: it may be anything.
        text = json.loads(body[:4000])
    except (ValueError, RecursionError):
        return "an error without a readable message"
    if type(text) is not str:
        return shorten(text)
    return text[:300].encode("utf-8", "backslashreplace").decode()


def _limit(spec: JobSpec) -> str:
    return f"{spec.output_bytes // 1024} KB"


def _end(outcome: Outcome, spec: JobSpec) -> Answer:
    """The answer of the run during which the child exited."""
    reply = outcome.reply
    # Python ignores SIGXFSZ, so the kernel shows this limit only as a failed write.
    if outcome.is_result_full:
        ruling = Ruling(Verdict.OUTPUT_LIMIT, f"returned more than {_limit(spec)}")
    elif reply.ending == Ending.EXITED:
        left = f"exited with status {reply.code} before it answered"
        ruling = Ruling(Verdict.RUNTIME_ERROR, left)
    else:
        is_large = reply.peak_bytes > _LARGE_SHARE * spec.memory_bytes
        ruling = _ended(reply, spec, is_large=is_large)
    # `watch` looks now and then: a program that was stopped has used its limit.
    used = {Ending.SIGNALED: reply.cpu_s, Ending.CPU: spec.cpu_s}
    return Answer(None, ruling, used.get(Ending(reply.ending), 0.0))


def _ended(reply: Reply, spec: JobSpec | CommandSpec, *, is_large: bool, said: str = "") -> Ruling:
    """The ruling on a child that was stopped. said: its last words. Raises ChildFault."""
    match reply.ending:
        case Ending.CPU:
            return Ruling(Verdict.TIMEOUT, f"used more than {spec.cpu_s:g} s of CPU time")
        case Ending.WALL:
            return Ruling(Verdict.TIMEOUT, f"slept for {spec.sleep_s:g} s")
        case Ending.FAULT | Ending.CANCELLED:
            raise ChildFault(reply.fault or "the job was cancelled")
    # The kernel's own limit may come first on a machine that delays the watch.
    if reply.code == signal.SIGXCPU or (reply.code == signal.SIGKILL and reply.cpu_s >= spec.cpu_s):
        return Ruling(Verdict.TIMEOUT, f"used {reply.cpu_s:.1f} s of CPU time")
    if reply.code == signal.SIGKILL and not is_large:
        # The kernel kills some process when the machine is out of memory; this one is not to blame.
        raise ChildFault("the child was killed from outside")
    if reply.code == signal.SIGXFSZ:
        return Ruling(Verdict.OUTPUT_LIMIT, "wrote too much")
    verdict = Verdict.MEMORY if is_large else Verdict.RUNTIME_ERROR
    try:
        name = signal.Signals(reply.code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {reply.code}"
    return Ruling(verdict, f"ended by {name}: {said}".rstrip(": "))


Ran = tuple[TestResult, bytes]
"""The result of one run of a program on standard input, pass if it exited without an error; its
output, which is not compared yet.
"""


def result_of(
    ruling: Ruling, *, cpu_s: float = 0.0, wall_s: float = 0.0, peak_bytes: int = 0
) -> TestResult:
    """A ruling as the result of a test."""
    verdict, message = ruling
    memory_mb = peak_bytes / MIB
    return TestResult(
        verdict=verdict, cpu_s=cpu_s, wall_s=wall_s, memory_mb=memory_mb, message=message
    )


def read_command(
    outcome: CommandOutcome, spec: CommandSpec, *, output_bytes: int, memory_marks: Sequence[str]
) -> Ran:
    """The result of a command. output_bytes: limit of its output; memory_marks: texts that its
    runtime prints when it is out of memory. Raises ChildFault.
    """
    _, _, cpu_s, wall_s, peak_bytes, _ = outcome.reply
    ruling = _command_ruling(outcome, spec, output_bytes, memory_marks)
    result = result_of(ruling, cpu_s=cpu_s, wall_s=wall_s, peak_bytes=peak_bytes)
    return result, outcome.output[:output_bytes]


def _command_ruling(
    outcome: CommandOutcome, spec: CommandSpec, output_bytes: int, memory_marks: Sequence[str]
) -> Ruling:
    reply, errors = outcome.reply, outcome.errors
    has_run = reply.ending not in (Ending.FAULT, Ending.CANCELLED)
    # First: the program may have exited because its output was cut off.
    if has_run and len(outcome.output) > output_bytes:
        return Ruling(Verdict.OUTPUT_LIMIT, f"printed more than {output_bytes // 1024} KB")
    is_exited = reply.ending == Ending.EXITED
    if is_exited and reply.code == 0:
        return Ruling(Verdict.PASS)
    is_large = reply.peak_bytes > _LARGE_SHARE * spec.memory_bytes
    is_large = is_large or any(mark.encode() in errors for mark in memory_marks)
    # Runtimes exit with a status of their own when they get no memory.
    if is_large and reply.ending in (Ending.EXITED, Ending.SIGNALED):
        return Ruling(Verdict.MEMORY, "out of memory")
    # Its end: a traceback names the error last.
    said = printable(errors[-_MESSAGE_CHARS:], _MESSAGE_CHARS)
    if is_exited:
        left = f"exited with status {reply.code}: {said}".rstrip(": ")
        return Ruling(Verdict.RUNTIME_ERROR, left)
    return _ended(reply, spec, is_large=is_large, said=said)


def read_check(outcome: CommandOutcome, spec: CommandSpec, form: str, output_bytes: int) -> Ruling:
    """The ruling of a checker in C++ by how it exited. Raises ChildFault."""
    reply = outcome.reply
    if reply.ending == Ending.EXITED and reply.code == CHECKER_ACCEPTS[form]:
        return Ruling()
    said = printable(outcome.product or outcome.errors, _MESSAGE_CHARS)
    return rejected(said or _command_ruling(outcome, spec, output_bytes, ()).message)


def printable(data: bytes, num_chars: int) -> str:
    """The start of a text, without control characters."""
    text = data[: 4 * num_chars].decode(errors="replace").strip()
    return _UNPRINTABLE.sub("?", text)[:num_chars]
