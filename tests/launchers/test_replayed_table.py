"""Facts about the table of `async-rl replay`."""

from __future__ import annotations

import json
from pathlib import Path

from async_rl.launchers.commands.replayed_table import Comparison


def test_the_longest_numbers_do_not_touch_the_column_before(tmp_path: Path) -> None:
    metrics = {"loss/policy": -1.2345e-05, "policy/grad_norm": -1.2345e-05}
    table = Comparison(tmp_path, {44: metrics}, is_changed=True)
    replayed = {name: 2 * value for name, value in metrics.items()}
    row = {"step": 44, "metrics": replayed, "seconds": 1.0, "checksum": 1}
    cells = table.row(json.dumps(row).encode()).split()
    assert cells[:4] == ["44", "-1.234e-05", "->", "-2.469e-05"]
