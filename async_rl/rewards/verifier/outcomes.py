"""From what came out of a child to one answer per call or stream: a value, an output, or a verdict
that is already settled. Pure.

The frames are the program's claims; the ending is what the zygote saw.  A claim can only choose
among failures or offer a value. Used by `judging.py`.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import Any, Final

from async_rl.core.types import Verdict
from async_rl.rewards.verifier.comparison import shorten
from async_rl.sandbox.cell import Outcome
from async_rl.sandbox.frames import Frame, Kind
from async_rl.sandbox.protocol import Ending, Request
from async_rl.sandbox.values import decode

NO_VALUE: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run gave: `value` (calls: the decoded value; streams: the text), or NO_VALUE and a
    failing verdict.
    """

    value: Any = NO_VALUE
    verdict: Verdict = Verdict.PASS
    message: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers of the first runs; is_final if no later run can be answered by starting again."""

    answers: list[Answer]
    is_final: bool


class ChildFault(Exception):
    """The child never ran the program, or was killed from outside: nothing is known about the
    program.
    """


def read_calls(outcome: Outcome, request: Request) -> Answers:
    """One answer per call that was reached. Raises ChildFault."""
    return _read(outcome, request, _call_answer)


def read_streams(outcome: Outcome, request: Request) -> Answers:
    """One answer per stream that was reached. Raises ChildFault."""

    def answer(frame: Frame) -> Answer:
        if len(outcome.outputs[frame.run]) > request.output_bytes:
            return _failed(
                Verdict.OUTPUT_LIMIT, f"printed more than {request.output_bytes // 1024} KB", frame
            )
        if frame.kind is Kind.DONE or (frame.kind is Kind.EXIT and frame.body == b"0"):
            return Answer(
                value=outcome.outputs[frame.run].decode(errors="replace"), cpu_s=frame.cpu_s
            )
        return _failure(frame)

    read = _read(outcome, request, answer)
    reached, frames = len(read.answers), outcome.frames.frames
    if (
        not (frames and frames[0].kind is Kind.LOADED)
        or read.answers[-1].verdict is Verdict.PASS
        or reached <= len(frames) - 1
    ):
        return read
    output = outcome.outputs[reached - 1]
    if len(output) > request.output_bytes:
        last = Answer(
            verdict=Verdict.OUTPUT_LIMIT,
            message=f"printed more than {request.output_bytes // 1024} KB",
        )
    elif (
        outcome.reply.ending == Ending.EXITED
        and outcome.reply.code == 0
        and not outcome.frames.is_malformed
    ):
        last = Answer(value=output.decode(errors="replace"))
    else:
        return read
    return Answers(answers=[*read.answers[:-1], last], is_final=read.is_final)


def read_judged(outcome: Outcome, request: Request) -> Answers:
    """The one answer of a judged test: its verdict is the judging child's. Raises ChildFault."""

    def answer(frame: Frame) -> Answer:
        if frame.kind is Kind.DONE:
            return Answer(cpu_s=frame.cpu_s)
        if frame.kind is Kind.VALUE:
            return _failed(Verdict.WRONG_ANSWER, _text(frame.body), frame)
        return _failure(frame)

    return _read(outcome, request, answer)


def _read(outcome: Outcome, request: Request, answer: Any) -> Answers:
    if outcome.reply.ending == Ending.FAULT:
        raise ChildFault(
            f"the child could not be locked down: {outcome.reply.fault.decode(errors='replace')}"
        )
    frames, num_runs = outcome.frames.frames, request.num_runs
    if frames and frames[0].kind is not Kind.LOADED:
        failure = _failure(frames[0])
        return Answers(answers=[failure] * num_runs, is_final=True)
    answers = [answer(frame) for frame in frames[1 : num_runs + 1]]
    if len(answers) == num_runs:
        return Answers(answers=answers, is_final=True)
    if outcome.frames.is_malformed:
        broken = Answer(verdict=Verdict.WRONG_ANSWER, message="the answer is malformed")
        return Answers(answers=answers + [broken] * (num_runs - len(answers)), is_final=True)
    end = _end(outcome, request)
    if not frames:
        return Answers(answers=[end] * num_runs, is_final=True)
    return Answers(answers=[*answers, end], is_final=False)


