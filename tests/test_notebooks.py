"""Notebooks show what is stored of them, whatever machine they run on; their pictures are there, and can be read."""

import ast
import base64
import importlib
import io
import itertools
import json
import re

import nbformat
import notebook_runs
import numpy as np
import pytest
from matplotlib import image
from matplotlib import pyplot as plt
from notebook_runs import (
    AGAIN,
    CHAOTIC,
    FOLDER,
    METADATA,
    NOTEBOOKS,
    ROUNDING,
    differences,
    execute,
    was_saved_as_it_ran,
)
from support import figure_data

QUICK = "02_the_notation"  # the others compile training steps
LARGEST_BYTES = 1_000_000  # half of the largest is schedules, which are drawn as SVG

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_in_its_time = pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem != QUICK)) for path in NOTEBOOKS],
)


def code_of(path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.timeout(1800)  # seconds of the processor are about a minute, but others may use it, too
@each_in_its_time
def test_notebook_shows_what_is_stored(path):
    """`make test-notebooks` runs all of them."""
    stored = nbformat.read(path, as_version=4)
    ran = execute(path)
    assert any(figure_data.FORM in output.get("data", {}) for cell in ran.cells for output in cell.get("outputs", []))
    found = differences(stored, ran)
    assert not found, "\n".join([f"{path.name}; {AGAIN}", *found])


@each_notebook
def test_every_name_that_a_notebook_takes_from_the_project_is_there(path):
    """Imports run, and what stands behind px. and other modules is looked up, without running the cells."""
    names = {}
    trees = [ast.parse(re.sub("(?m)^%.*$", "", source)) for source in code_of(path)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), path.name, "exec"), names)
    modules = {name: value for name, value in names.items() if isinstance(value, type(importlib))}
    assert "px" in modules
    for dotted in filter(None, map(dotted_name, nodes)):
        first, *rest = dotted.split(".")
        found = modules.get(first)
        for name in rest if found else []:
            assert hasattr(found, name), f"{path.name}: {dotted} is not there"
            found = getattr(found, name)


def dotted_name(node) -> str | None:
    """`px.schedules.by_name` of the expression that reads it."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted_name(node.value)
        return before and f"{before}.{node.attr}"
    return None


def test_a_notebook_reads_nothing_that_a_change_of_the_pages_would_change():
    for path in NOTEBOOKS:
        assert not re.search(r"""["'][^"'\n]*\.(?:md|ipynb)["']""", "\n".join(code_of(path))), path.name


@each_notebook
def test_notebook_is_small(path):
    assert path.stat().st_size < LARGEST_BYTES


@each_notebook
def test_notebook_was_saved_as_it_ran_and_says_what_it_shows(path):
    """Executed once, from top to bottom, without an error; the first cell is its title and how long it takes."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert was_saved_as_it_ran(notebook) and notebook.metadata == METADATA, AGAIN
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


# ---- how stored and fresh outputs are compared


def notebook_of(*outputs):
    """A notebook of one cell with these outputs; a text is printed, a dict is displayed."""
    made = [
        nbformat.v4.new_output("stream", text=one)
        if isinstance(one, str)
        else nbformat.v4.new_output("display_data", one)
        for one in outputs
    ]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=made)])


STEP = "12:00:01 step 5/50  loss 2.7583  gnorm 0.51  lr 6.0e-3  9,363 tok/s  mfu 4%  488.4 MiB  left 8s\n"
ALIKE = {
    "another time and speed": (
        STEP,
        STEP.replace("12:00:01", "23:59:59").replace("9,363", "21.4k").replace("left 8s", ""),
    ),
    "a step that waited": (STEP, STEP.replace("  ", " ").replace("left", "wait 2% left")),
    "the last digit": (STEP, STEP.replace("2.7583", "2.7584")),
    "an error of rounding": ("differs by 2.5e-06", "differs by 8.1e-07"),
    "another goodput": ("12:00:01 goodput 46.2 % of 13s: steps 6s\n", "12:00:02 goodput 9.1 % of 1m00s: start 9s\n"),
    "a line of what is saved meanwhile": (STEP, "12:00:01 step 50 is on disk\n" + STEP),
}
OTHER = {
    "another loss": (STEP, STEP.replace("2.7583", "2.7585")),
    "another step": (STEP, STEP.replace("step 5/50", "step 6/50")),
    "more than rounding": ("differs by 2.5e-06", f"differs by {3 * ROUNDING:.1e}"),
    "another rate below rounding": (STEP.replace("6.0e-3", "6.0e-6"), STEP.replace("6.0e-3", "3.0e-6")),
    "another word": ("gpipe 27.3 %", "one_f_one_b 27.3 %"),
    "nothing": (STEP, ""),
}


