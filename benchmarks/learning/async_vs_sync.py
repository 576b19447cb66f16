"""Compare asynchronous with synchronous training, and the speed-up with its upper bound.

Two real runs (vLLM, verifier, learner) differ in max_staleness and work in alternating phases.
In a synchronous phase the stages run one after the other, so the busy seconds per step of a stage
are its duration without overlap. The bound is the sum of these durations divided by the longest.
The first steps after each change of phase are excluded.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
from typing import Any

from benchmarks.control.live_run import LiveRun
from benchmarks.figures import figure

LEFT_OUT = 4


def seconds_per_step(phase: list[dict[str, Any]]) -> float:
    """Return the mean over the phase. The first row only marks its start."""
    return float(phase[-1]["time_s"] - phase[0]["time_s"]) / (len(phase) - 1)


def busy_s(phase: list[dict[str, Any]], role: str) -> float:
    """Return the busy seconds per step of the role, weighted by the durations of the steps."""
    busy = sum(
        row[f"busy/{role}"] * (row["time_s"] - before["time_s"])
        for before, row in itertools.pairwise(phase)
    )
    return float(busy) / (len(phase) - 1)


def measure(settings: list[str], *, staleness: int, num_phases: int, phase_steps: int) -> None:
    """Alternate between a synchronous and an asynchronous run and print the figures.

    While one run works, every process of the other is stopped.
    """
    settings = [*settings, f"num_steps={num_phases * phase_steps + 50}"]
    phases: dict[int, list[list[dict[str, Any]]]] = {0: [], staleness: []}
    runs: dict[int, LiveRun] = {}
    with contextlib.ExitStack() as stack:
        for versions in phases:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            bound = f"buffer.max_staleness_versions={versions}"
            runs[versions] = stack.enter_context(LiveRun(scratch, [*settings, bound]))
            runs[versions].wait_for(5)
            runs[versions].hold()
        for number in range(num_phases):
            versions = staleness if number % 2 else 0
            run = runs[versions]
            run.go_on()
            first = run.step()
            run.wait_for(first + phase_steps, 60 * phase_steps)
            rows = run.rows()
            run.hold()
            phases[versions].append(
                [row for row in rows if first + LEFT_OUT <= row["step"] <= first + phase_steps]
            )
    report(phases[0], phases[staleness], staleness)


def report(
    sync: list[list[dict[str, Any]]], ahead: list[list[dict[str, Any]]], staleness: int
) -> None:
    """Print the figures. The speed-up is the median over pairs of phases."""
    sync_s = statistics.median(map(seconds_per_step, sync))
    ahead_s = statistics.median(map(seconds_per_step, ahead))
    generate_s = statistics.median(busy_s(phase, "generator") for phase in sync)
    learn_s = statistics.median(busy_s(phase, "learner") for phase in sync)
    bound = (generate_s + learn_s) / max(generate_s, learn_s)
    speedup = statistics.median(
        seconds_per_step(a) / seconds_per_step(b) for a, b in zip(sync, ahead, strict=False)
    )
    slower = "generator" if generate_s > learn_s else "learner"
    busy = statistics.median(busy_s(phase, slower) / seconds_per_step(phase) for phase in ahead)
    figure("synchronous step", sync_s, "s")
    figure(f"asynchronous step (max_staleness {staleness})", ahead_s, "s")
    figure("generation per step, alone", generate_s, "s")
    figure("learning per step, alone", learn_s, "s")
    figure("bound on the speed-up", bound, "x")
    figure(
        "speed-up, asynchronous over synchronous", speedup, "x", goal="at least 0.95 of the bound"
    )
    figure("share of the bound", speedup / bound, "", goal="at least 0.95")
    figure(f"busy share of the slower stage ({slower})", busy, "", goal="at least 0.95")


def main() -> None:
    """Measure conf=grpo_code, or the settings of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--phases", type=int, default=8)
    parser.add_argument("--phase-steps", type=int, default=20)
    parser.add_argument("settings", nargs="*", default=["conf=grpo_code"])
    arguments = parser.parse_args()
    measure(
        arguments.settings,
        staleness=arguments.staleness,
        num_phases=arguments.phases,
        phase_steps=arguments.phase_steps,
    )


if __name__ == "__main__":
    main()
