"""Every cell of the notebooks in docs/notebooks runs in a real kernel."""

from __future__ import annotations

import contextlib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import async_rl

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs/notebooks"


def outputs(name: str, directory: Path) -> list[str]:
    """Execute a notebook in a directory; return the text or the types of each cell's outputs."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=90, resources=resources).execute()
    return [
        "".join(o.text if o.output_type == "stream" else " ".join(o.data) for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
def test_a_live_run_is_followed_scaled_read_and_plotted(tmp_path: Path) -> None:
    try:
        shown = outputs("run.ipynb", tmp_path)
    finally:
        # A run does not end with the kernel that started it.
        with contextlib.suppress(async_rl.ConfigError):
            async_rl.open_run(tmp_path / "runs/notebook").stop(now=True)
    assert "step 3" in shown[1]
    assert "generators: 2 wanted" in shown[3]
    assert "image/svg+xml" in shown[-2]
    assert "stopped" in shown[-1]


@pytest.mark.slow
def test_programs_are_judged_by_a_verifier(tmp_path: Path) -> None:
    shown = "\n".join(outputs("verifier.ipynb", tmp_path))
    verdicts = ("pass", "wrong_answer", "timeout", "runtime_error")
    assert [verdict for verdict in verdicts if verdict not in shown] == []
