"""Tables of inputs in a file of YAML beside the tests that read them."""

import functools
from pathlib import Path
from typing import Any

import yaml


def table(module: str, name: str) -> Any:
    """Return the table `name` of the module's file: `refused` of test_pools.py is in pools.yaml."""
    path = Path(module)
    return _tables(path.with_name(path.stem.removeprefix("test_") + ".yaml"))[name]


@functools.cache
def _tables(path: Path) -> dict[str, Any]:
    tables: dict[str, Any] = yaml.safe_load(path.read_text())
    return tables
