"""Inject faults into a real run for a chosen time, then audit its files.

Faults: kill -9 and SIGSTOP of every process (the supervisor too, and the gateway and the workers of
a run with agents), the end of all processes together, files damaged between two lives, an output
that is not read, a second resume of the live run (also with the mark of another process, as after a
change of the clock), unknown clients at every listener, and with --remote a reward server that
answers errors and garbage.

The faults are in chaos_faults.py, the audit in chaos_audit.py. The audit reads SQLite and
metrics.jsonl directly and shares no code with `async-rl ledger`.

Run: `python -m benchmarks.faults.chaos --minutes 30 --conf ppo_code --ranks 2 [key=value ...]`.
The certificate of a run with 20 kills: add `--faults 20 --fault "kill one" --keep`, then
`async-rl certify` with the directory that is kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.chaos_audit import audit, leftovers, reading
from benchmarks.faults.chaos_faults import KILL_WORKER, Chaos, reward_server
from benchmarks.faults.chaos_run import NO_PROGRESS_S, Run
from benchmarks.figures import figure

SETTINGS = (
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "generation.max_attempts=20",
    "generators.count=2",
    "evaluation.every_steps=10",
    "evaluation.num_prompts=8",
    "checkpoint.every_steps=3",
    "supervisor.max_restarts=1000",
    "timeouts.call_s=4",
    "monitoring.tensorboard_port=null",
    "num_steps=100000",
)
LAST_STEPS = 5


def attack(arguments: argparse.Namespace, directory: Path, settings: list[str]) -> list[str]:
    """Run until the time or the number of faults is over; return the problems."""
    rng = random.Random(arguments.seed)
    run = Run(directory, settings, rng)
    chaos = Chaos(run, rng)
    counts: collections.Counter[str] = collections.Counter()
    started_s = time.monotonic()
    try:
        if not run.until_progress(0):
            return [f"the run did not start: {run.last_line}"]
        names = arguments.fault or list(chaos.faults())
        if not run.workers():
            # Only runs with agents have them.
            names = [name for name in names if name != KILL_WORKER]
        while (
            time.monotonic() - started_s < 60 * arguments.minutes
            and counts.total() < arguments.faults
        ):
            # Every fault in turn first, then at random.
            number = counts.total()
            name = names[number] if number < len(names) else rng.choice(names)
            time.sleep(rng.uniform(0.5, 5))
            before = run.num_commits()
            if chaos.faults()[name]():
                counts[name] += 1
            print(f"{time.strftime('%H:%M:%S')}  {name}, after {before} commits", flush=True)
            if not run.until_progress(before):
                return [*chaos.problems, f"no progress after: {name} (see {run.run_dir}/logs)"]
        # The end has to be reached by a resume, as everything else.
        run.crash()
        with reading(run.run_dir) as store:
            query = "SELECT max(version) FROM steps WHERE undone_s IS NULL"
            last = store.execute(query).fetchone()[0] + LAST_STEPS
        run.resume(f"num_steps={last}")
        code = run.process.wait(NO_PROGRESS_S)
        problems = [*chaos.problems]
        if code != 0:
            problems.append(f"the run exited with code {code}")
        problems += audit(run.run_dir, groups_per_step=4, max_staleness=arguments.max_staleness)
        figure("faults", counts.total(), "")
        figure("steps of the surviving history", last, "")
        figure("minutes", (time.monotonic() - started_s) / 60, "min")
        return problems + leftovers(run.run_dir)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


def main() -> None:
    """Attack one run of each configuration; exit 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--faults", type=int, default=10**6, help="stop after this number")
    parser.add_argument("--conf", action="append", help="default: grpo_code, then ppo_code")
    parser.add_argument("--ranks", type=int, default=2, help="of the learner")
    parser.add_argument("--fault", action="append", help="only these; default: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--remote", action="store_true", help="rewards of a server that fails")
    parser.add_argument("--keep", action="store_true", help="keep the run's directory")
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    problems = []
    for conf in arguments.conf or ["grpo_code", "ppo_code"]:
        directory = Path(tempfile.mkdtemp(prefix=f"chaos-{conf}-"))
        with reward_server() as url:
            settings = [f"conf={conf}", *SETTINGS, f"learner.ranks={arguments.ranks}"]
            settings.append(f"buffer.max_staleness_versions={arguments.max_staleness}")
            if arguments.remote:
                settings += ["reward.terms.remote=remote", f"reward.terms.remote.url={url}"]
            found = attack(arguments, directory, [*settings, *arguments.settings])
        figure(f"{conf}, {arguments.ranks} ranks: broken promises", len(found), "", goal="0")
        for problem in found:
            print(f"  {problem}")
        if found or arguments.keep:
            print(f"  kept: {directory}")
        else:
            subprocess.run(["rm", "-r", str(directory)], check=True)
        problems += found
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
