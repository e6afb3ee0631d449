"""Notebooks as they run, beside what is stored of them: `make notebooks` stores them anew where they differ."""

import contextlib
import json
import os
import pathlib
import re
import sys
import tempfile
from functools import partial
from itertools import zip_longest

import support.environment  # noqa: F401  what kernels run with

# isort: split
import nbformat
import numpy as np
from nbclient import NotebookClient
from support import figure_data

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
AGAIN = "`make notebooks` stores what runs"

# What one processor rounds otherwise than another is at most this: the notebooks themselves assert that gradients and
# losses of different meshes, which sum in another order, differ by less.
ROUNDING = 1e-5
# Of the length of an axis, or from the lightest to the darkest shade: nobody sees a smaller step.
VISIBLE = 0.01
FLOAT = re.compile(r"(?<![\w#])-?\d[\d,]*(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)")
# A rate is a setting, not a difference that may be all rounding.
RATE = re.compile(rf"(?:\blr|learning_rate)\W+({FLOAT.pattern})")
# A cell with this tag shows numbers to which a rounding grows; what must hold of them it asserts itself.
CHAOTIC = "chaotic"
# SVG, as a form of its own or in a page: its texts, the names that parts of it have, and where things are, in points.
SVG = re.compile(r"<svg\b.*?</svg>", re.S)
SVG_TEXT = re.compile(r">[^<]+<")
SVG_NAME = re.compile(r"\b[a-z][0-9a-f]{10}\b")  # a hash of what is drawn
POINT = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?")
POINTS = 0.1
# What depends on when, and how fast, a notebook ran.
MACHINE = {
    r"\d{4}-\d\d-\d\d UTC": "DATE",
    r"(?m)^\d\d:\d\d:\d\d .*(saving step|is on disk).*\n": "",  # files are written while steps run
    r"(?m)^\d\d:\d\d:\d\d ": "TIME ",
    # A step's speed, memory and time left; where it had to wait, its columns are narrower.
    r"(?m)^TIME (step .* lr +\S+) .*$": lambda line: " ".join(["TIME", *line[1].split(), "SPEED"]),
    r"(?m)^TIME goodput .*$": "TIME goodput SHARE",
    r"\d[\d.,]* [kMGT]?FLOP/s \(measured": "SPEED (measured",
    r"tokens_per_second \d[\d.,]*": "tokens_per_second SPEED",
    r"\bin \d[\d.,]* s\b": "in SECS",
}
# Only where JAX_COMPILATION_CACHE_DIR is set, as in tests.
CACHED = re.compile(r"compiled programs are kept in .*\n\n?")


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
    """A notebook, run from top to bottom in a new process, with the Python that runs this."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder, kernel(pathlib.Path(folder)) as name:
        where = {"metadata": {"path": str(FOLDER)}}
        options = {"timeout": None, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, kernel_name=name, resources=where, **options).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if output.output_type == "stream":
            output.text = CACHED.sub("", output.text)
    return notebook


@contextlib.contextmanager
def kernel(folder: pathlib.Path):
    """The name of a kernel that is this Python, whatever kernels the user has; it imports this repository."""
    spec = folder / "kernels" / "this-python"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    argv += [f"--IPKernelApp.extensions={figure_data.__name__}"]
    own = {"argv": argv, "display_name": "Python", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(own))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    changed = dict.fromkeys(("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"), str(folder)) | {"PYTHONPATH": paths}
    before = os.environ.copy()
    os.environ.update(changed)
    try:
        yield spec.name
    finally:
        os.environ.clear()
        os.environ.update(before)


def differences(stored: nbformat.NotebookNode, ran: nbformat.NotebookNode) -> list[str]:
    """Where two notebooks of the same cells show something else."""
    found = []
    for number, (old, new) in enumerate(zip(stored.cells, ran.cells, strict=True), start=1):
        if old.cell_type == "code":
            shown, now = outputs_of(old), outputs_of(new)
            if CHAOTIC in old.metadata.get("tags", []):
                shown, now = map(without_numbers, shown), map(without_numbers, now)
            found += [f"cell {number}, {what}" for what in between(shown, now)]
    return found


def outputs_of(cell):
    """The outputs of a cell: of each its kind and what it shows, a picture as what was plotted."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.name, {"text": output.text}
        elif output.output_type == "error":
            yield "error", {"text": f"{output.ename}: {output.evalue}"}
        else:
            yield output.output_type, {form: data for form, data in output.data.items() if form != "image/png"}


