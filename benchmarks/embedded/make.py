"""Make the embedded task and its two models, which the product has as files.

usage: python -m benchmarks.embedded.make           the rows of the task (seconds)
       python -m benchmarks.embedded.make --models  the models too (2 to 10 minutes of two cores)

The rows are the same on every machine. The weights are not: another processor sums in another
order, so a model that is made again is another start, and recorded studies of it are no comparison.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from async_rl.data.model_files import EMBEDDED
from benchmarks.embedded.list_functions import DATA_SOURCE, rows, split
from benchmarks.embedded.tiny_coder import TINY_CODER, TINY_CODER_WITH_RETRIES, make_tiny_coder


def write_rows(path: Path, table: Sequence[dict[str, Any]]) -> None:
    """Write a data file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(table)), path, compression="zstd")


def main() -> None:
    """Write the files."""
    for name, specs in zip(("train", "held_out"), split(), strict=True):
        write_rows(EMBEDDED / name / f"{DATA_SOURCE}.parquet", rows(specs))
    if "--models" not in sys.argv:
        return
    models = {"tiny_coder": TINY_CODER, "tiny_coder_retries": TINY_CODER_WITH_RETRIES}
    for name, config in models.items():
        make_tiny_coder(EMBEDDED / name, config, lambda _, text: print(text, flush=True))


if __name__ == "__main__":
    main()
