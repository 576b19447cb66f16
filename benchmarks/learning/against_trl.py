"""Compare the training time to a held-out pass rate with the time of TRL's GRPOTrainer.

Run: `python -m benchmarks.learning.against_trl [--tasks embedded real] [--seeds 0 1 2] [--dtypes
float32 bfloat16]`; hours for the real model. Both sides train the same model on the same prompts
with the same rewards, batch, learning rate and cores, seed by seed in turn. Neither evaluates while
it trains: each saves its policy every few steps, and `async-rl eval` measures them afterwards, in
order, up to the first that reaches the target. Saving is not counted for TRL, which stops for it.
In bfloat16 TRL keeps weights in float32 and computes by autocast, as its documentation advises. TRL
scores with this project's verifier; a second ratio leaves that time out, as if its rewards cost
nothing, which is less than any reward in its process can cost.

TRL is optional: without the packages in build/adapters (`make adapters`), or in the directory of
--packages, nothing is compared. The task "real" needs the model of `make real`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.core.types import AnswerTest, Prompt, Verdict
from async_rl.data.model_files import prepare_model
from async_rl.launchers.api.verifier import Verifier
from async_rl.rewards.responses import is_right
from benchmarks.figures import figure

ROOT = Path(__file__).resolve().parents[2]
CONFS = {"embedded": "grpo_code", "real": "real"}
TARGETS = {"embedded": 0.80, "real": 0.60}
NUM_STEPS = {"embedded": 60, "real": 40}
SAVED_EVERY = {"embedded": 4, "real": 5}
DTYPES = ("float32", "bfloat16")
GOALS = {"embedded": 0.4, "real": 0.15}
"""Most of TRL's time that this project may take."""
_COMMAND = str(Path(sys.executable).with_name("async-rl"))
_EVAL = ("evaluation.num_samples=1", "evaluation.num_prompts=128", "--json")

Saved = dict[int, tuple[float, float, list[str]]]
"""Per saved step: seconds of training, seconds of these in which training waited for rewards, and
the arguments of `async-rl eval` for its policy.
"""
Curve = dict[int, tuple[float, float, float]]
"""Per measured step: seconds of training and for rewards, held-out pass rate."""


def settings(task: str, seed: int, num_steps: int, dtype: str) -> list[str]:
    """Return the settings that both sides have in common."""
    words = [f"conf={CONFS[task]}", f"seed={seed}", f"num_steps={num_steps}"]
    return [*words, f"model.dtype={dtype}"]


