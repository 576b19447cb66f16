"""From the output of a child or a command to rulings. Pure.

A child that runs Python writes frames, which are the program's claims; the ending is the zygote's
observation. A claim can only choose among failures or offer a value. The frames become one answer
per call or stream: a value, an output, or a failing verdict.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

from async_rl.core.frozen import frozen
from async_rl.core.types import Verdict
from async_rl.sandbox.cell import CommandOutcome, Outcome
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import (
    CHECKER_ENDS,
    CommandSpec,
    Ending,
    Frame,
    JobSpec,
    Kind,
    Reply,
)

_LARGE_SHARE = 0.9
"""A child that was killed with this share of its memory limit in use counts as out of memory."""
_MESSAGE_CHARS = 300
_UNPRINTABLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")
MIB = 1 << 20


class Ruling(NamedTuple):
    """pass, or the verdict and its reason."""

    verdict: Verdict
    message: str = ""


class ChildFault(Exception):
    """The program never ran, or was killed from outside. The program is not to blame."""


@frozen
class Answer:
    """The result of one run.

    value: the bytes that a call returned or a stream printed; None with a failing verdict.
    """

    value: bytes | None = None
    verdict: Verdict = Verdict.PASS
    message: str = ""
    cpu_s: float = 0.0


@frozen
class Answers:
    """Answers of the first runs.

    is_slow: the next run needs a separate child, because the runs together exceeded a limit.
    """

    answers: list[Answer]
    is_slow: bool = False


def read_calls(outcome: Outcome, spec: JobSpec) -> Answers:
    """One answer per call that was reached. Raises ChildFault."""
    return _read(outcome, spec, _call_answer)


def read_streams(outcome: Outcome, spec: JobSpec) -> Answers:
    """One answer per stream that was reached. Raises ChildFault."""

    def settled(run: int, cpu_s: float, *, is_done: bool) -> Answer | None:
        """The answer by the run's output, None if the run failed in another way."""
        output = outcome.outputs[run]
        if len(output) > spec.output_bytes:
            message = f"printed more than {_limit(spec)}"
            return Answer(verdict=Verdict.OUTPUT_LIMIT, message=message, cpu_s=cpu_s)
        return Answer(value=output, cpu_s=cpu_s) if is_done else None

    def answer(frame: Frame) -> Answer:
        is_done = frame.kind is Kind.DONE or (frame.kind is Kind.EXIT and frame.body == b"0")
        return settled(frame.run, frame.cpu_s, is_done=is_done) or _failure(frame)

    read = _read(outcome, spec, answer)
    reached, frames = len(read.answers), outcome.frames.frames
    has_frame = reached < len(frames)
    if (
        read.is_slow
        or has_frame
        or read.answers[-1].verdict is Verdict.PASS
        or not _is_loaded(frames)
    ):
        return read
    # The child exited during the last run, without a frame: os._exit(0) after printing is a pass.
    reply = outcome.reply
    has_left = reply.ending == Ending.EXITED and reply.code == 0
    last = settled(reached - 1, 0.0, is_done=has_left and not outcome.frames.is_malformed)
    answers = read.answers if last is None else [*read.answers[:-1], last]
    return Answers(answers=answers)


def read_judged(outcome: Outcome, spec: JobSpec) -> Answers:
    """The one answer of a judged test, whose verdict is the judging child's. Raises ChildFault."""

    def answer(frame: Frame) -> Answer:
        match frame.kind:
            case Kind.PASSED:
                return Answer(cpu_s=frame.cpu_s)
            case Kind.FAILED:
                return _failed(Verdict.WRONG_ANSWER, _text(frame.body), frame)
            case Kind.BROKEN_TEST:
                message = f"the test itself is broken: {_text(frame.body)}"
                return _failed(Verdict.TEST_ERROR, message, frame)
        return _failure(frame)

    return _read(outcome, spec, answer)


def _is_loaded(frames: list[Frame]) -> bool:
    return bool(frames) and frames[0].kind is Kind.LOADED


def _read(outcome: Outcome, spec: JobSpec, answer: Callable[[Frame], Answer]) -> Answers:
    if outcome.reply.ending == Ending.FAULT:
        reason = outcome.reply.fault.decode(errors="replace")
        raise ChildFault(f"the child could not be locked down: {reason}")
    frames, num_runs = outcome.frames.frames, spec.num_runs
    if frames and not _is_loaded(frames):
        return Answers(answers=[_failure(frames[0])] * num_runs)
    answers = [answer(frame) for frame in frames[1 : num_runs + 1]]
    num_missing = num_runs - len(answers)
    if num_missing == 0:
        return Answers(answers=answers)
    if outcome.frames.is_malformed:
        broken = Answer(verdict=Verdict.WRONG_ANSWER, message="the answer is malformed")
        return Answers(answers=answers + [broken] * num_missing)
    end = _end(outcome, spec)
    is_late = outcome.reply.ending in (Ending.CPU, Ending.WALL)
    # The time that was left for this run depends on the runs before it.
    is_early = outcome.reply.ending == Ending.CPU and outcome.reply.cpu_s < spec.cpu_s
    if is_late and spec.num_tests > 1 and (answers or is_early):
        return Answers(answers=answers, is_slow=True)
    if not frames:
        return Answers(answers=[end] * num_runs)
    return Answers(answers=[*answers, end])


def _call_answer(frame: Frame) -> Answer:
    if frame.kind is not Kind.VALUE:
        return _failure(frame)
    return Answer(value=frame.body, cpu_s=frame.cpu_s)


