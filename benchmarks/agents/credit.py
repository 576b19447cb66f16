"""Train a run of agents that use every form of credit at once, in a jail per session, and compare
the ledger with what the agents asked for.

Run: `python -m benchmarks.agents.credit [--steps N]` (CPU, the embedded model; some minutes).

Each sample is a program in a jail (credit_program.py) that makes five calls: of a planner (by the
model's name), twice of a solver (by a header), of a judge (not trained, by the model's name) and of
a probe (not trained, by a header). The function that starts it (credit_agent.py) rewards the
planner's call, the solver's role and the sample. Raises AssertionError if a figure of the run
differs from what the agents asked for.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import rollouts
from async_rl.runs.certificate.certify import certify
from async_rl.runs.metrics import Curves
from benchmarks.figures import figure

_GAMMA = 0.5
_SETTINGS = (
    "conf=grpo_code",
    f"rollout.fn=[{Path(__file__).resolve().with_name('credit_agent.py')}:solve]",
    "algorithm=dr_grpo",
    f"algorithm.advantage.gamma={_GAMMA}",
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "data.max_response_tokens=256",
    "evaluation.every_steps=0",
    "monitoring.tensorboard_port=null",
    "recording=full",
)
_ROLES = ("planner", "solver", "solver", "judge", "probe")


def check(run_dir: Path) -> None:
    """Print the figures of a run."""
    with reading(run_dir) as store:
        found = [each for each in rollouts(store, step=None, most=10_000) if each.step is not None]
    tokens: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    num_masked = 0
    for each in found:
        for sample in each.group.trajectories:
            assert [call.role for call in sample.calls] == list(_ROLES)
            num_masked += int(sample.loss_mask.sum())
            for call in sample.calls:
                calls[call.role] += 1
                tokens[call.role] += call.num_tokens * bool(call.end_tokens)
    figure("groups trained", len(found), "")
    for role in dict.fromkeys(_ROLES):
        figure(f"{role}: calls", calls[role], "")
        figure(f"{role}: trained tokens", tokens[role], "")
    assert not tokens["judge"]
    assert not tokens["probe"]
    assert num_masked == tokens.total(), (num_masked, tokens)
    figure("trained tokens of the store", num_masked, "")
    (about,) = [each for each in certify(run_dir).statements if each.subject == "calls"]
    figure("statements of the certificate about calls", 1, "")
    print("\n".join([about.verdict, *about.evidence]))
    assert about.verdict == "holds"
    curves = Curves(run_dir)
    curves.refresh()
    rewards = curves.points("reward/mean")[1]
    few = max(1, len(rewards) // 5)
    figure("reward of the first fifth", float(rewards[:few].mean()), "")
    figure("reward of the last fifth", float(rewards[-few:].mean()), "")


def main() -> None:
    """Launch the run and check it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = args.output or Path(folder)
        command = [str(Path(sys.executable).with_name("async-rl")), "launch", *_SETTINGS]
        command += [f"num_steps={args.steps}", f"output_dir={output}", "run_name=credit"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        check(output / "credit")


if __name__ == "__main__":
    main()
