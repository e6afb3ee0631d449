"""Notebooks run from top to bottom, with the Python that runs the tests, and what is committed shows their pictures."""

import base64
import io
import itertools
import json
import pathlib
import re
import sys

import nbformat
import numpy as np
import pytest
from matplotlib import image
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = "02_the_notation"  # the others compile training steps
LARGEST_BYTES = 500_000
FORMATS = {"image/png", "image/svg+xml"}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_in_its_time = pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem != QUICK)) for path in NOTEBOOKS],
)


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


@pytest.mark.slow
@each_in_its_time
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


@each_notebook
def test_notebook_was_saved_as_it_ran_and_says_what_it_shows(path):
    """Executed once, from top to bottom, without an error; the first cell is its title and how long it takes."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not any(home in json.dumps(outputs) for home in ("/home/", "/root/", str(FOLDER.parent), "/tmp/"))
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and re.match(r"# [^#\s]", first.source) and "It takes" in first.source


def test_pieces_of_the_first_notebook_are_thick_enough_for_their_numbers():
    """Down the left edge of its first picture's first column, where no number stands in the way."""
    cells = nbformat.read(NOTEBOOKS[0], as_version=4).cells
    (drawn,) = (cell for cell in cells if "COLOURS = [" in cell.source)
    colours = re.findall(r'"#(\w{6})"', drawn.source)
    picture = image.imread(io.BytesIO(base64.b64decode(drawn.outputs[0].data["image/png"])))[..., :3]
    codes = (picture * 255).round().astype(int) @ [1 << 16, 1 << 8, 1]
    held = np.where(np.isin(codes, [int(colour, 16) for colour in colours]), codes, 0)
    column = held[:, np.flatnonzero(held.any(axis=0))[0] + 5]
    heights = [len([*run]) for colour, run in itertools.groupby(column) if colour]
    assert len(heights) >= 16 and min(heights) >= 12, "pixels; a number has 8"


def test_notebooks_are_numbered_in_reading_order():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, len(NOTEBOOKS) + 1)]
