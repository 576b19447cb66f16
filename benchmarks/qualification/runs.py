"""Whole runs, started as a user starts them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from async_rl.composition.overrides import with_defaults

Numbers = dict[str, float]
_STEPS = 3
_NAME = "qualify"
_SMALL = [
    f"num_steps={_STEPS}",
    "buffer.groups_per_step=4",
    "evaluation.every_steps=0",
]


def here(scratch: Path, settings: list[str]) -> Numbers:
    """Run on this machine."""
    return _run(scratch, settings)


def over_ray(scratch: Path, settings: list[str]) -> Numbers:
    """Run on the Ray cluster that RAY_ADDRESS or this machine names."""
    numbers = _run(scratch, settings)
    numbers["nodes"] = float(num_alive_nodes())
    return numbers


def num_alive_nodes() -> int:
    """Return the machines of the cluster that RAY_ADDRESS or this machine names; 0 without one."""
    import ray  # a run on one machine needs no ray

    try:
        ray.init(address="auto", logging_level=logging.ERROR)
    except ConnectionError:
        return 0
    try:
        return sum(bool(node["Alive"]) for node in ray.nodes())
    finally:
        ray.shutdown()


def _run(scratch: Path, settings: list[str]) -> Numbers:
    own = [f"output_dir={scratch}", f"run_name={_NAME}"]
    given = with_defaults(own, with_defaults(settings, _SMALL))
    command = [sys.executable, "-m", "async_rl.launchers.cli", "launch", "conf=grpo_code", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout).strip()[-2000:])
    rows = (scratch / _NAME / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row) for row in rows]
    differences = [row["mismatch/engine_abs_mean"] for row in steps if _COMPARED in row]
    numbers = {"steps": float(len(steps))}
    return numbers | ({_COMPARED: max(differences)} if differences else {})


_COMPARED = "mismatch/engine_abs_mean"
