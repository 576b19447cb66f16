"""A run that stands still names in its log, its status and TensorBoard who waits for what; at the
deadline it ends with that sentence.

One run, held up at one place after the other. "Data exhausted" is not among them: the order of
prompts has no end (async_rl/data/order.py).
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator

import psutil
import pytest
from e2e_support import SMALL, LiveRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENT = (
    *SMALL,
    # Nothing but the stall may end a process here; it is reported after 6 s (start_s / 3) and ends
    # the run after 180 s.
    "timeouts.start_s=18",
    "timeouts.call_s=200",
    "num_steps=100000",
)


def told(run: LiveRun) -> list[str]:
    """The sentences in the log, oldest first."""
    log = (run.run_dir / "logs" / "supervisor.log").read_text()
    return [
        line.partition("no learner step")[2]
        for line in log.splitlines()
        if "WARNING" in line and "no learner step" in line
    ]


def said_while(run: LiveRun, held: list[psutil.Process], *expected: str) -> str:
    """The sentence of a run in which these processes stand still, repeated by `async-rl status`;
    then they go on, and so does the run.
    """
    before = len(told(run))
    _signal(held, signal.SIGSTOP)
    run.until(lambda: len(told(run)) > before, f"a sentence while {held} stand still")
    sentence, status = told(run)[-1], " ".join(run.status().split())
    _signal(held, signal.SIGCONT)
    assert [part for part in expected if part not in sentence] == [], sentence
    assert [part for part in expected if part not in status] == [], status
    at = run.step
    run.until(lambda: run.step > at + 1, "the run goes on")
    return sentence


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a judged program may just have ended
            process.send_signal(number)


class Stalled:
    """A run that is held up at one place after the other, at last for good."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run

    @functools.cached_property
    def sentences(self) -> list[str]:
        """What was said about it before its learner was stopped for good."""
        # The first run of the suite: on a new machine it makes the model.
        self.run.until(lambda: self.run.step >= 2, "step 2", timeout_s=480)
        return held_up(self.run)


@pytest.fixture(scope="session")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stalled]:
    """Of the whole session: tests of other modules run while it waits for its deadline
    (tests/conftest.py).
    """
    run = LiveRun(tmp_path_factory.mktemp("stalled"), *PATIENT)
    try:
        yield Stalled(run)
    finally:
        run.end()


def held_up(run: LiveRun) -> list[str]:
    """Hold up one process after the other, at last the learner."""
    verifier = psutil.Process(run.pid_of("verifier-0"))
    sentences = [
        said_while(
            run,
            [verifier],
            "verifier-0 has sent no heartbeat for",
            "generator-0 waits for verdicts",
            "learner-0 waits for a batch",
        )
    ]
    sentences.append(
        said_while(
            run,
            verifier.children(recursive=True),
            "generator-0 waits for verdicts",
            "verifier-0: judging",
        )
    )

    run.kill("generator-0")
    run.until(
        lambda: (
            "generator-0 was ended by SIGKILL"
            in (run.run_dir / "logs" / "supervisor.log").read_text()
        ),
        "its end was noticed",
    )
    run.until(
        lambda: any("generator-0" in p.info["cmdline"] for p in run.processes()), "its next life"
    )
    said_while(
        run,
        [psutil.Process(run.pid_of("generator-0"))],
        "no generator serves",
        "generator-0: starting",
        "learner-0 waits for a batch",
    )
    run.kill("learner-0", signal.SIGSTOP)
    return sentences


def test_whoever_holds_a_run_up_is_named_and_it_continues_after_each(stalled: Stalled) -> None:
    assert len(stalled.sentences) == 2, "each was found in the log and in the status"


def test_past_the_deadline_the_run_ends_with_that_sentence(stalled: Stalled) -> None:
    run, sentences = stalled.run, stalled.sentences
    assert run.wait(timeout_s=360) == 1
    first, _, rest = run.terminal.partition("the run has failed at step")[2].partition(
        "no learner step after version"
    )
    assert first.split()[1:] == ["of", "100000"], "the sentence is the first that is said of it"
    sentence = " ".join(rest.split())
    for part in (
        "learner-0 has sent no heartbeat for",
        "buffer is held back by admission",
        "generator-0 is held back by admission: the learner is behind",
        "(10 timeouts.start_s = 180 s)",
    ):
        assert part in sentence, run.terminal
    assert run.processes() == []
    assert run.audit()["problems"] == []

    sentences = [*sentences, told(run)[-1]]
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("run/stalled")]
    places = [texts.index("no learner step" + sentence) for sentence in sentences]
    assert places == sorted(places)
    assert all(texts[place + 1] == "the run continues" for place in places[:-1])
