"""Train SmolLM2 on the arithmetic of tinker-cookbook in two ways: its unmodified recipe through a
training service, and the loop of `conf=real` on the same problems.

Both have the problems in the same order, the same prompts, the same reward, an adapter of rank 32,
Adam with the same values, and samples of the newest weights. A repetition differs in its samples
and in the start of its adapter.

Run: `python -m benchmarks.learning.service_arithmetic run [--ways service own] [--seeds 0 1 2]`,
then `... report`, which prints the table. It needs the model of `make real` and
a directory with tinker-cookbook 0.6.1 and what it imports:
`uv pip install --target DIR tinker-cookbook==0.6.1 math-verify pylatexenc`; `--cookbook DIR` names
it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.study import RESULTS, Recorded, recorded

if TYPE_CHECKING:
    from async_rl.rewards.verifier.protocol import RewardSample

ROOT = Path(__file__).resolve().parents[2]
FILE = RESULTS / "service_arithmetic.jsonl"
NUM_GROUPS, GROUP_SIZE, NUM_STEPS, MAX_TOKENS, LR = 8, 8, 24, 8, 3e-4
_WINDOW = 6
"""Steps at each end of a curve whose mean is in the table."""


def rows() -> Iterator[dict[str, Any]]:
    """Yield the problems of the recipe in its order, as prompts with its renderer."""
    for batch in range(NUM_STEPS):
        rng = np.random.RandomState(batch)
        for index in range(NUM_GROUPS):
            x, y = rng.randint(0, 101), rng.randint(0, 101)
            turns = (
                ("user", "What is 4 + 5?"),
                ("assistant", "9"),
                ("user", f"What is {x} + {y}?"),
            )
            text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
            yield {
                "id": f"{batch}/{index}",
                "prompt": f"{text}<|im_start|>assistant\n",
                "answer": str(x + y),
            }


def reward(sample: RewardSample) -> float:
    """Return 1 for a right answer, less 0.1 without the end of a turn, as the recipe does."""
    found = re.findall(r"-?\d+", sample.response.replace(",", ""))
    is_right = bool(found) and found[-1] == sample.row["answer"]
    return float(is_right) - 0.1 * sample.is_truncated


def plain_model(model: Path, directory: Path) -> Path:
    """Return the model without its chat template: the rows are rendered."""
    directory.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (directory / file.name).symlink_to(file)
    return directory


def own(model: Path, scratch: Path, seed: int) -> list[float]:
    """Return the mean reward of each step of a launched run."""
    import async_rl

    run = async_rl.launch(
        "real",
        {
            "algorithm": "dr_grpo",
            "model.path": str(plain_model(model, scratch / model.name)),
            "model.dtype": "float32",
            "model.lora": "lora",
            "model.lora.rank": 32,
            "data.order": "sequential",
            "data.max_response_tokens": MAX_TOKENS,
            "data.val_files": [],
            "generation.group_size": GROUP_SIZE,
            "buffer.groups_per_step": NUM_GROUPS,
            "buffer.max_staleness_versions": 0,
            "learner.optimizer": {"lr": LR, "warmup_steps": 0, "grad_clip": 1e6, "eps": 1e-12},
            "evaluation.every_steps": 0,
            "checkpoint.every_steps": NUM_STEPS,
            "num_steps": NUM_STEPS,
            "seed": seed,
            "output_dir": str(scratch),
            "monitoring.tensorboard_port": None,
        },
        data=rows,
        reward=reward,
    )
    try:
        return [float(step["reward/mean"]) for step in run.steps()]
    finally:
        run.stop(now=True)


def service(model: Path, scratch: Path, cookbook: Path) -> list[float]:
    """Return the mean reward of each step of the recipe."""
    import async_rl
    from async_rl.service.address import address_of

    run = async_rl.launch(
        "serve",
        {
            "model.path": str(model),
            "data": {"max_prompt_tokens": 96, "max_response_tokens": 32},
            "output_dir": str(scratch),
            "run_name": "service",
            "monitoring.tensorboard_port": None,
        },
    )
    # The recipe reads model and tokenizer from one name of two parts.
    (scratch / "local").mkdir()
    (scratch / "local" / model.name).symlink_to(model)
    options = {
        "env": "arithmetic",
        "model_name": f"local/{model.name}",
        "renderer_name": "qwen3_instruct",
        "loss_fn": "importance_sampling",
        "groups_per_batch": NUM_GROUPS,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "learning_rate": LR,
        "max_steps": NUM_STEPS,
        "eval_every": 0,
        "save_every": 0,
        "log_path": scratch / "log",
        "behavior_if_log_dir_exists": "delete",
    }
    address = address_of(scratch / "service")
    try:
        with run.session():  # it waits until the service answers
            subprocess.run(
                [sys.executable, "-m", "tinker_cookbook.recipes.math_rl.train"]
                + [f"{name}={value}" for name, value in options.items()],
                cwd=scratch,
                env={
                    **os.environ,
                    "PYTHONPATH": str(cookbook),
                    "HF_HUB_OFFLINE": "1",
                    "TINKER_BASE_URL": f"http://127.0.0.1:{address.port}",
                    "TINKER_API_KEY": address.api_key,
                },
                check=True,
            )
    finally:
        run.stop(now=True)
    lines = (scratch / "log" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line).get("env/all/reward/total") for line in lines]
    return [value for value in found if value is not None]


def table() -> str:
    """Return the table: means and standard deviations, over the seeds of each way, of the mean
    reward at both ends of the curves.
    """
    text = "| way | seeds | first steps | last steps | all steps |\n|---|---|---|---|---|\n"
    names = {"service": "the recipe through a service", "own": "`conf=real`'s own loop"}
    for way, name in names.items():
        found = [r for key, r in recorded(FILE).items() if key.startswith(f"{way}-")]
        curves = [[row["reward"] for row in rows_of] for rows_of in found]
        cells = [
            [statistics.mean(curve[part]) for curve in curves]
            for part in (slice(_WINDOW), slice(-_WINDOW, None), slice(None))
        ]
        shown = [f"{statistics.mean(x):.3f} +- {statistics.stdev(x):.3f}" for x in cells]
        text += f"| {name} | {len(curves)} | {' | '.join(shown)} |\n"
    return text


def main() -> None:
    """Run what was not recorded, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--model", type=Path, default=ROOT / "build/real/SmolLM2-135M-Instruct")
    parser.add_argument("--cookbook", type=Path, default=ROOT / "build/cookbook")
    parser.add_argument("--ways", nargs="+", choices=("service", "own"), default=("service", "own"))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    options = parser.parse_args()
    if options.command == "report":
        sys.stdout.write(table())
        return
    for seed in options.seeds:
        for way in options.ways:
            record = Recorded(FILE, f"{way}-{seed}")
            if record.exists():
                continue
            with tempfile.TemporaryDirectory() as directory:
                scratch, model = Path(directory), options.model.resolve()
                if way == "own":
                    curve = own(model, scratch, seed)
                else:
                    curve = service(model, scratch, options.cookbook.resolve())
            record.write([{"reward": value} for value in curve])


if __name__ == "__main__":
    main()
