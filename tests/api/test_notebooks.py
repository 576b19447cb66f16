"""Every line of the session in docs/python.md runs, and every cell of the notebooks in
docs/notebooks in a real kernel.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import async_rl

DOCS = Path(__file__).resolve().parents[2] / "docs"


def outputs(notebook: nbformat.NotebookNode, directory: Path) -> list[str]:
    """Execute a notebook in a directory; return the text or the types of each cell's outputs."""
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=90, resources=resources).execute()
    return [
        "".join(o.text if o.output_type == "stream" else " ".join(o.data) for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(DOCS / "notebooks" / name, as_version=4)


@pytest.mark.slow
def test_a_session_of_the_page_and_its_notebook_run_from_start_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one run: the page starts and stops it, and the notebook follows it meanwhile."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text(), re.M | re.S)
    stop = next(index for index, block in enumerate(blocks) if "run.stop()" in block)
    notebook = read("run.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    launches, stops = cells[0].source, next(c for c in cells if "run.stop()" in c.source).source
    # What is not executed in the notebook is executed in the page.
    assert launches.replace('"notebook"', '"from-python"') == f"{blocks[0]}run.name"
    assert stops in blocks[stop]
    for cell in cells:
        if cell.source == launches:
            cell.source = "import async_rl; run = async_rl.open_run('runs/from-python')"
        elif cell.source == stops:
            cell.source = ""
    names: dict[str, object] = {}
    try:
        for block in blocks[:stop]:
            exec(block, names)
        seen = outputs(notebook, tmp_path)
        for block in blocks[stop:]:
            exec(block, names)
    finally:
        with contextlib.suppress(async_rl.ConfigError):
            async_rl.open_run("runs/from-python").stop(now=True)
    assert "step 3" in seen[1]
    assert "generators: 2 wanted" in seen[3]
    assert any("image/svg+xml" in text for text in seen)
    judged = "\n".join(seen[-5:])
    verdicts = ("pass", "wrong_answer", "timeout", "runtime_error")
    assert [verdict for verdict in verdicts if verdict not in judged] == []
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("num_step=20: there is no such setting; did you mean num_steps")
    assert shown[1].startswith("1 ")
    assert any(line.startswith("running ") for line in shown)
    assert any(line.startswith("stopped at step ") for line in shown)
    assert shown[-3:] == ["wrong_answer", "pass ", "wrong_answer f(2) returned 4, not 5"]


@pytest.mark.slow
def test_a_loop_of_calls_learns_and_so_does_the_same_loop_with_the_tinker_client(
    tmp_path: Path,
) -> None:
    try:
        shown = outputs(read("session.ipynb"), tmp_path)
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
