"""Contradictions among the files of a data set.

Part of the checks in `run.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_rl.config.data import DataConfig
from async_rl.config.plugins import DATA_SOURCE, is_plugin


def file_problems(data: DataConfig) -> Iterator[str]:
    """Yield the files and data sources whose names cannot be used together."""
    for name, files in (("train_files", data.train_files), ("val_files", data.val_files)):
        # Each file once, so that one that is named three times is one problem.
        for file in dict.fromkeys(files):
            is_file = file.endswith((".jsonl", ".json", ".parquet"))
            if not is_file and not is_plugin(file, DATA_SOURCE):
                yield (
                    f"data.{name}={file}: the file's ending must show its format; name a .jsonl,"
                    " .json or .parquet file"
                )
            if files.count(file) > 1:
                yield f"data.{name}={file}: is named twice; name each file once"
    for file in sorted(set(data.train_files) & set(data.val_files)):
        yield (
            f"data.val_files={file}: is also in data.train_files, so nothing is held out; name a"
            " file that is not used for training"
        )