def without_numbers(output):
    """An output of a cell that is CHAOTIC: its texts, and what is drawn, but not where."""
    kind, forms = output
    if figure_data.FORM in forms:
        drawn = map(json.loads, forms[figure_data.FORM].splitlines())
        kept = [{key: part for key, part in one.items() if key not in ("x", "y", "shades")} for one in drawn]
        return kind, {"drawn": json.dumps(kept, indent=1)}
    return kind, {form: FLOAT.sub("#", text) for form, text in forms.items()}


def between(old, new):
    """What is another in the outputs of a cell."""
    nothing = ("no output", {})
    for (kind, shown), (new_kind, now) in zip_longest(old, new, fillvalue=nothing):
        if kind != new_kind or shown.keys() != now.keys():
            yield f"{kind} {[*shown]}: now {new_kind} {[*now]}"
            continue
        if "<Figure" in shown.get("text/plain", "") and not {figure_data.FORM} <= shown.keys() & now.keys():
            yield "picture: what was plotted is not stored"
        for form, text in shown.items():
            if form == figure_data.FORM:
                yield from (f"picture: {what}" for what in between_pictures(text, now[form]))
            elif not same_text(text, now[form]):
                yield f"{form}: {first_difference(text, now[form])}"


def same_text(old: str, new: str) -> bool:
    """Whether two texts are the same but for MACHINE, and for floats that differ by ROUNDING or in their last digit.

    >>> same_text("12:00:01 step 5  loss 2.7583", "23:59:59 step 5  loss 2.7584")
    True
    >>> same_text("step 5  loss 2.7583", "step 5  loss 2.7585"), same_text("16 windows", "17 windows")
    (False, False)
    >>> same_text("differs by 2.5e-06", "differs by 8.1e-07"), same_text("differs by 2.5e-06", "differs by 2.5e-05")
    (True, False)
    """
    pictures, new_pictures = SVG.findall(old), SVG.findall(new)
    old, new = (without_machine(SVG.sub("<svg>", text)) for text in (old, new))
    same = FLOAT.sub("#", old) == FLOAT.sub("#", new) and same_all(same_float, FLOAT.findall(old), FLOAT.findall(new))
    same = same and same_all(partial(same_float, rounding=0.0), RATE.findall(old), RATE.findall(new))
    return same and same_all(same_svg, pictures, new_pictures)


def same_all(same, old, new) -> bool:
    """Whether there are as many, each `same` as the one in its place."""
    return len(old) == len(new) and all(map(same, old, new))


def same_svg(old: str, new: str) -> bool:
    """Whether two pictures have the same texts, and the same shapes where no eye sees a difference.

    >>> curve = '<svg><path d="M 10 20 L 30.00001 40" clip-path="url(#p7134dceb22)"/><text>0.5</text></svg>'
    >>> same_svg(curve, curve.replace("30.00001", "30").replace("7134dceb22", "ba683c8f11"))
    True
    >>> same_svg(curve, curve.replace("40", "41")), same_svg(curve, curve.replace("0.5", "0.52"))
    (False, False)
    >>> same_svg("<text></text>", "<text>b</text>")
    False
    """
    texts = same_all(same_text, SVG_TEXT.findall(old), SVG_TEXT.findall(new))
    old, new = (SVG_NAME.sub("NAME", SVG_TEXT.sub("><", svg)) for svg in (old, new))
    near = same_all(lambda a, b: abs(float(a) - float(b)) <= POINTS, POINT.findall(old), POINT.findall(new))
    return texts and near and POINT.sub("#", old) == POINT.sub("#", new)


