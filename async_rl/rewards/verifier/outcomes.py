"""From the output of a child or a command to rulings. Pure.

A child that runs Python writes frames, which are the program's claims; the ending is the zygote's
observation. A claim can only choose among failures or offer a value. The frames become one answer
per call or stream: a value, an output, or a failing verdict.
"""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from async_rl.core.types import Verdict
from async_rl.rewards.verifier.protocol import TestResult
from async_rl.sandbox.cell import CellFailed, Outcome
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import (
    CHECKER_ACCEPTS,
    SLEEP_S,
    CommandSpec,
    Ending,
    Frame,
    JobSpec,
    Kind,
    Mode,
    Reply,
    read_frames,
)

# A child that was killed with this share of its memory limit in use counts as out of memory: the
# kernel kills before the last page fits.
_LARGE_SHARE = 0.9
# A message goes into logs and samples; the rest of a long one rarely helps.
_MESSAGE_CHARS = 300
_UNPRINTABLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")
_SIGNALS = {each.value: each.name for each in signal.Signals}
MIB = 1 << 20


class Ruling(NamedTuple):
    """pass, or the verdict and its reason."""

    verdict: Verdict = Verdict.PASS
    message: str = ""


def rejected(reason: str) -> Ruling:
    """The ruling of a checker that rejects an output or fails on it."""
    return Ruling(Verdict.WRONG_ANSWER, reason[:_MESSAGE_CHARS] or "the checker rejects the output")


class Answer(NamedTuple):
    """The result of one run of a program.

    output: the bytes that a call returned or a stream printed; ruling: a pass is not compared yet,
    unless the child itself has judged.
    """

    ruling: Ruling
    output: bytes = b""


class Ran(NamedTuple):
    """What one child or one command has done.

    answers: of the first runs; is_slow: the next run needs a separate child, because the runs
    together exceeded a limit.
    """

    reply: Reply
    answers: list[Answer]
    is_slow: bool = False


NEVER_RAN = Reply(Ending.EXITED, 0, 0.0, 0.0, 0)
"""Of a program that was not run."""


def result_of(ruling: Ruling, reply: Reply = NEVER_RAN, num_tests: int = 1) -> TestResult:
    """A ruling as the result of a test. num_tests: tests that the same child ran."""
    return TestResult(
        verdict=ruling.verdict,
        cpu_s=reply.cpu_s / num_tests,
        wall_s=reply.wall_s / num_tests,
        memory_mb=reply.peak_bytes / MIB,
        message=ruling.message,
    )


def read_job(outcome: Outcome, spec: JobSpec) -> Ran:
    """One answer per run that was reached. Raises CellFailed as `ended`."""
    reply, (result, *outputs) = outcome
    frames, is_malformed = read_frames(result, spec.num_runs)
    ran = partial(Ran, reply)
    if reply.ending == Ending.FAULT:
        raise CellFailed(f"the child could not be locked down: {reply.fault}")
    if frames and frames[0].kind is not Kind.LOADED:
        return ran([Answer(_failure(frames[0]))] * spec.num_runs)
    answers = [_answer(frame, outputs, spec) for frame in frames[1:]]
    num_missing = spec.num_runs - len(answers)
    # Before the ending: after the last answer it does not matter how the child exited.
    if num_missing == 0:
        return ran(answers)
    if is_malformed:
        broken = Answer(Ruling(Verdict.WRONG_ANSWER, "the answer is malformed"))
        return ran(answers + [broken] * num_missing)
    # Python ignores SIGXFSZ, so the kernel shows this limit only as a failed write.
    is_full = len(result) > spec.output_bytes
    ruling = too_much("returned", spec.output_bytes) if is_full else ended(reply, spec)
    is_late = reply.ending in (Ending.CPU, Ending.WALL)
    # The time that was left for this run depends on the runs before it.
    if is_late and answers and spec.num_tests > 1:
        return ran(answers, is_slow=True)
    # The code itself did not finish, so no run can.
    if not frames:
        return ran([Answer(ruling)] * spec.num_runs)
    output = b""
    if spec.mode == Mode.STREAMS:
        output = outputs[len(answers)]
        # The child exited during a run, without a frame: os._exit(0) after printing is a pass.
        if reply.ending == Ending.EXITED and reply.code == 0:
            ruling = Ruling()
    return ran([*answers, _printed(output, spec, ruling)])


def _answer(frame: Frame, outputs: Sequence[bytes], spec: JobSpec) -> Answer:
    """The answer of a frame. Only a judging child may decide: any program can write any frame."""
    kind = frame.kind
    if spec.mode == Mode.STREAMS:
        is_done = kind is Kind.DONE or (kind is Kind.EXIT and frame.body == b"0")
        ruling = Ruling() if is_done else _failure(frame)
        return _printed(outputs[frame.run], spec, ruling)
    if spec.mode == Mode.CALLS:
        ruling = Ruling() if kind is Kind.VALUE else _failure(frame)
    else:
        ruling = Ruling() if kind is Kind.PASSED else _failure(frame, _DECIDED)
    return Answer(ruling, frame.body)