def _call_answer(frame: Frame) -> Answer:
    if frame.kind is not Kind.VALUE:
        return _failure(frame)
    try:
        return Answer(value=decode(frame.body), cpu_s=frame.cpu_s)
    except ValueError:
        return _failed(Verdict.WRONG_ANSWER, "the returned value is malformed", frame)


_CLAIMS = {
    Kind.ERROR: Verdict.RUNTIME_ERROR,
    Kind.EXIT: Verdict.RUNTIME_ERROR,
    Kind.MEMORY: Verdict.MEMORY,
    Kind.TOO_LARGE: Verdict.OUTPUT_LIMIT,
    Kind.COMPILE_ERROR: Verdict.COMPILE_ERROR,
}


def _failure(frame: Frame) -> Answer:
    verdict = _CLAIMS.get(frame.kind, Verdict.WRONG_ANSWER)
    if frame.kind in (Kind.ERROR, Kind.COMPILE_ERROR):
        return _failed(verdict, _text(frame.body), frame)
    if frame.kind is Kind.EXIT:
        return _failed(
            verdict, f"left with exit status {frame.body[:8].decode(errors='replace')}", frame
        )
    return _failed(
        verdict,
        {Verdict.MEMORY: "out of memory", Verdict.OUTPUT_LIMIT: "too large a value"}.get(
            verdict, "no answer"
        ),
        frame,
    )


def _failed(verdict: Verdict, message: str, frame: Frame) -> Answer:
    return Answer(verdict=verdict, message=message, cpu_s=frame.cpu_s)


def _text(body: bytes) -> str:
    try:
        text = json.loads(body[:4000])
    except (ValueError, RecursionError):
        return "an error without a readable message"
    return (
        text[:300].encode("utf-8", "backslashreplace").decode()
        if type(text) is str
        else shorten(text)
    )


def _end(outcome: Outcome, request: Request) -> Answer:
    """The answer of the run during which the child ended."""
    reply = outcome.reply
    if outcome.is_result_full:
        return Answer(
            verdict=Verdict.OUTPUT_LIMIT,
            message=f"gave more than {request.output_bytes // 1024} KB",
        )
    if reply.ending == Ending.CPU:
        return Answer(
            verdict=Verdict.TIMEOUT,
            message=f"used more than {request.cpu_s:g} s of CPU time",
            cpu_s=request.cpu_s,
        )
    if reply.ending == Ending.WALL:
        return Answer(verdict=Verdict.TIMEOUT, message=f"slept for {request.sleep_s:g} s")
    if reply.ending == Ending.SIGNALED:
        return _signaled(outcome, request)
    if reply.ending == Ending.EXITED:
        return Answer(
            verdict=Verdict.RUNTIME_ERROR,
            message=f"ended the process with status {reply.code} before it answered",
        )
    raise ChildFault("the job was cancelled")


def _signaled(outcome: Outcome, request: Request) -> Answer:
    reply = outcome.reply
    is_large = reply.peak_bytes > 0.9 * request.memory_bytes
    if reply.code == signal.SIGKILL:
        if reply.cpu_s >= request.cpu_s:
            return Answer(
                verdict=Verdict.TIMEOUT,
                message=f"used {reply.cpu_s:.1f} s of CPU time",
                cpu_s=reply.cpu_s,
            )
        if not is_large:
            raise ChildFault("the child was killed from outside")
    if reply.code == signal.SIGXFSZ:
        return Answer(verdict=Verdict.OUTPUT_LIMIT, message="wrote too much")
    name = (
        signal.Signals(reply.code).name
        if reply.code in {s.value for s in signal.Signals}
        else str(reply.code)
    )
    return Answer(
        verdict=Verdict.MEMORY if is_large else Verdict.RUNTIME_ERROR,
        message=f"ended by {name}",
        cpu_s=reply.cpu_s,
    )