def without_machine(text: str) -> str:
    for pattern, word in MACHINE.items():
        text = re.sub(pattern, word, text)
    return text


def same_float(old: str, new: str, rounding: float = ROUNDING) -> bool:
    a, b = (float(text.replace(",", "")) for text in (old, new))
    return abs(a - b) <= max(rounding, 1.001 * min(last_digit(old), last_digit(new)))


def last_digit(text: str) -> float:
    """One unit of the last digit that a float shows.

    >>> last_digit("2.35"), last_digit("6.0e-3")
    (0.01, 0.0001)
    """
    digits, _, exponent = text.partition("e")
    return float(f"1e{int(exponent or 0) - len(digits.partition('.')[2])}")


def first_difference(old: str, new: str) -> str:
    pairs = zip_longest(without_machine(old).splitlines(), without_machine(new).splitlines(), fillvalue="")
    return next((f"{a[:300]!r}, now {b[:300]!r}" for a, b in pairs if not same_text(a, b)), "an SVG in it")


def between_pictures(old: str, new: str):
    """What of a figure is drawn elsewhere, or otherwise."""
    scales = {"shades": Scale("linear", "0 1")}
    for was, now in zip_longest(old.splitlines(), new.splitlines(), fillvalue="{}"):
        before, after = json.loads(was), json.loads(now)
        if "axes" in before:
            scales |= {axis: Scale(kind, before[axis]) for axis, kind in zip("xy", before["scales"])}
        if not same_drawn(before, after, scales):
            yield f"{was[:200]}, now {now[:200]}"


def same_drawn(old, new, scales, name=None) -> bool:
    """Whether two parts of a figure are the same to the eye; numbers are what has a scale, by `name`."""
    if isinstance(old, dict) and old.keys() == new.keys():
        return all(same_drawn(old[key], new[key], scales, key) for key in old)
    if isinstance(old, list) and len(old) == len(new):
        return all(same_drawn(a, b, scales) for a, b in zip(old, new))
    if name in scales:
        return scales[name].same(old, new)
    texts = isinstance(old, str) and isinstance(new, str)
    return same_text(old, new) if texts else old == new


class Scale:
    """Of an axis or of shades, with its limits: how far apart two values are drawn."""

    def __init__(self, kind: str, limits: str):
        self.logarithmic = kind == "log"
        first, last = self.places(limits)
        self.length = abs(last - first)

    def places(self, numbers: str) -> np.ndarray:
        values = np.array(numbers.split(), float)
        return np.log(np.maximum(values, ROUNDING)) if self.logarithmic else values

    def same(self, old: str, new: str) -> bool:
        old, new = self.places(old), self.places(new)
        error = ROUNDING + VISIBLE * self.length
        return old.shape == new.shape and np.allclose(old, new, rtol=0, atol=error, equal_nan=True)


def main(names: list[str]) -> None:
    """Store the notebooks of these names, or all, where what runs differs from what is stored."""
    for path in NOTEBOOKS:
        if names and not any(path.stem.startswith(name) for name in names):
            continue
        stored, ran = nbformat.read(path, as_version=4), execute(path)
        whole = was_saved_as_it_ran(stored) and stored.metadata == METADATA
        different = not whole or differences(stored, ran)
        if different:
            nbformat.write(ran, path)
        print(f"{path.name}: {'stored anew' if different else 'shows what is stored'}", flush=True)


def was_saved_as_it_ran(notebook: nbformat.NotebookNode) -> bool:
    """Executed once, from top to bottom."""
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    return counts == [*range(1, len(counts) + 1)]


if __name__ == "__main__":
    main(sys.argv[1:])
