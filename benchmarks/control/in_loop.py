"""Compare the tokens per second of a generator in a run with vLLM's offline engine.

Prompts, core and concurrency are the same. The run trains, judges and pushes as usual. Phases
alternate: the run works for some seconds, then all of its processes are stopped and the offline
engine answers the same prompts on the core of the generator, with the initial weights of the run.
Only time with work for the generator counts, without pauses for new weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.control.live_run import LiveRun
from benchmarks.figures import figure

NUM_PROMPTS = 96
LEFT_OUT = 3
SETTINGS = ["timeouts.call_s=400", "num_steps=2000"]


def alone(run_dir: Path, core: int) -> None:
    """Run vLLM's offline engine with the model, prompts and settings of the run.

    Each line on stdin starts a round.
    """
    from async_rl.data.model_files import prepare_model
    from async_rl.data.prompts import train_prompts
    from async_rl.data.tokenizer import load_tokenizer
    from async_rl.generation.engine import read_model_facts
    from async_rl.generation.environment import prepare_environment
    from async_rl.runtime.context import load_config

    config = load_config(run_dir)
    prepare_environment(config, [core])
    model = prepare_model(config, lambda fraction, text: None)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    held = train_prompts(config, load_tokenizer(config, model))
    prompts = list(itertools.islice(held, 20 * NUM_PROMPTS))
    vllm = config.generation.vllm
    llm = LLM(
        model=str(model),
        dtype=config.model.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=config.data.max_prompt_tokens + config.data.max_response_tokens + 1,
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
        kv_cache_memory_bytes=vllm.kv_cache_mb << 20,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    params = SamplingParams(
        n=config.generation.group_size,
        max_tokens=config.data.max_response_tokens,
        stop_token_ids=list(read_model_facts(model).end_token_ids),
        logprobs=0,
        detokenize=False,
    )
    print("told " + json.dumps({"max_num_seqs": vllm.max_num_seqs}), flush=True)
    for line in sys.stdin:
        first = int(line) * NUM_PROMPTS % (len(prompts) - NUM_PROMPTS)
        asked = [
            TokensPrompt(prompt_token_ids=prompt.token_ids.tolist())
            for prompt in prompts[first : first + NUM_PROMPTS]
        ]
        started_s = time.perf_counter()
        outputs = llm.generate(asked, params, use_tqdm=False)
        spent_s = time.perf_counter() - started_s
        lengths = [len(sample.token_ids) for output in outputs for sample in output.outputs]
        told = {"tokens_per_s": sum(lengths) / spent_s, "length": statistics.mean(lengths)}
        print("told " + json.dumps(told), flush=True)


def heard(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return the next result that the child prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("told "):
            found: dict[str, float] = json.loads(line.removeprefix("told "))
            return found
    raise SystemExit(f"vLLM alone exited with {process.wait()}")


def play(process: subprocess.Popen[str], number: int) -> dict[str, float]:
    """Run one round of vLLM alone."""
    assert process.stdin is not None
    print(number, file=process.stdin, flush=True)
    return heard(process)


def loop_rate(rows: list[dict[str, Any]]) -> float:
    """Return the tokens per second over the rows.

    Only time with work for the generator and without a change of weights counts.
    """
    tokens = sum(row["throughput/generated_tokens_per_s"] * row["time/step_s"] for row in rows)
    spent_s = sum(
        row["busy/generator"] * row["time/step_s"] - row["weights/pause_s"] for row in rows
    )
    return float(tokens / spent_s)


def measure(settings: list[str], *, rounds: int, phase_s: float, core: int) -> None:
    """Alternate the phases and print the figures."""
    inside: list[float] = []
    beside: list[dict[str, float]] = []
    lengths: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, LiveRun(scratch, [*settings, *SETTINGS]) as run:
        run.wait_for(5)
        run.hold()
        command = [
            sys.executable,
            "-m",
            "benchmarks.control.in_loop",
            "--child",
            str(run.run_dir),
            "--core",
            str(core),
        ]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        child = subprocess.Popen(
            command, **pipes, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        heard(child)
        play(child, 0)
        for number in range(rounds):
            run.go_on()
            first = run.step()
            run.wait_for(first + LEFT_OUT + 1)
            time.sleep(phase_s)
            found = [row for row in run.rows() if row["step"] > first + LEFT_OUT]
            run.hold()
            inside.append(loop_rate(found))
            lengths += [row["length/response_mean"] for row in found]
            beside.append(play(child, number + 1))
        run.go_on()
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)
    figure("inside the loop", statistics.median(inside), "tokens/s")
    figure("vLLM alone", statistics.median(told["tokens_per_s"] for told in beside), "tokens/s")
    figure("response length inside", statistics.mean(lengths), "tokens")
    figure("response length alone", statistics.mean(told["length"] for told in beside), "tokens")
    ratio = statistics.median(
        mine / told["tokens_per_s"] for mine, told in zip(inside, beside, strict=True)
    )
    figure("inside the loop over vLLM alone", ratio, "x", goal="at least 0.9")


def main() -> None:
    """Measure conf=grpo_code, or the settings of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--phase-s", type=float, default=8)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--child", type=Path)
    parser.add_argument("settings", nargs="*", default=["conf=grpo_code"])
    options = parser.parse_args()
    if options.child:
        alone(options.child, options.core)
    else:
        measure(options.settings, rounds=options.rounds, phase_s=options.phase_s, core=options.core)


if __name__ == "__main__":
    main()