def train_ours(task: str, words: list[str], num_steps: int, scratch: Path) -> Saved:
    """Train with this project."""
    every = SAVED_EVERY[task]
    command = [_COMMAND, "launch", *words, f"output_dir={scratch}"]
    command += ["run_name=ours", "evaluation.every_steps=0", f"checkpoint.every_steps={every}"]
    command += [f"checkpoint.keep={num_steps}", "checkpoint.every_minutes=0"]
    command += ["monitoring.tensorboard_port=null"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    run = scratch / "ours"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    begin_s = rows[1]["time_s"] - rows[1]["time/step_s"]
    return {
        step: (rows[step]["time_s"] - begin_s, 0.0, [f"{run}/checkpoints/step_{step:06d}"])
        for step in range(every, num_steps + 1, every)
    }


def train_trl(task: str, words: list[str], scratch: Path, packages: Path) -> Saved:
    """Train with TRL, in a process that alone has its packages."""
    path = os.pathsep.join([str(packages), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.learning.against_trl", "--child", str(scratch)]
    command += ["--tasks", task, "--settings", *words[1:]]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    seconds = json.loads((scratch / "seconds.json").read_text())
    return {
        int(step): (passed_s, rewards_s, [str(scratch / step), f"conf={CONFS[task]}"])
        for step, (passed_s, rewards_s) in seconds.items()
    }


def measured(saved: Saved, target: float) -> Curve:
    """Return the held-out pass rates of the saved policies, up to the first that is good enough."""
    curve: Curve = {}
    for step, (passed_s, rewards_s, words) in saved.items():
        command = [_COMMAND, "eval", *words, *_EVAL]
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        curve[step] = passed_s, rewards_s, float(json.loads(done.stdout)["eval/pass_at_1"])
        if curve[step][-1] >= target:
            break
    return curve


def child(task: str, words: list[str], out: Path) -> None:
    """Train with TRL in this process; save models and the seconds until each of them."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from async_rl.data.prompts import train_prompts

    config = compose(CONFS[task], words)
    start = prepare_model(config, lambda *_: None)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(start)
    known = {p.text: p for p in train_prompts(config, tokenizer)}

    class Saving(TrainerCallback):
        """Saves the model every few steps, and does not count the time of it."""

        def __init__(self) -> None:
            self.begin_s = time.perf_counter()
            self.rewards_s = 0.0
            self.seconds: dict[int, tuple[float, float]] = {}

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.begin_s = time.perf_counter()

        def on_step_end(self, _: object, state: Any, *__: object, **given: Any) -> None:
            if state.global_step % SAVED_EVERY[task]:
                return
            stopped_s = time.perf_counter()
            self.seconds[state.global_step] = stopped_s - self.begin_s, self.rewards_s
            target = out / str(state.global_step)
            given["model"].save_pretrained(target)
            for file in start.iterdir():
                if file.is_file() and not (target / file.name).exists():
                    shutil.copy(file, target)
            self.begin_s += time.perf_counter() - stopped_s

    saving = Saving()
    with Verifier() as verifier:

        def rewards(prompts: list[str], completions: list[str], **_: object) -> list[float]:
            asked_s = time.perf_counter()
            pairs = zip(prompts, completions, strict=True)
            scores = [score(verifier, known[text], response) for text, response in pairs]
            saving.rewards_s += time.perf_counter() - asked_s
            return scores

        trainer = GRPOTrainer(
            model=str(start),
            processing_class=tokenizer,
            reward_funcs=rewards,
            args=GRPOConfig(**trl_settings(config, out)),
            train_dataset=Dataset.from_list([{"prompt": text} for text in known]),
            callbacks=[saving],
        )
        trainer.train()
    (out / "seconds.json").write_text(json.dumps(saving.seconds))


def trl_settings(config: RunConfig, out: Path) -> dict[str, Any]:
    """Return the arguments of GRPOConfig that correspond to the configuration."""
    optimizer, size = config.learner.optimizer, config.generation.group_size
    return {
        "output_dir": str(out / "trainer"),
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": config.buffer.groups_per_step * size,
        "num_generations": size,
        "max_completion_length": config.data.max_response_tokens,
        "temperature": config.generation.temperature,
        "beta": 0.0,
        "loss_type": "dapo",  # a mean over all tokens of the batch, as aggregation=token_mean
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.grad_clip,
        "gradient_checkpointing": False,
        "max_steps": config.num_steps,
        "seed": config.seed,
        "use_cpu": True,
        "bf16": config.model.dtype == "bfloat16",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def score(verifier: Verifier, prompt: Prompt, response: str) -> float:
    """Return 1 if the response passes the row's tests, else 0."""
    tests = prompt.problem.tests
    answers = [test for test in tests if isinstance(test, AnswerTest)]
    if answers:
        return float(all(is_right(test, response) for test in answers))
    verdict = verifier.check(response, tests, setup=prompt.problem.setup).verdict
    return float(verdict is Verdict.PASS)


def seconds_to(curve: Curve, target: float) -> tuple[float, float]:
    """Return the seconds of training until the first saved policy that reaches the target, and
    those without the time for rewards.
    """
    for passed_s, rewards_s, rate in curve.values():
        if rate >= target:
            return passed_s, passed_s - rewards_s
    return math.nan, math.nan


def why_skipped(task: str, packages: Path) -> str:
    """Return why the task cannot be compared; empty if it can."""
    if task == "real" and not (ROOT / "build/real/SmolLM2-135M-Instruct").is_dir():
        return "task real is skipped: its model is not there; make real"
    if not (packages / "trl").is_dir() and importlib.util.find_spec("trl") is None:
        return f"nothing is compared: TRL is not installed in {packages}; make adapters"
    return ""


def compare(task: str, seed: int, dtype: str, num_steps: int, packages: Path) -> None:
    """Train with both, and print the curves and the ratios of the times."""
    target, reason = TARGETS[task], why_skipped(task, packages)
    if reason:
        print(reason)
        return
    times = []
    words, title = settings(task, seed, num_steps, dtype), f"{task} in {dtype}, seed {seed}"
    for name in ("async_rl", "trl"):
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            if name == "trl":
                saved = train_trl(task, words, scratch, packages)
            else:
                saved = train_ours(task, words, num_steps, scratch)
            curve = measured(saved, target)
        shown = "  ".join(f"{k}:{rate:.2f}@{s:.0f}s" for k, (s, _, rate) in curve.items())
        print(f"{title} {name}: {shown}", flush=True)
        last = max(saved)
        figure(f"{title}, {name}: steps per second", last / saved[last][0], "1/s")
        times.append(seconds_to(curve, target))
        figure(f"{title}, {name}: training to {target:.2f} held-out", times[-1][0], "s")
    goal = f"at most {GOALS[task]}"
    (ours_s, _), (theirs_s, without_rewards_s) = times
    figure(f"{title}: share of TRL's time", ours_s / theirs_s, "1", goal=goal)
    figure(f"{title}: share of TRL's time without rewards", ours_s / without_rewards_s, "1")


def main() -> None:
    """Compare on all tasks and seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="+", default=["embedded"], choices=list(CONFS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="instead of the task's number")
    parser.add_argument("--packages", type=Path, default=ROOT / "build/adapters")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPES)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.tasks[0], given.settings, given.child)
        return
    for task, seed, dtype in itertools.product(given.tasks, given.seeds, given.dtypes):
        num_steps = given.steps or NUM_STEPS[task]
        compare(task, seed, dtype, num_steps, given.packages.absolute())


if __name__ == "__main__":
    main()
