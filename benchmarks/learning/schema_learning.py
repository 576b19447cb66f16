"""Show that `conf=agent_code` learns with answers of a JSON schema as it does without.

The agent of both arms answers with `{"program": ...}`; it runs the program, reads the outcome and
may write another one, as async_rl/examples/tool_agent.py. One arm sends the schema of the answer
with each request (`schema`); the other sends none, and an answer that is not such JSON is worth 0
(`free`). The embedded model has read plain programs only, so both arms start from a copy whose
warm start had the same flawed programs in this form. Evaluations are recorded in
benchmarks/results/agent_schema.jsonl; a recorded run is not repeated.

Run: `python -m benchmarks.learning.schema_learning run [--seeds 0 1 2] [--until 40]`, then
`python -m benchmarks.learning.schema_learning report`, which prints the figures and draws PICTURE,
next to the recorded runs of `conf=agent_code` as it is (`plain`, agent_learning.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from async_rl.data.cache import cache_root
from benchmarks.embedded import corpus, list_functions, tiny_coder
from benchmarks.embedded.tiny_coder import MAX_LENGTH, TINY_CODER_WITH_RETRIES
from benchmarks.embedded.vocabulary import END, build_tokenizer
from benchmarks.figures import figure
from benchmarks.learning.agent_learning import FILE as PLAIN
from benchmarks.learning.agent_learning import KILLED, ROOT, SAMPLES_PER_STEP, launch
from benchmarks.study import RESULTS, Recorded, Row, recorded

FILE = RESULTS / "agent_schema.jsonl"
PICTURE = ROOT / "docs" / "images" / "agent_schema.png"
AGENT = Path(__file__).with_name("schema_agent.py")
ARMS = ("schema", "free")
STEPS = (0, 10, 20, 30, 40)
SETTINGS = (
    "data.max_response_tokens=208",
    "evaluation.every_steps=10",
    # Other work on the machine makes groups slow.
    "timeouts.group_s=300",
)
_KEPT = ("eval/reward_mean", "eval/reward_mean_error", "reward/mean", "sessions/turns")


def as_json(program: str) -> str:
    """Return an answer in the form of the schema."""
    return json.dumps({"program": program})


def json_corpus(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Put the programs of the corpus, answers and first tries, into the form of the schema."""
    for prompt, answer in pairs:
        shown, end, rest = prompt.partition(END)
        if end:
            task, newline, first = shown.partition("\n")
            shown = task + newline + as_json(first)
        yield shown + end + rest, as_json(answer)


def json_coder() -> Path:
    """Return the directory of the embedded model that writes JSON; build it at the first call."""
    directory = cache_root() / "json_coder"
    if (directory / "config.json").exists():
        return directory
    config = TINY_CODER_WITH_RETRIES
    texts = list(corpus.vocabulary_text())
    texts += [as_json(text) for text in texts if text.startswith("def")]
    tokenizer = build_tokenizer(texts, MAX_LENGTH)
    model = tiny_coder.build_model(config, tokenizer)
    specs, _ = list_functions.split()
    rates = corpus.flaw_rates(config.flaw_probability, config.flaw_spread)
    pairs = json_corpus(corpus.corpus(specs, rates, config.seed, config.retry_share))
    data = tiny_coder.batches(pairs, tokenizer, config.warm_start_batch)
    tiny_coder.warm_start(model, data, config, lambda _, text: print(text, flush=True))
    tokenizer.save_pretrained(str(directory))
    model.save_pretrained(str(directory))
    return directory


def evaluated(rows: list[Row]) -> list[Row]:
    """Return the recorded columns of the rows with an evaluation."""
    return [
        {
            "step": row["step"],
            "samples": row["step"] * SAMPLES_PER_STEP,
            **{key: round(row[key], 4) for key in _KEPT if key in row},
        }
        for row in rows
        if "eval/reward_mean" in row
    ]


def curves() -> dict[str, dict[str, dict[int, tuple[float, float]]]]:
    """Return (held-out rate, its 95 percent error) by step of each run of each arm."""
    found: dict[str, dict[str, dict[int, tuple[float, float]]]] = {}
    for file, name in ((FILE, "eval/reward_mean"), (PLAIN, "eval/pass_at_1")):
        for run, rows in recorded(file).items():
            arm, _, seed = run.partition(" ")
            if run != KILLED.name:
                rates = {row["step"]: (row[name], row[f"{name}_error"]) for row in rows}
                found.setdefault(arm if seed else "plain", {})[run] = rates
    return found


def report() -> None:
    """Print the mean rate of each arm by step, the differences from the schema's, and draw them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axis = pyplot.subplots(figsize=(6, 3.5))
    arms = curves()
    for color, (arm, runs) in enumerate(arms.items()):
        for run, rates in runs.items():
            samples = [step * SAMPLES_PER_STEP for step in rates]
            axis.plot(samples, [rate for rate, _ in rates.values()], color=f"C{color}", label=run)
        for step in STEPS:
            points = {kind: [rates[step] for rates in arms[kind].values()] for kind in arms}
            rate = {kind: statistics.fmean(r for r, _ in found) for kind, found in points.items()}
            figure(f"{arm} ({len(runs)} runs): held-out rate, step {step}", rate[arm], "share")
            if arm != "schema":
                # The errors of the evaluations; runs of one seed share the prompts only.
                errors = [e / len(points[k]) for k in (arm, "schema") for _, e in points[k]]
                difference = rate["schema"] - rate[arm]
                figure(f"schema minus {arm}, step {step}", difference, "share")
                figure(f"its 95 % error, step {step}", math.hypot(*errors), "share")
    axis.set_xlabel("samples trained")
    axis.set_ylabel("held-out rate")
    axis.legend(fontsize=8)
    drawing.tight_layout()
    drawing.savefig(PICTURE, dpi=80)


def main() -> None:
    """Run the arms and seeds that are not recorded, or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["build", "run", "report"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--until", type=int, default=40, help="stop after this step's evaluation")
    given = parser.parse_args()
    if given.command == "report":
        report()
        return
    model = json_coder()
    if given.command == "build":
        return
    for seed in given.seeds:
        for arm in given.arms:
            run = Recorded(FILE, f"{arm} {seed}")
            agent = f"rollout.fn=[{AGENT}:{arm}]"
            if not run.exists():
                settings = (agent, f"model.path={model}", *SETTINGS)
                rows = evaluated(launch(seed, given.until, settings))
                assert rows, f"{arm} {seed} has no evaluation"
                run.write(rows)


if __name__ == "__main__":
    main()
