"""No module guesses what a parameter is from the names of its dims or from its own: the plan's rows say it."""

import ast
import re

import pytest
from test_architecture import FILES, PACKAGE, names_defined, tree_of

# What once guessed it.
GONE = {"is_amax", "is_load", "is_amax_name", "kernels_of", "amax_of", "component_of", "stacked_dims", "is_matrix"}
GONE |= {"MATRIX_NUMBERS", "INPUT_DIMS", "LAYER_PARTS", "MIXTURE_PARTS", "SCALE"}
# Names of dims and of modules that tell what a parameter is.
TELLING = {"vocab", "operands", "experts", "layers", "amax", "bias", "scale", "kernel", "table", "blocks", "norm"}
TELLING |= {"AMAX", "BLOCKS", "KERNEL", "SCALE"}
ASKS = ("startswith", "endswith")


def guesses(tree: ast.AST) -> list[str]:
    """The expressions that compare dims with a telling name, or ask whether a name begins or ends so."""
    return [ast.unparse(node) for node in ast.walk(tree) if _compares_dims(node) or _asks_a_name(node)]


def _compares_dims(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    of_dims = any(isinstance(one, ast.Attribute) and one.attr == "names" for side in sides for one in ast.walk(side))
    return of_dims and any(_tells(side) for side in sides)


def _asks_a_name(node: ast.AST) -> bool:
    asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKS
    return asked and any(_tells(argument) for argument in node.args)


def _tells(node: ast.AST) -> bool:
    words = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return bool(TELLING & {*words, *(word for text in texts for word in re.split(r"\W+", text))})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_guesses_what_a_parameter_is(path):
    tree = tree_of(path)
    assert not GONE & set().union(*map(names_defined, ast.walk(tree)))
    assert guesses(tree) == []


@pytest.mark.parametrize(
    "line",
    [
        'narrow = "vocab" not in compute.names',
        'layout.names[-1:] == ("operands",)',
        'first += layout.names[0] == "layers"',
        "part.startswith(BLOCKS)",
        'path.endswith("/bias")',
        "name.endswith(AMAX)",
    ],
)
def test_what_guesses_is_seen(line):
    assert len(guesses(ast.parse(line))) == 1


@pytest.mark.parametrize("line", ["name in x.names", 'name.endswith(".csv")', 'row.spec.role == "table"', "names == a"])
def test_what_does_not_is_let_pass(line):
    assert guesses(ast.parse(line)) == []
