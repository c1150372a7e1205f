"""The quickstart notebook runs from top to bottom, and learns; the outputs stored in it are small and clean."""

import json
import re

import pytest
from run_notebook import run_notebook
from support import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"


def texts(cells):
    return "".join(
        "".join(o.get("text") or o.get("data", {}).get("text/plain", "")) for c in cells for o in c["outputs"]
    )


def check_outputs(cells):
    shown = texts(cells)
    before, after = map(int, re.findall(r"held-out accuracy (?:before|after): (\d+)%", shown))
    assert after >= before + 20
    assert "all_correct, score +1, advantage None" in shown
    assert re.search(r"kept, score -1, advantage -\d\.\d", shown)
    assert re.search(r"8\+5-6\+9=\?\n(.*\n)*Answer: ", shown)
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]) == 1


def test_the_stored_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    check_outputs([cell for cell in notebook["cells"] if cell["cell_type"] == "code"])
    assert NOTEBOOK.stat().st_size < 100_000
    assert not re.search(r"/(home|root|tmp|work|Users)/", NOTEBOOK.read_text())


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the other tests run at the same time
    directory = tmp_path / "work"
    directory.mkdir()
    notebook = run_notebook(NOTEBOOK, directory)
    check_outputs([cell for cell in notebook.cells if cell.cell_type == "code"])
    assert (directory / "runs" / "quickstart" / "report.png").exists()
    assert (directory / "sums" / "model.safetensors").exists()
