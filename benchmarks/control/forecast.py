"""Measure how near forecasts are to runs, and the cost of a forecast.

Run: `python -m benchmarks.control.forecast [cost|play|random|rerun] [--launched] [--docs]`.
play: predicts 16 configurations from the recorded times of one run, and makes them. random: the
same for configurations drawn over all settings that `async-rl plan` takes (--seed), with the range
of each forecast. rerun: for five runs, really makes the three changes that `explain` names.
Engine, scoring and learner of these runs wait for known times (timed_device.py), so a busy machine
disturbs them little. Each run is a process (timed_run.py) and all run at once; --launched uses
`async-rl launch` instead, with all processes, messages, pushes and a verifier, two runs at once.
--keep DIR leaves the runs there and
uses those that are there already, so that a long table can be made in parts (--most). --docs writes
the table to benchmarks/results/forecast.md. cost: the time of a simulation with 4,096 generators.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import with_settings
from async_rl.core.frozen import frozen
from async_rl.runs.forecast.ranges import forecast, margin, own_run
from async_rl.runs.forecast.recorded import Recorded, Work
from async_rl.runs.forecast.reports import predict
from async_rl.runs.forecast.scenario import Profile, Scenario, Values, profile_of, with_values
from async_rl.runs.forecast.simulation import simulate
from async_rl.runs.status import config_of
from benchmarks.control.timed_device import Device
from benchmarks.control.timed_run import play
from benchmarks.figures import figure
from benchmarks.study import RESULTS

PAGE = RESULTS / "forecast.md"
DEVICE = "benchmarks.control.timed_device"
BASE: Values = {
    "generation.group_size": 4,
    "buffer.groups_per_step": 4,
    "generation.max_concurrent_groups": 4,
    "buffer.max_staleness_versions": 2,
    "data.max_response_tokens": 48,
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": 0,
}
FIXED = ("monitoring.tensorboard_port=null", "learner.optimizer.lr=1e-9", "recording=times")
TIMED = (
    f"generation.engine={DEVICE}:engine",
    f"algorithm.policy_loss={DEVICE}:loss",
    f"reward.terms.timed={DEVICE}:reward",
)
CASES: tuple[Values, ...] = (
    {"generators.count": 2},
    {"generators.count": 3, "buffer.max_staleness_versions": 4},
    {"buffer.max_staleness_versions": 0},
    {"buffer.max_staleness_versions": 1},
    {"generation.group_size": 2},
    {"generation.group_size": 8},
    {"buffer.groups_per_step": 8},
    {"data.max_response_tokens": 20},
    {"scoring_speed": 0.1},
    {"weights.push_every_steps": 2},
    {"learner_speed": 0.25},
    {"generation.max_concurrent_groups": 8, "buffer.max_staleness_versions": 4},
    {"generators.count": 2, "buffer.max_staleness_versions": 0, "data.max_response_tokens": 20},
    {"generators.count": 2, "weights.push_every_steps": 2, "scoring_speed": 0.2},
    {"reward.concurrency": 2, "scoring_speed": 0.5},
    {
        "verifiers.count": 2,
        "reward.concurrency": 1,
        "scoring_speed": 0.5,
        "buffer.max_staleness_versions": 0,
    },
)


RECORDED: Values = {"evaluation.every_steps": 6, "evaluation.num_prompts": 8}
"""The run whose times forecast the drawn configurations; without evaluations their time is unknown.
"""
NUM_DRAWN = 20
DRAWN: Mapping[str, Sequence[int]] = {
    "generators.count": (1, 1, 2, 3),
    "generation.max_concurrent_groups": (1, 2, 4, 8, 12),
    "generation.group_size": (2, 3, 4, 6, 8),
    "data.max_response_tokens": (12, 20, 32, 48),
    "buffer.groups_per_step": (2, 3, 4, 6),
    "buffer.max_staleness_versions": (0, 1, 2, 4),
    "weights.push_every_steps": (1, 1, 2, 3),
    "evaluation.every_steps": (0, 4, 6, 12),
    "learner.ranks": (1, 1, 1, 2),
    "verifiers.count": (1, 2),
    "reward.concurrency": (1, 2, 4, 8),
}


@frozen
class Job:
    """One run: its settings in addition to BASE, and its device."""

    settings: Values
    device: Device

    def changed(self, case: Values) -> Job:
        """Return the job with other settings and speeds."""
        settings = {key: value for key, value in case.items() if "." in key}
        return Job(settings={**self.settings, **settings}, device=self.device.at_speeds(case))

    def words(self, steps: int) -> list[str]:
        """Return the settings as words."""
        values = {**BASE, **self.settings, "num_steps": steps}
        return [*FIXED, *(f"{key}={value:g}" for key, value in values.items())]


RUNS: Mapping[str, Job] = {
    "slow generation": Job(settings={}, device=Device()),
    "slow learner, age 1": Job(
        settings={"buffer.max_staleness_versions": 1}, device=Device(loss_s=0.004)
    ),
    "slow scoring, age 0": Job(
        settings={"buffer.max_staleness_versions": 0}, device=Device(reward_s=1.0)
    ),
    "large groups, two in flight": Job(
        settings={
            "generation.group_size": 8,
            "generation.max_concurrent_groups": 2,
            "buffer.max_staleness_versions": 4,
        },
        device=Device(),
    ),
    "two calls of the scorer at once": Job(
        settings={"reward.concurrency": 2}, device=Device(reward_s=0.4)
    ),
}

Maker = Callable[[Mapping[str, Job]], dict[str, Profile]]


def _play(job: Job, steps: int, run_dir: Path) -> None:
    config = compose_unchecked("grpo_code", [*job.words(steps), TIMED[-1]])
    asyncio.run(play(config, run_dir, job.device))


def played(jobs: Mapping[str, Job], steps: int) -> dict[str, Profile]:
    """Make the runs in processes of their own, all at once."""
    with tempfile.TemporaryDirectory() as scratch:
        # Forked: imports take longer than the processor time of a whole run.
        forking = multiprocessing.get_context("fork")
        directories = {name: Path(scratch, str(n)) for n, name in enumerate(jobs)}
        processes = [
            forking.Process(target=_play, args=(job, steps, directories[name]))
            for name, job in jobs.items()
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return {name: profile_of(path, config_of(path)) for name, path in directories.items()}


def launched(jobs: Mapping[str, Job], steps: int, keep: Path) -> dict[str, Profile]:
    """Launch the runs that are not in this directory yet, two at once."""
    program = str(Path(sys.executable).with_name("async-rl"))

    def launch(job: Job) -> Profile:
        settings, device = job.words(steps), job.device.environment()
        scratch = keep / f"{zlib.crc32(repr((settings, device)).encode()):08x}"
        if not (scratch / "ended").exists():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            words = [*settings, *TIMED, f"output_dir={scratch}", "run_name=run"]
            with (scratch / "terminal").open("w+") as terminal:
                ended = subprocess.run(
                    [program, "launch", "conf=grpo_code", *words],
                    stdout=terminal,
                    stderr=terminal,
                    env={**os.environ, **device},
                )
                terminal.seek(0)
                if ended.returncode:
                    raise SystemExit(terminal.read())
            (scratch / "ended").touch()
        return profile_of(scratch / "run", config_of(scratch / "run"))

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(jobs, pool.map(launch, jobs.values()), strict=True))


def text_of(case: Values) -> str:
    """Return a case in the words of `async-rl plan`."""
    return " ".join(f"{key}={value:g}" for key, value in case.items()) or "the recorded run itself"


def accuracy(make: Maker, cases: Sequence[Values]) -> list[str]:
    """Predict each case from one run and make it; return the lines of a table."""
    base = RUNS["slow generation"]
    jobs = {text_of(case): base.changed(case) for case in ({}, *cases)}
    profiles = make(jobs)
    source = profiles[text_of({})]
    lines = ["| changed | predicted steps/s | measured | error |", "|---|---|---|---|"]
    worst, num_near = 0.0, 0
    for case in ({}, *cases):
        predicted = simulate(with_values(source, case), source.recorded).steps_per_s
        measured = profiles[text_of(case)].recorded.steps_per_s
        error = predicted / measured - 1
        lines.append(f"| {text_of(case)} | {predicted:.3f} | {measured:.3f} | {error:+.1%} |")
        if case:
            worst, num_near = max(worst, abs(error)), num_near + (abs(error) <= 0.1)
    lines += ["", f"{num_near} of {len(cases)} are within 10 %; the largest error is {worst:.1%}."]
    figure("configurations within 10 %", num_near, f"of {len(cases)}", goal="all")
    return lines


def drawn(number: int, seed: int) -> list[Values]:
    """Draw configurations over all settings that `async-rl plan` takes for such a run."""
    random = Random(seed)
    cases: list[Values] = []
    while len(cases) < number:
        case = {path: random.choice(values) for path, values in DRAWN.items()}
        # Otherwise admission waits for weights that are never pushed.
        if case["weights.push_every_steps"] <= case["buffer.max_staleness_versions"] + 1:
            cases.append(case)
    return cases


def random_cases(make: Maker, cases: Sequence[Values]) -> list[str]:
    """Forecast each case from one run, with its range, and make it; return the lines of a table."""
    base = RUNS["slow generation"].changed(RECORDED)
    jobs = {text_of(case): base.changed(case) for case in ({}, *cases)}
    profiles = make(jobs)
    source = profiles[text_of({})]
    error = margin(source, own_run(source))
    lines = [f"| {' | '.join(path.rpartition('.')[2] for path in DRAWN)} | forecast steps/hour |"]
    lines[0] += " range | measured | error |"
    lines.append("|---" * (len(DRAWN) + 4) + "|")
    errors, num_inside = [], 0
    for case in cases:
        found = forecast(source, case, error=error)
        measured = profiles[text_of(case)].recorded.steps_per_s
        errors.append(found.forecast.steps_per_s / measured - 1)
        is_inside = found.least <= measured <= found.most
        num_inside += is_inside
        rates = [each * 3600 for each in (found.forecast.steps_per_s, found.least, found.most)]
        cells = [*(f"{value:g}" for value in case.values()), f"{rates[0]:.0f}"]
        cells += [f"{rates[1]:.0f} to {rates[2]:.0f}{'' if is_inside else ', outside'}"]
        lines.append(f"| {' | '.join(cells)} | {measured * 3600:.0f} | {errors[-1]:+.1%} |")
    sizes = sorted(abs(each) for each in errors)
    median = statistics.median(sizes)
    lines += [
        "",
        f"{num_inside} of {len(cases)} are inside their range; the median error is {median:.1%},"
        f" the largest {sizes[-1]:.1%}. The range of a forecast with measured inputs is"
        f" +-{error:.1%}.",
    ]
    figure("configurations inside their range", num_inside, f"of {len(cases)}", goal="90 %")
    figure("median error", 100 * median, "%", goal="<= 6")
    return lines


def reruns(make: Maker, runs: Mapping[str, Job]) -> list[str]:
    """Make the changes that explain names for each run; return the lines of a table."""
    sources = make(runs)
    named = {name: predict(source)[1] for name, source in sources.items()}
    made = make(
        {
            f"{name}: {text_of(change.case)}": runs[name].changed(change.case)
            for name, changes in named.items()
            for change in changes
        }
    )
    lines = [
        "| run | change that explain names | predicted | measured |",
        "|---|---|---|---|",
    ]
    worst, num_ordered = 0.0, 0
    for name, changes in named.items():
        own = sources[name].recorded.steps_per_s
        gains = []
        for change in changes:
            text = text_of(change.case)
            gains.append(made[f"{name}: {text}"].recorded.steps_per_s / own - 1)
            lines.append(f"| {name} | {text} | {change.gain:+.1%} | {gains[-1]:+.1%} |")
            worst = max(worst, abs(change.gain - gains[-1]))
        # Changes whose forecasts differ by less than a point have no order.
        pairs = itertools.combinations(zip(changes, gains, strict=True), 2)
        num_ordered += all(
            first > second or one.gain - other.gain < 0.01
            for (one, first), (other, second) in pairs
        )
    lines += [
        "",
        f"The largest difference is {100 * worst:.1f} percentage points; the order is right for"
        f" {num_ordered} of {len(runs)} runs.",
    ]
    figure("largest difference of a gain", 100 * worst, "percentage points", goal="10")
    return lines


def write(part: str, lines: Sequence[str]) -> None:
    """Replace the table of this part on the page."""
    begin, end = f"<!-- benchmarks.control.forecast {part} -->\n", "<!-- end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise SystemExit(f"{PAGE} has no {begin}")
    PAGE.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n\n{end}{after}")


def cost(places: int, generators: int = 4096, groups_per_step: int = 1024) -> None:
    """Simulate 1,000 steps of generators and a learner of about equal speed; print the
    seconds. places: for scoring, in each of 64 verifiers; 0 is no limit.
    """
    work = Work(units=4.0, scoring_s=0.2, lengths=tuple(range(1, 9)), scores=(0.2,) * 8)
    recorded = Recorded(
        train=(work,) * 160,
        evaluation=(),
        beside=0.2,
        step_s=(1.0,) * 40,
        push_s=0.1,
        num_generators=1,
        num_warm=8,
        steps_per_s=1.0,
    )
    settings = {
        "generators.count": generators,
        "generation.max_concurrent_groups": 4,
        "buffer.groups_per_step": groups_per_step,
        "buffer.max_staleness_versions": 8,
        "evaluation.every_steps": 0,
        "num_steps": 1000,
        "verifiers.count": 64,
        "verifiers.cells": places or 10**6,
    }
    scenario = Scenario(config=with_settings(compose_unchecked("grpo_code"), settings))
    began_s = time.process_time()
    simulate(scenario, recorded)
    seconds = time.process_time() - began_s
    title = f"{generators} generators, 1,000 steps of {groups_per_step} groups of 8"
    figure(f"{title}, {64 * places or 'all'} places for scoring", seconds, "s", goal="120")


def main() -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", choices=("cost", "play", "random", "rerun"), nargs="?", default="cost"
    )
    parser.add_argument("--launched", action="store_true")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seed", type=int, default=1, help="of the drawn configurations")
    parser.add_argument("--most", type=int, default=99, help="only the first so many cases or runs")
    parser.add_argument("--keep", type=Path, help="directory of launched runs")
    given = parser.parse_args()
    if given.part == "cost":
        for places in (0, 64):
            cost(places)
        return
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:

        def make(jobs: Mapping[str, Job]) -> dict[str, Profile]:
            if given.launched:
                return launched(jobs, given.steps, given.keep or Path(scratch))
            return played(jobs, given.steps)

        if given.part == "play":
            lines = accuracy(make, CASES[: given.most])
        elif given.part == "random":
            lines = random_cases(make, drawn(min(given.most, NUM_DRAWN), given.seed))
        else:
            lines = reruns(make, dict(list(RUNS.items())[: given.most]))
    print("\n".join(lines))
    print(f"{time.monotonic() - began_s:.0f} s, load {os.getloadavg()[0]:.1f}")
    if given.docs:
        write(f"{given.part}{' --launched' if given.launched else ''}", lines)


if __name__ == "__main__":
    main()
