"""Compare the tokens per second of answers with a grammar with those of vLLM's offline `LLM` with
the same grammar, and with the rates without.

Run: `python -m benchmarks.generation.grammar_rate [--model DIR] [--rounds N] [--core N]`. As
generation.py; rounds without and with the grammar, a JSON schema, take turns. The ratios are
computed from CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path

from async_rl.core.calls import EVERYTHING, Support
from async_rl.generation.environment import prepare_environment
from benchmarks.embedded.vocabulary import build_tokenizer
from benchmarks.figures import figure
from benchmarks.generation.generation import Child, alone, ours, random_model, settings

SCHEMA = (
    '{"type": "object", "properties": {"program": {"type": "string"}}, "required": ["program"]}'
)
OVERRIDES = [f"generation.sampling=['grammar={SCHEMA}']"]
SUPPORTS = (EVERYTHING, Support(grammar=SCHEMA))
"""Of the rounds with even and with odd numbers."""


def speaking_model(directory: Path) -> Path:
    """Write a random model with a tokenizer, which grammars need."""
    tokenizer = build_tokenizer(['{"program": "def f(xs): return sum(xs)"}'] * 3, 512)
    tokenizer.save_pretrained(random_model(directory))
    return directory


def main() -> None:
    """Compare both engines, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--child", choices=["ours", "alone"])
    options = parser.parse_args()
    if options.child:
        prepare_environment(settings(options.model), [options.core])
        if options.child == "ours":
            asyncio.run(ours(options.model, SUPPORTS, OVERRIDES))
        else:
            alone(options.model, SUPPORTS)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or speaking_model(Path(directory))
        module = "benchmarks.generation.grammar_rate"
        engine, reference = (Child(kind, model, options.core, module) for kind in ("ours", "alone"))
        for index in range(-2, 2 * options.rounds):
            engine.play(index)
            reference.play(index)
        engine.close()
        reference.close()
    rates = {
        name: [played["num_tokens"] / played["cpu_s"] for played in child.rounds]
        for name, child in (("engine", engine), ("vLLM alone", reference))
    }
    for name, found in rates.items():
        figure(f"{name}: without a grammar", statistics.median(found[::2]), "tokens/CPU s")
        figure(f"{name}: with a grammar", statistics.median(found[1::2]), "tokens/CPU s")
        shares = [with_ / without for without, with_ in zip(found[::2], found[1::2], strict=True)]
        figure(f"{name}: with over without", statistics.median(shares), "x")
    ratios = [a / b for a, b in zip(rates["engine"], rates["vLLM alone"], strict=True)][1::2]
    figure("engine over vLLM alone, both with the grammar", statistics.median(ratios), "x")
    figure("lowest and highest round", min(ratios), "x")
    figure("lowest and highest round", max(ratios), "x")


if __name__ == "__main__":
    main()