def _printed(output: bytes, spec: JobSpec, ruling: Ruling) -> Answer:
    """The answer of a stream run, whose ruling is different if it printed too much."""
    if len(output) > spec.output_bytes:
        ruling = too_much("printed", spec.output_bytes)
    return Answer(ruling, output[: spec.output_bytes])


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


def _failure(frame: Frame, known: Mapping[Kind, Ruling] = _FAILED) -> Ruling:
    if frame.kind is Kind.EXIT:
        status = frame.body[:8].decode(errors="replace")
        return Ruling(Verdict.RUNTIME_ERROR, f"exited with status {status}")
    ruling = known.get(frame.kind, Ruling(Verdict.WRONG_ANSWER, "no answer"))
    if ruling.message:
        return ruling
    try:
        # A frame of the program: it may be anything.
        said = json.loads(frame.body[:4000])
    except (ValueError, RecursionError):
        said = "an error without a readable message"
    text = said if type(said) is str else shorten(said)
    return Ruling(ruling.verdict, text[:300].encode("utf-8", "backslashreplace").decode())


def too_much(verb: str, num_bytes: int) -> Ruling:
    """The ruling on a program that printed or returned more than its limit."""
    return Ruling(Verdict.OUTPUT_LIMIT, f"{verb} more than {num_bytes // 1024} KB")


def ended(
    reply: Reply, spec: JobSpec | CommandSpec, said: str = "", *, has_no_memory: bool = False
) -> Ruling:
    """The ruling on a program that did not succeed. said: its last words; has_no_memory: they
    contain that it got no memory. Raises CellFailed if it never ran, or was killed from outside.
    """
    stopped_by = 0
    left = f"exited with status {reply.code}"
    match reply.ending:
        case Ending.CPU:
            return Ruling(Verdict.TIMEOUT, f"used more than {spec.cpu_s:g} s of CPU time")
        case Ending.WALL:
            return Ruling(Verdict.TIMEOUT, f"slept for {spec.cpu_s + SLEEP_S:g} s")
        case Ending.FAULT | Ending.CANCELLED:
            raise CellFailed(reply.fault or "the job was cancelled")
        case Ending.SIGNALED:
            # Not signal.Signals: real-time signals have no name.
            stopped_by = reply.code
            left = f"ended by {_SIGNALS.get(reply.code, reply.code)}"
    # The kernel's own limit may come first on a machine that delays the watch.
    if stopped_by == signal.SIGXCPU or (stopped_by == signal.SIGKILL and reply.cpu_s >= spec.cpu_s):
        return Ruling(Verdict.TIMEOUT, f"used {reply.cpu_s:.1f} s of CPU time")
    # Runtimes exit with a separate status when they get no memory.
    if has_no_memory or reply.peak_bytes > _LARGE_SHARE * spec.memory_bytes:
        return Ruling(Verdict.MEMORY, "out of memory")
    if stopped_by == signal.SIGKILL:
        # The kernel kills some process when the machine is out of memory; this one is not to blame.
        raise CellFailed("the child was killed from outside")
    if stopped_by == signal.SIGXFSZ:
        return Ruling(Verdict.OUTPUT_LIMIT, "wrote too much")
    return Ruling(Verdict.RUNTIME_ERROR, f"{left}: {said}".rstrip(": "))


def read_command(outcome: Outcome, spec: CommandSpec, memory_marks: Sequence[str] = ()) -> Ran:
    """The result of a command. memory_marks: texts that its runtime prints when it is out of
    memory. Raises CellFailed as `ended`.
    """
    reply, (output, errors, _) = outcome
    # The last byte only shows that there are more.
    most = spec.file_bytes - 1
    has_run = reply.ending not in (Ending.FAULT, Ending.CANCELLED)
    # First: the program may have exited because its output was cut off.
    if has_run and len(output) > most:
        ruling = too_much("printed", most)
    elif reply.ending == Ending.EXITED and reply.code == 0:
        ruling = Ruling()
    else:
        has_no_memory = any(mark.encode() in errors for mark in memory_marks)
        # Its end: a traceback names the error last.
        said = printable(errors[-_MESSAGE_CHARS:], _MESSAGE_CHARS)
        ruling = ended(reply, spec, said, has_no_memory=has_no_memory)
    return Ran(reply, [Answer(ruling, output[:most])])


def read_check(outcome: Outcome, spec: CommandSpec, form: str) -> Ruling:
    """The ruling of a checker that is a command, by how it exited. Raises CellFailed as `ended`."""
    reply, (_, errors, product) = outcome
    if reply.ending == Ending.EXITED and reply.code == CHECKER_ACCEPTS[form]:
        return Ruling()
    said = printable(product or errors, _MESSAGE_CHARS)
    return rejected(said or read_command(outcome, spec).answers[0].ruling.message)


def printable(data: bytes, num_chars: int) -> str:
    """The start of a text, without control characters."""
    text = data[: 4 * num_chars].decode(errors="replace").strip()
    return _UNPRINTABLE.sub("?", text)[:num_chars]
