"""Measure the time to open a million training prompts, the time per prompt, and the memory used.

The benchmark creates the parquet file. Each measurement runs in a new process, like a buffer. Goal:
the data is open within 10 s, with or without a cached copy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import figure

NUM_ROWS = 1_000_000
NUM_READ = 5_000
PROMPT = (
    "A shop sells {} boxes on Monday and {} boxes on Tuesday, each with {} pens. How many pens is"
    " that in all? " * 3
)


def write(path: Path, num_rows: int) -> None:
    """Write a file in the form of GSM8K."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("answer", pa.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 50_000):
            numbers = range(start, min(start + 50_000, num_rows))
            prompts = [PROMPT.format(*[n, n % 97, n % 89] * 3) for n in numbers]
            columns = {
                "id": list(numbers),
                "prompt": prompts,
                "answer": [f"#### {(n + n % 97) * (n % 89)}" for n in numbers],
            }
            writer.write_table(pa.table(columns, schema))


def own_mb() -> float:
    """Return the memory of this process in MB without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def measure(path: Path, cache: Path) -> None:
    """Print seconds to open, milliseconds per prompt in the order of a run, and MB used."""
    from async_rl.composition.compose import compose_unchecked
    from async_rl.data import corpus
    from async_rl.data.order import PromptOrder
    from async_rl.data.prompts import load_train_prompts
    from async_rl.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(corpus.vocabulary_text(), 4096)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    config = compose_unchecked("ppo_code", [f"data.train_files=['{path}']"])
    before_mb, started = own_mb(), time.perf_counter()
    prompts = load_train_prompts(config, tokenizer)
    order = PromptOrder(0, len(prompts))
    _ = prompts[order.index(0)]
    open_s, started = time.perf_counter() - started, time.perf_counter()
    for k in range(NUM_READ):
        _ = prompts[order.index(k)]
    sys.stdout.write(
        f"{open_s} {1000 * (time.perf_counter() - started) / NUM_READ} {own_mb() - before_mb}\n"
    )


def main() -> None:
    """Measure two starts. The first creates the cached copy, the second uses it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return
    with tempfile.TemporaryDirectory() as directory:
        path, cache = Path(directory) / "prompts.parquet", Path(directory) / "cache"
        write(path, arguments.rows)
        figure("rows of the file", arguments.rows, "rows")
        for name in ("first", "second"):
            command = [
                sys.executable,
                "-m",
                "benchmarks.control.data",
                "--measure",
                str(path),
                str(cache),
            ]
            open_s, read_ms, kept_mb = map(
                float,
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(),
            )
            figure(f"{name} start: until the first prompt", open_s, "s", goal="at most 10")
            figure(f"{name} start: one prompt, read and tokenized", read_ms, "ms")
            figure(f"{name} start: memory kept after {NUM_READ} prompts", kept_mb, "MB")


if __name__ == "__main__":
    main()
