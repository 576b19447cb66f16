"""Distill a trained adapter of the embedded model into a new one, on the student's own samples, of
an exact age: the reverse KL per token is the (negative) advantage.

A service with the embedded model trains the teacher by the rewards of the hidden tests. Then each
student starts from the embedded model. A step trains on samples that are `age` versions old, with
importance_sampling. The advantage of a token is log teacher - log student, where the student is
- `recomputed`: the weights of the step, by a call of the learner before it;
- `sampled`: the weights that drew the token, as tinker-cookbook does.

Run: `python -m benchmarks.learning.service_distillation run [--ages 0 2 8] [--seeds 0 1 2]`, then
`... report`, which prints the table.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

import async_rl
from async_rl.core.types import Verdict
from benchmarks.embedded.list_functions import Spec, hidden_tests, split, wording
from benchmarks.study import RESULTS, Recorded, recorded

FILE = RESULTS / "service_distillation.jsonl"
RANK, NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 16, 8, 8, 48
TEACHER_STEPS, TEACHER_LR, STEPS, LR = 40, 2e-3, 24, 2e-3
NUM_HELD_OUT = 32
WAYS = ("recomputed", "sampled")


class Task:
    """The embedded task: prompts, and the rewards of programs. seed: of the order of prompts."""

    def __init__(self, session: async_rl.Session, verifier: async_rl.Verifier, seed: int) -> None:
        self._tokenizer = session.tokenizer
        self._verifier = verifier
        train, self.held_out = split()
        random.Random(seed).shuffle(train)
        self._train = iter(train * 10)
        self._known: dict[tuple[Spec, str], float] = {}

    def batch(self) -> list[Spec]:
        """Return the specs of the next step."""
        return [next(self._train) for _ in range(NUM_PROMPTS)]

    def prompt(self, spec: Spec) -> list[int]:
        """Return the prompt of a spec."""
        ids: list[int] = self._tokenizer.encode(wording(spec, 0)).ids
        return ids

    def reward(self, spec: Spec, drawn: async_rl.Drawn) -> float:
        """Return 1 if all tests pass."""
        code = self._tokenizer.decode(drawn.tokens.tolist())
        if (spec, code) not in self._known:
            verdict = self._verifier.check(code, hidden_tests(spec).tests).verdict
            self._known[spec, code] = float(verdict == Verdict.PASS)
        return self._known[spec, code]

    def rewards(self, specs: Sequence[Spec], groups: Sequence[Any]) -> list[np.ndarray]:
        """Return the rewards of each group."""
        pairs = zip(specs, groups, strict=True)
        return [np.array([self.reward(spec, it) for it in group]) for spec, group in pairs]


def train_teacher(session: async_rl.Session, task: Task) -> list[float]:
    """Train by rewards; return the mean reward of each step."""
    curve = []
    for _ in range(TEACHER_STEPS):
        specs = task.batch()
        groups = draw(session, task, specs)
        batch = []
        rewards = task.rewards(specs, groups)
        for group, reward in zip(groups, rewards, strict=True):
            gains = reward - reward.mean()
            batch += [it.datum(gain) for it, gain in zip(group, gains, strict=True)]
        session.forward_backward(batch, "importance_sampling")
        session.step(TEACHER_LR)
        curve.append(float(np.mean(rewards)))
    return curve


def draw(session: async_rl.Session, task: Task, specs: Sequence[Spec]) -> Any:
    """Sample each prompt with the present weights."""
    prompts = [task.prompt(spec) for spec in specs]
    return session.sample(prompts, num_samples=NUM_SAMPLES, max_tokens=MAX_TOKENS)


def logprobs_of(session: async_rl.Session, drawn: Sequence[async_rl.Drawn]) -> list[np.ndarray]:
    """Return the log-probs of sampled tokens under the weights of a session. Weights of 0 make the
    gradient 0.
    """
    rows = []
    for it in drawn:
        row = it.datum(0.0)
        targets = row.inputs["target_tokens"]
        inputs = {"target_tokens": targets, "weights": np.zeros(len(targets), np.float32)}
        rows.append(async_rl.Datum(tokens=row.tokens, inputs=inputs))
    found, _ = session.forward_backward(rows, "cross_entropy")
    return [row[-len(it.tokens) :] for row, it in zip(found, drawn, strict=True)]


def distill(
    student: async_rl.Session, teacher: async_rl.Session, task: Task, way: str, age: int
) -> list[dict[str, float]]:
    """Return the reverse KL per token of each trained batch, and of the end: of fresh samples of
    held-out prompts, with the share that passes.
    """
    rows = []
    waiting = collections.deque(draw(student, task, task.batch()) for _ in range(age))
    for _ in range(STEPS):
        waiting.append(draw(student, task, task.batch()))
        drawn = [it for group in waiting.popleft() for it in group]
        wanted = logprobs_of(teacher, drawn)
        sampled = [it.logprobs for it in drawn]
        own = logprobs_of(student, drawn) if way == "recomputed" else sampled
        batch = []
        for it, of_teacher, of_student in zip(drawn, wanted, own, strict=True):
            row = it.datum(0.0)
            row.inputs["advantages"][-len(it.tokens) :] = of_teacher - of_student
            batch.append(row)
        _, metrics = student.forward_backward(batch, "importance_sampling")
        student.step(LR)
        gaps = np.concatenate(sampled) - np.concatenate(wanted)
        rows.append({"kl": float(gaps.mean()), "age": metrics["age_mean:mean"]})
    specs = task.held_out[:NUM_HELD_OUT]
    groups = draw(student, task, specs)
    drawn = [it for group in groups for it in group]
    gaps = np.concatenate([it.logprobs for it in drawn]) - np.concatenate(
        logprobs_of(teacher, drawn)
    )
    passes = float(np.mean(task.rewards(specs, groups)))
    return [*rows, {"held_out_kl": float(gaps.mean()), "held_out_passes": passes}]


def run(options: argparse.Namespace) -> None:
    """Train the teacher, then every student that was not recorded."""
    with tempfile.TemporaryDirectory() as directory, async_rl.Verifier() as verifier:
        service = async_rl.launch(
            "serve",
            {
                "output_dir": directory,
                "run_name": "service",
                "monitoring.tensorboard_port": None,
            },
        )
        try:
            with service.session(rank=RANK) as teacher:
                task = Task(teacher, verifier, seed=0)
                curve = train_teacher(teacher, task)
                specs = task.held_out[:NUM_HELD_OUT]
                passes = np.mean(task.rewards(specs, draw(teacher, task, specs)))
                rows: list[dict[str, float]] = [{"reward": value} for value in curve]
                Recorded(FILE, "teacher").write([*rows, {"held_out_passes": float(passes)}])
                for seed in options.seeds:
                    for age in options.ages:
                        for way in WAYS:
                            record = Recorded(FILE, f"{way}-{age}-{seed}")
                            if record.exists():
                                continue
                            with service.session(rank=RANK) as student:
                                task = Task(student, verifier, seed)
                                record.write(distill(student, teacher, task, way, age))
        finally:
            service.stop(now=True)


def table() -> str:
    """Return the table: of each age and way the mean of the seeds and their standard deviation."""
    found = recorded(FILE)
    text = "| age | student's log-probs | reverse KL per token | passes | KL of half the steps |\n"
    text += "|---|---|---|---|---|\n"
    ages = sorted({int(name.split("-")[1]) for name in found if "-" in name})
    for age in ages:
        for way in WAYS:
            runs = [rows for name, rows in found.items() if name.startswith(f"{way}-{age}-")]
            columns = (
                [rows[-1]["held_out_kl"] for rows in runs],
                [rows[-1]["held_out_passes"] for rows in runs],
                [statistics.mean(row["kl"] for row in rows[STEPS // 2 : STEPS]) for rows in runs],
            )
            cells = [f"{statistics.mean(x):.4f} +- {statistics.stdev(x):.4f}" for x in columns]
            text += f"| {age} | {way} | {' | '.join(cells)} |\n"
    return text


def main() -> None:
    """Run what was not recorded, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--ages", nargs="+", type=int, default=(0, 2, 8))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.command == "report":
        sys.stdout.write(table())
    else:
        run(options)


if __name__ == "__main__":
    main()
