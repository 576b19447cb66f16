"""Processor seconds of a forecast for many generators.

Run: `python -m benchmarks.forecast [--generators 4096] [--groups-per-step 1024] [--steps 1000]`.
"""

from __future__ import annotations

import argparse
import time

from async_rl.launchers.forecast.recorded import Recorded, Work
from async_rl.launchers.forecast.simulation import Scenario, simulate


def main() -> None:
    """Simulate a run in which generators and learner are about equally fast; print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generators", type=int, default=4096)
    parser.add_argument("--groups-per-step", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    recorded = Recorded(
        train=(Work(units=4.0, scoring_s=0.2),) * 160,
        evaluation=(),
        beside=0.2,
        step_s=(1.0,) * 40,
        push_s=0.1,
        num_generators=1,
        num_warm=8,
        steps_per_s=1.0,
    )
    scenario = Scenario(
        generators=given.generators,
        slots=4,
        groups_per_step=given.groups_per_step,
        max_staleness_versions=8,
        push_every_steps=1,
        evaluate_every_steps=0,
        num_steps=given.steps,
    )
    began_s = time.process_time()
    forecast = simulate(scenario, recorded)
    seconds = time.process_time() - began_s
    print(
        f"{given.generators} generators, {given.steps} steps of {given.groups_per_step} groups:"
        f" {seconds:.0f} s of processor time; {forecast.steps_per_s:.2f} steps/s forecast"
    )


if __name__ == "__main__":
    main()
