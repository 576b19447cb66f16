"""Learner steps per second with a reward function of 50 ms and with one of 2 s, in phases that
alternate within one run.

The function sleeps (it asks somebody else) as long as a file says; samples are scored while others
are generated and trained, so the loop should not notice, as long as buffer.max_staleness_versions
leaves room for what is being scored: by Little's law seconds times steps per second, in batches,
beside those that are generated and trained. Printed with the bound.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.figures import figure
from benchmarks.live_run import LiveRun

DELAYS_S = (0.05, 2.0)
LEFT_OUT = 8
"""Steps after a change of phase whose samples may have been scored in the phase before."""
SETTINGS = [
    "conf=grpo_code",
    "num_steps=4000",
    "buffer.max_staleness_versions=8",
    "generation.max_concurrent_groups=64",
    "reward.fns=[tests,{function}]",
    "reward.weights=[1,0]",
    "reward.concurrency=1024",
    "verifiers.queue_size=4096",
]
FUNCTION = """
import asyncio
from pathlib import Path

async def slow(sample):
    await asyncio.sleep(float(Path({file!r}).read_text()))
    return 0.0
"""


def phase(run: LiveRun, steps: int) -> float:
    """Steps per second over so many steps, after those that the phase before may have scored."""
    first = run.step() + LEFT_OUT
    run.wait_for(first + steps)
    rows = [row for row in run.rows() if first < row["step"] <= first + steps]
    return len(rows) / sum(row["time/step_s"] for row in rows)


def main() -> None:
    """Prints both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=12, help="steps that are counted in each phase"
    )
    given = parser.parse_args()
    rates: dict[float, list[float]] = {delay_s: [] for delay_s in DELAYS_S}
    with tempfile.TemporaryDirectory() as scratch:
        file, function = Path(scratch) / "delay_s", Path(scratch) / "slow.py"
        file.write_text(str(DELAYS_S[0]))
        function.write_text(FUNCTION.format(file=str(file)))
        with LiveRun(
            scratch, [setting.format(function=f"{function}:slow") for setting in SETTINGS]
        ) as run:
            run.wait_for(5)
            for _ in range(given.rounds):
                for delay_s in DELAYS_S:
                    file.write_text(str(delay_s))
                    rates[delay_s].append(phase(run, given.steps))
                    print(f"{delay_s:g} s reward: {rates[delay_s][-1]:.2f} steps/s", flush=True)
    fast, slow = (statistics.median(rates[delay_s]) for delay_s in DELAYS_S)
    figure("steps with a reward function of 50 ms", fast, "1/s")
    figure("steps with a reward function of 2 s", slow, "1/s")
    figure(
        "batches that a 2 s reward keeps, of max_staleness_versions + 1 = 9",
        DELAYS_S[1] * fast,
        "batches",
    )
    figure("2 s against 50 ms", slow / fast, "x", goal="at least 0.9")


if __name__ == "__main__":
    main()
