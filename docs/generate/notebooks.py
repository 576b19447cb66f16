"""Executes the notebooks of docs/notebooks, and writes each as a page of the site.

    make notebooks

stores the outputs in the notebooks and writes the pages. tests/repo/test_reference.py fails if
a page is not that of its notebook; tests/e2e executes the notebooks.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

import async_rl

FOLDER = Path(__file__).parents[1] / "notebooks"
CELL_TIMEOUT_S = 90


def notebooks() -> list[Path]:
    """Return the notebooks, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, directory: Path) -> NotebookNode:
    """Execute a notebook in a new kernel of this interpreter, whose working directory is given."""
    notebook = nbformat.read(path, as_version=4)
    return NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        coalesce_streams=True,
        resources={"metadata": {"path": str(directory)}},
    ).execute()


@contextlib.contextmanager
def stopping(directory: Path) -> Iterator[None]:
    """Stop the runs that a notebook has left in its directory: they do not end with its kernel."""
    try:
        yield
    finally:
        for config in directory.glob("runs/*/config.yaml"):
            async_rl.open_run(config.parent).stop(now=True)


def page(path: Path) -> dict[str, str]:
    """Return the page and the images of a notebook with outputs, by file name."""
    notebook = nbformat.read(path, as_version=4)
    images: dict[str, str] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            parts.extend(_shown(output, path.stem, images))
    name = path.with_suffix(".md").name
    parts.insert(1, f"This page is the notebook [{path.name}]({path.name}) with its outputs.")
    return {name: "\n\n".join(parts) + "\n", **images}


def _shown(output: NotebookNode, stem: str, images: dict[str, str]) -> Iterator[str]:
    """Yield one output as Markdown, and add its image."""
    if output.output_type == "stream":
        yield f"```text\n{output.text.rstrip()}\n```"
    elif "image/svg+xml" in output.data:
        name = f"{stem}_{len(images) + 1}.svg"
        images[name] = output.data["image/svg+xml"].rstrip() + "\n"
        yield f"![The plot of the cell above]({name})"
    else:
        yield f"```text\n{output.data['text/plain']}\n```"


def main() -> None:
    """Execute all notebooks and write their pages."""
    for path in notebooks():
        with tempfile.TemporaryDirectory() as directory, stopping(Path(directory)):
            notebook = executed(path, Path(directory))
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # the times of each cell differ between runs
        nbformat.write(notebook, path)
        for name, text in page(path).items():
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
