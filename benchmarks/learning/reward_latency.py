"""Compare the learner steps per second with reward functions of 50 ms and of 2 s.

Phases alternate within one run. The function sleeps for the seconds written in a file, as if it
waited for a remote service. Samples are scored while others are generated and trained, so a slow
function should not reduce the rate as long as buffer.max_staleness_versions leaves room for the
batches that are being scored. By Little's law their number is seconds times steps per second; the
batches that are generated and trained come in addition. The figures include this bound.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.control.live_run import LiveRun
from benchmarks.figures import figure

DELAYS_S = (0.05, 2.0)
LEFT_OUT = 8
"""Steps after a change of phase whose samples may have been scored in the previous phase."""
SETTINGS = [
    "conf=grpo_code",
    "num_steps=4000",
    "buffer.max_staleness_versions=8",
    "generation.max_concurrent_groups=64",
    "reward.terms.tests=tests",
    "reward.terms.slow={function}",
    "reward.terms.slow.weight=0",
    "reward.concurrency=1024",
]
FUNCTION = """
import asyncio
from pathlib import Path

async def slow(sample):
    await asyncio.sleep(float(Path({file!r}).read_text()))
    return 0.0
"""


def phase(run: LiveRun, steps: int) -> float:
    """Return the steps per second over `steps` steps.

    Steps whose samples may have been scored in the previous phase are skipped.
    """
    first = run.step() + LEFT_OUT
    run.wait_for(first + steps)
    rows = [row for row in run.rows() if first < row["step"] <= first + steps]
    return len(rows) / sum(row["time/step_s"] for row in rows)


def main() -> None:
    """Measure and print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps per phase")
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