def _failure(frame: Frame) -> Answer:
    match frame.kind:
        case Kind.ERROR:
            return _failed(Verdict.RUNTIME_ERROR, _text(frame.body), frame)
        case Kind.COMPILE_ERROR:
            return _failed(Verdict.COMPILE_ERROR, _text(frame.body), frame)
        case Kind.EXIT:
            status = frame.body[:8].decode(errors="replace")
            return _failed(Verdict.RUNTIME_ERROR, f"exited with status {status}", frame)
        case Kind.MEMORY:
            return _failed(Verdict.MEMORY, "out of memory", frame)
        case Kind.TOO_LARGE:
            return _failed(Verdict.OUTPUT_LIMIT, "too large a value", frame)
    return _failed(Verdict.WRONG_ANSWER, "no answer", frame)


def _failed(verdict: Verdict, message: str, frame: Frame) -> Answer:
    return Answer(verdict=verdict, message=message, cpu_s=frame.cpu_s)


def _text(body: bytes) -> str:
    try:
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
    cpu_s = reply.cpu_s if reply.ending == Ending.SIGNALED else 0.0
    if outcome.is_result_full:
        ruling = Ruling(Verdict.OUTPUT_LIMIT, f"returned more than {_limit(spec)}")
    elif reply.ending == Ending.EXITED:
        left = f"exited with status {reply.code} before it answered"
        ruling = Ruling(Verdict.RUNTIME_ERROR, left)
    else:
        is_large = reply.peak_bytes > _LARGE_SHARE * spec.memory_bytes
        ruling = _ended(reply, spec, is_large=is_large)
    if reply.ending == Ending.CPU:
        cpu_s = spec.cpu_s
    return Answer(verdict=ruling.verdict, message=ruling.message, cpu_s=cpu_s)


def _ended(reply: Reply, spec: JobSpec | CommandSpec, *, is_large: bool, said: str = "") -> Ruling:
    """The ruling on a child that was stopped. said: its last words. Raises ChildFault."""
    match reply.ending:
        case Ending.CPU:
            return Ruling(Verdict.TIMEOUT, f"used more than {spec.cpu_s:g} s of CPU time")
        case Ending.WALL:
            return Ruling(Verdict.TIMEOUT, f"slept for {spec.sleep_s:g} s")
        case Ending.FAULT | Ending.CANCELLED:
            raise ChildFault(reply.fault.decode(errors="replace") or "the job was cancelled")
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


@frozen
class Ran:
    """The result of one run of a program on standard input. verdict: pass if it exited without an
    error; the output is not compared yet.
    """

    verdict: Verdict
    output: bytes
    message: str
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mb: float = 0.0


def read_command(
    outcome: CommandOutcome, spec: CommandSpec, *, output_bytes: int, memory_marks: Sequence[str]
) -> Ran:
    """The result of a command. output_bytes: limit of its output; memory_marks: texts that its
    runtime prints when it is out of memory. Raises ChildFault.
    """
    reply = outcome.reply
    ruling = _command_ruling(outcome, spec, output_bytes, memory_marks)
    return Ran(
        verdict=ruling.verdict,
        output=outcome.output[:output_bytes],
        message=ruling.message,
        cpu_s=reply.cpu_s,
        wall_s=reply.wall_s,
        memory_mb=reply.peak_bytes / MIB,
    )


def _command_ruling(
    outcome: CommandOutcome, spec: CommandSpec, output_bytes: int, memory_marks: Sequence[str]
) -> Ruling:
    reply, errors = outcome.reply, outcome.errors
    has_run = reply.ending not in (Ending.FAULT, Ending.CANCELLED)
    if has_run and len(outcome.output) > output_bytes:
        return Ruling(Verdict.OUTPUT_LIMIT, f"printed more than {output_bytes // 1024} KB")
    is_exited = reply.ending == Ending.EXITED
    if is_exited and reply.code == 0:
        return Ruling(Verdict.PASS)
    is_large = reply.peak_bytes > _LARGE_SHARE * spec.memory_bytes
    is_large = is_large or any(mark.encode() in errors for mark in memory_marks)
    if is_large and reply.ending in (Ending.EXITED, Ending.SIGNALED):
        return Ruling(Verdict.MEMORY, "out of memory")
    said = printable(errors[-_MESSAGE_CHARS:], _MESSAGE_CHARS)
    if is_exited:
        left = f"exited with status {reply.code}: {said}".rstrip(": ")
        return Ruling(Verdict.RUNTIME_ERROR, left)
    return _ended(reply, spec, is_large=is_large, said=said)


def read_check(outcome: CommandOutcome, spec: CommandSpec, form: str, output_bytes: int) -> Ruling:
    """The ruling of a checker in C++ by how it exited. Raises ChildFault."""
    reply = outcome.reply
    kind = CHECKER_ENDS[form].get(reply.code) if reply.ending == Ending.EXITED else None
    if kind is Kind.PASSED:
        return Ruling(Verdict.PASS)
    if kind is Kind.FAILED:
        said = printable(outcome.product or outcome.errors, _MESSAGE_CHARS)
        return Ruling(Verdict.WRONG_ANSWER, said or "the checker rejects the output")
    message = _command_ruling(outcome, spec, output_bytes, ()).message
    message = message or f"it exited with status {reply.code}"
    return Ruling(Verdict.TEST_ERROR, f"the checker failed: {message}")


def printable(data: bytes, num_chars: int) -> str:
    """The start of a text, without control characters."""
    text = data[: 4 * num_chars].decode(errors="replace").strip()
    return _UNPRINTABLE.sub("?", text)[:num_chars]