@pytest.mark.parametrize("name", ALIKE)
def test_outputs_that_only_time_machine_and_rounding_change_agree(name):
    old, new = map(notebook_of, ALIKE[name])
    assert differences(old, new) == []


@pytest.mark.parametrize("name", OTHER)
def test_outputs_that_show_something_else_are_found(name):
    old, new = map(notebook_of, OTHER[name])
    (found,) = differences(old, new)
    assert found.startswith("cell 1, ")


def test_a_missing_output_an_error_and_another_form_are_found():
    shown = notebook_of({"text/plain": "x", "text/html": "<b>x</b>"})
    assert differences(shown, notebook_of()) and differences(notebook_of(), shown)
    assert differences(shown, notebook_of({"text/plain": "x"}))
    failed = notebook_of()
    failed.cells[0].outputs = [nbformat.v4.new_output("error", ename="ImportError", evalue="by_call_site")]
    assert "error" in differences(notebook_of(), failed)[0]


def drawing(*, height=2.0, colour="C0", label="loss", scale="linear", shade=0.5, text="a"):
    figure, (left, right) = plt.subplots(1, 2)
    left.bar([1, 2], [height, 4], color=colour)
    left.plot([1, 2], [0.1, 3e-7 * height], label=label)
    left.set(yscale=scale, ylim=(1e-9, 5))
    left.text(1, 1, text)
    left.legend()
    right.imshow(np.array([[0, shade], [1, np.nan]]), vmin=0, vmax=1)
    right.scatter([1, 2], [height, 3])
    forms = {"text/plain": "<Figure size 640x480 with 2 Axes>", figure_data.FORM: figure_data.Plotted()(figure)}
    plt.close(figure)
    return notebook_of(forms)


def test_pictures_are_compared_by_what_was_plotted():
    """Not by pixels: what nobody sees may differ."""
    assert differences(drawing(), drawing()) == []
    assert differences(drawing(), drawing(height=2.001, shade=0.501)) == []
    changes = [
        dict(height=2.2),
        dict(colour="C1"),
        dict(label="gain"),
        dict(scale="log"),
        dict(shade=0.7),
        dict(text="b"),
    ]
    for change in changes:
        assert differences(drawing(), drawing(**change)), change


def test_a_chaotic_cell_is_held_to_its_texts_and_to_how_much_it_shows():
    def tagged(notebook):
        notebook.cells[0].metadata["tags"] = [CHAOTIC]
        return notebook

    assert differences(tagged(notebook_of("at worst 26.8 %")), notebook_of("at worst 24.1 %")) == []
    assert differences(tagged(notebook_of("at worst 26.8 %")), notebook_of("at best 26.8 %"))
    assert differences(tagged(drawing()), drawing(height=3.0, shade=0.9)) == []
    assert differences(tagged(drawing()), drawing(label="gain"))
    assert differences(tagged(notebook_of("at worst 26.8 %")), notebook_of())


def test_only_the_load_of_experts_is_chaotic():
    cells = [(path.stem, cell) for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    chaotic = {(name, "share" in cell.source) for name, cell in cells if CHAOTIC in cell.metadata.get("tags", [])}
    assert chaotic == {("07_six_axes_one_model", True)}


def test_a_picture_without_what_was_plotted_is_found():
    bare = notebook_of({"text/plain": "<Figure size 640x480 with 2 Axes>", "image/png": "..."})
    assert differences(bare, bare) and differences(drawing(), bare)


def test_one_command_stores_what_differs_and_leaves_the_rest(tmp_path, monkeypatch, capsys):
    ran = notebook_of("6 windows\n")
    ran.metadata = METADATA
    ran.cells[0].execution_count = 1
    for name, text in {"01_same": "6 windows\n", "02_other": "5 windows\n"}.items():
        stored = notebook_of(text)
        stored.metadata = METADATA
        stored.cells[0].execution_count = 1
        nbformat.write(stored, tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(notebook_runs, "NOTEBOOKS", sorted(tmp_path.glob("*.ipynb")))
    monkeypatch.setattr(notebook_runs, "execute", lambda path: ran)
    before = (tmp_path / "01_same.ipynb").stat().st_mtime_ns
    notebook_runs.main([])
    assert capsys.readouterr().out == "01_same.ipynb: shows what is stored\n02_other.ipynb: stored anew\n"
    assert (tmp_path / "01_same.ipynb").stat().st_mtime_ns == before
    assert differences(nbformat.read(tmp_path / "02_other.ipynb", as_version=4), ran) == []


def test_notebooks_are_numbered_in_reading_order():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, len(NOTEBOOKS) + 1)]
