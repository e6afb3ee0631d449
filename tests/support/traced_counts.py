"""What the steps of `traced_settings` send, counted twice: as a report reads it, and by a plain walk over the jaxpr.

A site is a Flax module, or "-" where none asked: no file and no line, so that code may move. Each line names its row.
"""

import math
import pathlib
from collections import Counter

from jax import tree
from jax.extend.core import ClosedJaxpr

import parallax as px
from parallax.analysis.traced.collectives import collectives_by_rank
from parallax.analysis.traced.trace import abstract_mesh, step_program
from parallax.config.sections import ALL_AXES
from support.traced_equations import KINDS, is_jaxpr
from support.traced_settings import CASES, ROWS, SEQ, settings_of

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "collectives.txt"
HEADER = """\
What the steps of tests/support/traced_settings.py send: `make golden` writes it anew.
Rows are setting, axes, kind, direction, Flax module, calls a step, and the bytes that a device sends in them; where
pipeline ranks differ, of each rank. What sends nothing, on axes of one device, is left out.
"in jaxpr": collectives as the traced program has them, times the length of the scans around them, and bytes of their
operands. Every side of a branch is counted, and what nothing reads. The update is left out.
"""


def model_of(name):
    """The model of a row on a mesh without devices, traced as on simulated ones."""
    settings = settings_of(name)
    return px.step_of(settings, abstract_mesh(settings.mesh.sizes, simulated=True)).model


def lines_of(name):
    """The lines of a row."""
    model = model_of(name)
    ranks = [_of_rank(sent) for sent in collectives_by_rank(model, ROWS, SEQ)]
    keys = sorted(set().union(*ranks), key=lambda key: (_order(key[0]), *key[1:]))
    lines = [_line(name, *key, *zip(*(rank.get(key, (0, 0)) for rank in ranks))) for key in keys]
    found = in_jaxpr(step_program(model, ROWS, SEQ))
    sizes = model.axis_sizes
    written = [key for key in found if math.prod(sizes[axis] for axis in key[0]) > 1]
    for key in sorted(written, key=lambda key: (_order(key[0]), key[1])):
        lines.append(_line(name, *key, "in jaxpr", "", *([count] for count in found[key])))
    return lines


def part(name):
    """A row's settings, and its lines."""
    return "".join(f"{line}\n" for line in [f"# {name}: {' '.join(CASES[name].values())}", *lines_of(name)])


def golden():
    """All rows."""
    return "\n".join([HEADER, *map(part, CASES)])


def kept():
    """What is kept: the header, then each row under its name."""
    header, *parts = GOLDEN.read_text().split("\n# ")
    return header, {name: f"# {text.rstrip()}\n" for text in parts for name in [text.split(":")[0]]}


def in_jaxpr(jaxpr, times=1):
    """{(axes, kind): [calls, bytes of operands]} of a jaxpr and all in it, a scan's as often as it turns."""
    found = {}
    for equation in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        if (kind := KINDS.get(equation.primitive.name)) is not None:
            axes = equation.params["axes" if "axes" in equation.params else "axis_name"]
            key = (
                ((axes,) if isinstance(axes, str) else tuple(sorted(axes, key=ALL_AXES.index))),
                kind.replace("_", "-"),
            )
            size = sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in equation.invars)
            _add(found, key, times, times * size)
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                for key, counts in in_jaxpr(value, times * turns).items():
                    _add(found, key, *counts)
    return found


def _of_rank(sent):
    """{(axes, kind, direction, site): (calls, bytes)} of one pipeline rank."""
    calls, size = Counter(), Counter()
    for one in sent:
        if one.bytes:
            file = one.source.rpartition(":")[0].removeprefix("parallax/").removesuffix(".py")
            site = "-" if one.module == file else one.module  # a report names the file where no module asked
            key = one.axes, one.kind, one.direction, site
            calls[key] += one.count
            size[key] += one.total_bytes
    return {key: (calls[key], size[key]) for key in calls}


def _line(name, axes, kind, direction, site, calls, size):
    calls, size = ("/".join(f"{one:,}" for one in (each if len(set(each)) > 1 else each[:1])) for each in (calls, size))
    return f"{name:15} {','.join(axes):8} {kind:14} {direction:9} {site:26} {calls:>7} calls {size:>15} bytes"


def _add(found, key, calls, size):
    earlier = found.get(key, (0, 0))
    found[key] = (earlier[0] + calls, earlier[1] + size)


def _order(axes):
    return len(axes), [ALL_AXES.index(axis) for axis in axes]
