"""Notebooks run from top to bottom, with the Python that runs the tests, and what is committed shows their pictures."""

import json
import pathlib
import sys

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST_BYTES = 500_000
FORMATS = {"image/png", "image/svg+xml"}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """The name of a kernel that is this Python, whatever kernels the user has."""
    spec = tmp_path / "kernels" / "this-python"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python", "language": "python"}))
    for variable in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    return spec.name


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """How many pictures each cell shows."""
    outputs = [cell.outputs if cell.cell_type == "code" else [] for cell in notebook.cells]
    return [sum(bool(FORMATS & {*output.get("data", {})}) for output in cell) for cell in outputs]


@each_notebook
def test_notebook_runs_and_shows_the_pictures_that_are_committed(path, kernel):
    committed = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    metadata = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(fresh, timeout=300, kernel_name=kernel, resources=metadata).execute()
    assert sum(pictures(fresh)) > 0
    assert pictures(fresh) == pictures(committed), "run the notebook again and save it with its outputs"


@each_notebook
def test_notebook_is_small(path):
    assert path.stat().st_size < LARGEST_BYTES
