"""Measure the time to prepare a million training prompts, to read one, and the memory of both.

The benchmark creates the parquet file. Each measurement runs in a new process: the first prepares
the prompts like the start of a run, the second only reads them like a resumed run.
"""

from __future__ import annotations

import argparse
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


def measure(path: Path, directory: Path) -> None:
    """Print seconds to prepare, milliseconds per prompt in the order of a run, and MB used."""
    from async_rl.composition.compose import compose_unchecked
    from async_rl.core.types import Purpose
    from async_rl.data.model_files import prepare_model
    from async_rl.data.prompt_file import PROMPTS_FILE, open_prompts
    from async_rl.data.prompts import prepare_prompts
    from async_rl.data.tokenizer import load_tokenizer

    model = prepare_model(compose_unchecked("ppo_code", []), lambda *_: None)
    config = compose_unchecked("ppo_code", [f"data.train_files=['{path}']", f"model.path={model}"])
    load_tokenizer(config, model)  # its imports are not measured
    before_mb, started = own_mb(), time.perf_counter()
    prepare_prompts(directory / PROMPTS_FILE, config, model, lambda *_: None)
    prompts = open_prompts(directory / PROMPTS_FILE, config, vocabulary_size=1)
    open_s, started = time.perf_counter() - started, time.perf_counter()
    for k in range(NUM_READ):
        prompts.prompt(Purpose.TRAIN, k)
    sys.stdout.write(
        f"{open_s} {1000 * (time.perf_counter() - started) / NUM_READ} {own_mb() - before_mb}\n"
    )


def main() -> None:
    """Measure two starts. The first prepares the prompts, the second reads them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "prompts.parquet"
        write(path, arguments.rows)
        figure("rows of the file", arguments.rows, "rows")
        for name in ("first", "second"):
            command = [
                sys.executable,
                "-m",
                "benchmarks.control.data",
                "--measure",
                str(path),
                directory,
            ]
            open_s, read_ms, kept_mb = map(
                float,
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(),
            )
            figure(f"{name} start: until the first prompt", open_s, "s")
            figure(f"{name} start: one prompt", read_ms, "ms")
            figure(f"{name} start: memory kept after {NUM_READ} prompts", kept_mb, "MB")


if __name__ == "__main__":
    main()
