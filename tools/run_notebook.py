"""Runs a notebook from top to bottom in a temporary directory, and stores its outputs in it.

    python tools/run_notebook.py examples/quickstart.ipynb

Warnings on standard error are left out: they are about the machine that ran it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run_notebook(path: Path, directory: Path, timeout_s: float = 600) -> nbformat.NotebookNode:
    """The notebook with its outputs; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        resources={"metadata": {"path": str(directory)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [_as_stored(output) for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _as_stored(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if "execution_count" in output:
        output.execution_count = None
    return output


def main() -> None:
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        notebook = run_notebook(path, Path(directory))
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
