"""Kill processes of `conf=agent_code` while it learns; audit it and compare its result.

kill -9 of each role in turn: generator, gateway, a worker of environments, buffer, learner,
verifier. Each kill waits until the run has committed a step since the previous fault. The run then
finishes, and its held-out curve is written with the curves of the undisturbed runs
(benchmarks/learning/agent_learning.py). It may be below none of them by more than the noise.

The engine is the one of transformers, whose restart takes seconds.

Run: `python -m benchmarks.faults.chaos_agents [--kills 20] [--seed 0] [key=value ...]`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.chaos_audit import audit, leftovers
from benchmarks.faults.chaos_faults import KILL_WORKER, Chaos
from benchmarks.faults.chaos_run import COMMAND, NO_PROGRESS_S, Run
from benchmarks.figures import figure
from benchmarks.learning.agent_learning import FILE, KILLED, evaluated, read_rows
from benchmarks.study import Row, recorded

ROLES = ("generator", "gateway", KILL_WORKER, "buffer", "learner", "verifier")
SETTINGS = (
    "conf=agent_code",
    "generation.engine=hf",
    # A learner that is killed goes back to its checkpoint.
    "checkpoint.every_steps=3",
    "generation.max_attempts=20",
    "supervisor.max_restarts=1000",
    "timeouts.call_s=4",
    "monitoring.tensorboard_port=null",
)
GROUPS_PER_STEP, MAX_STALENESS = 16, 2
"""Those of the configuration."""


def attack(run: Run, num_kills: int, rng: random.Random) -> Iterator[str]:
    """Kill, let the run finish, and yield a sentence for each broken promise."""
    chaos = Chaos(run, rng)
    counts: collections.Counter[str] = collections.Counter()
    started_s = time.monotonic()
    if not run.until_progress(0):
        yield f"the run did not start: {run.last_line}"
        return
    while counts.total() < num_kills:
        role = ROLES[counts.total() % len(ROLES)]
        time.sleep(rng.uniform(0.2, 2))
        before = run.num_commits()
        if run.process.poll() is not None:
            yield f"the run finished after {counts.total()} kills; give it more steps"
            return
        if chaos.kill(role):
            counts[role] += 1
            print(f"{time.strftime('%H:%M:%S')}  {role}, after {before} commits", flush=True)
        if not run.until_progress(before):
            yield f"no progress after: {role} (see {run.run_dir}/logs)"
            return
    code = run.process.wait(NO_PROGRESS_S + 600)
    if code:
        yield f"the run exited with code {code}"
    yield from audit(run.run_dir, groups_per_step=GROUPS_PER_STEP, max_staleness=MAX_STALENESS)
    checked = subprocess.run(
        [COMMAND, "ledger", str(run.run_dir), "--audit"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(checked.stdout.strip().splitlines()[-1])
    if checked.returncode:
        yield "async-rl ledger --audit found problems"
    figure("agent_code: kills", counts.total(), "", goal="20")
    figure("agent_code: steps committed, undone ones included", run.num_commits(), "")
    figure("agent_code: minutes", (time.monotonic() - started_s) / 60, "min")
    yield from leftovers(run.run_dir)


def compare(rows: list[Row]) -> Iterator[str]:
    """Yield a sentence if the curve is below the undisturbed runs, after as many steps."""
    others = {name: found for name, found in recorded(FILE).items() if name != KILLED.name}
    shared = {row["step"] for row in rows}
    for found in others.values():
        shared &= {row["step"] for row in found}
    last = sorted(shared)[-3:]
    if not others or not last:
        return
    mine = mean(rows, last)
    figure(f"agent_code: held-out pass@1 with kills, steps {last}", mine, "share")
    ends = [mean(found, last) for found in others.values()]
    for name, end in zip(others, ends, strict=True):
        figure(f"agent_code: the same of {name}, undisturbed", end, "share")
    # Rows carry 1.96 standard errors; of the mean of three evaluations.
    noise = rows[-1]["eval/pass_at_1_error"] / 3**0.5
    if mine < min(ends) - noise:
        yield f"learning was harmed: {mine:.3f} is below the undisturbed runs and their noise"


def mean(rows: list[Row], steps: list[int]) -> float:
    """Return the mean of the evaluations of these steps."""
    rates = [float(row["eval/pass_at_1"]) for row in rows if row["step"] in steps]
    return sum(rates) / len(rates)


def main() -> None:
    """Attack one run; exit 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    directory = Path(tempfile.mkdtemp(prefix="chaos-agent_code-"))
    run = Run(directory, [*SETTINGS, f"seed={given.seed}", *given.settings], rng)
    try:
        problems = list(attack(run, given.kills, rng))
        rows = evaluated(read_rows(run.run_dir))
        problems += compare(rows)
        KILLED.write(rows)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
    figure("agent_code: broken promises", len(problems), "", goal="0")
    for problem in problems:
        print(f"  {problem}")
    if problems:
        print(f"  kept: {directory}")
    else:
        shutil.rmtree(directory)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
