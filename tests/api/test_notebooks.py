"""Every cell of the notebooks in docs/notebooks runs in a real kernel."""

from __future__ import annotations

import contextlib
import re
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
def test_a_run_is_followed_scaled_read_and_plotted_and_programs_are_judged(tmp_path: Path) -> None:
    try:
        shown = outputs("run.ipynb", tmp_path)
    finally:
        # A run does not end with the kernel that started it.
        with contextlib.suppress(async_rl.ConfigError):
            async_rl.open_run(tmp_path / "runs/notebook").stop(now=True)
    assert "step 3" in shown[1]
    assert "generators: 2 wanted" in shown[3]
    stop = shown.index(next(text for text in shown if text.startswith("stopped")))
    assert "image/svg+xml" in shown[stop - 1]
    judged = "\n".join(shown[stop + 1 :])
    verdicts = ("pass", "wrong_answer", "timeout", "runtime_error")
    assert [verdict for verdict in verdicts if verdict not in judged] == []


@pytest.mark.slow
def test_a_loop_of_calls_learns_and_so_does_the_same_loop_with_the_tinker_client(
    tmp_path: Path,
) -> None:
    try:
        shown = outputs("session.ipynb", tmp_path)
    finally:
        with contextlib.suppress(async_rl.ConfigError):
            async_rl.open_run(tmp_path / "runs/session").stop(now=True)
    own, clients = (
        [float(reward) for reward in re.findall(r"mean reward (.+)", shown[cell])]
        for cell in (2, 4)
    )
    assert max(own[0], clients[0]) < 0.4
    assert own[-1] > 0.7
    # Of the client's 48 samples of the first step none to two are short, so its curve may rise
    # late: 0.2 is far above chance.
    assert max(clients) > 0.2
    assert shown[-1].splitlines()[-1] == "stopped"
