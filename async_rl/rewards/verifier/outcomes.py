"""From the output of a child to one answer per call or stream: a value, an output, or a failing
verdict. Pure.

The frames are the program's claims; the ending is the zygote's observation. A claim can only choose
among failures or offer a value.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from async_rl.core.frozen import frozen
from async_rl.core.types import Verdict
from async_rl.sandbox.cell import Outcome
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import Ending, Frame, JobSpec, Kind, Reply

_LARGE_SHARE = 0.9
"""A child that was killed with this share of its memory limit in use counts as out of memory."""


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


class ChildFault(Exception):
    """The child never ran the program, or was killed from outside. The program is not to blame."""


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
    cpu_s = 0.0
    if outcome.is_result_full:
        verdict, message = Verdict.OUTPUT_LIMIT, f"returned more than {_limit(spec)}"
    elif reply.ending == Ending.CPU:
        verdict, message = Verdict.TIMEOUT, f"used more than {spec.cpu_s:g} s of CPU time"
        cpu_s = spec.cpu_s
    elif reply.ending == Ending.WALL:
        verdict, message = Verdict.TIMEOUT, f"slept for {spec.sleep_s:g} s"
    elif reply.ending == Ending.SIGNALED:
        verdict, message = _signaled(reply, spec)
        cpu_s = reply.cpu_s
    elif reply.ending == Ending.EXITED:
        verdict = Verdict.RUNTIME_ERROR
        message = f"ended the process with status {reply.code} before it answered"
    else:
        raise ChildFault("the job was cancelled")
    return Answer(verdict=verdict, message=message, cpu_s=cpu_s)


def _signaled(reply: Reply, spec: JobSpec) -> tuple[Verdict, str]:
    is_large = reply.peak_bytes > _LARGE_SHARE * spec.memory_bytes
    if reply.code == signal.SIGKILL:
        if reply.cpu_s >= spec.cpu_s:
            return Verdict.TIMEOUT, f"used {reply.cpu_s:.1f} s of CPU time"
        if not is_large:
            raise ChildFault("the child was killed from outside")
    if reply.code == signal.SIGXFSZ:
        return Verdict.OUTPUT_LIMIT, "wrote too much"
    verdict = Verdict.MEMORY if is_large else Verdict.RUNTIME_ERROR
    try:
        return verdict, f"ended by {signal.Signals(reply.code).name}"
    except ValueError:  # a real-time signal has no name
        return verdict, f"ended by signal {reply.code}"
