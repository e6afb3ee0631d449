"""No module guesses what a parameter is from the names of its dims or from its own: the plan's rows say it."""

import ast
import re

import pytest
from test_architecture import FILES, PACKAGE, names_defined, tree_of

from parallax.sharding.layout import DIMS

# What once guessed it.
GONE = {"is_amax", "is_load", "is_amax_name", "kernels_of", "amax_of", "component_of", "stacked_dims", "is_matrix"}
GONE |= {"MATRIX_NUMBERS", "INPUT_DIMS", "LAYER_PARTS", "MIXTURE_PARTS", "SCALE"}
# Names of dims and of modules that tell what a parameter is.
TELLING = {"vocab", "operands", "experts", "layers", "amax", "bias", "scale", "kernel", "table", "blocks", "norm"}
TELLING |= {"embedding", "head", "heads", "kv_heads", "d_head", "d_qk", "d_rope"}
TELLING |= {"AMAX", "BLOCKS", "EMBEDDING", "HEAD", "KERNEL", "SCALE", "STACKED"}
ASKS = ("startswith", "endswith")
COMPARES = ("difference", "intersection", "isdisjoint", "issubset", "issuperset")
DECLARES_DIMS = PACKAGE / "sharding" / "layout.py"  # says also which of them count, and which a head has


def guesses(tree: ast.AST) -> list[str]:
    """The expressions that compare dims with a telling name, or ask whether a name begins or ends so."""
    return [ast.unparse(node) for node in ast.walk(tree) if _compares_dims(node) or _asks_a_name(node)]


def lists_of_dims(tree: ast.AST) -> list[str]:
    """The constants of a module that are several dims, by which their parameters could be told apart."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    lists = [node for node in values if isinstance(node, ast.Tuple | ast.Set | ast.List | ast.Call)]
    words = {node: {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)} for node in lists}
    return [ast.unparse(node) for node, names in words.items() if len(names) > 1 and names <= DIMS.keys()]


def _compares_dims(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COMPARES:
        sides = [node.func.value, *node.args]
    else:
        return False
    of_dims = any(isinstance(one, ast.Attribute) and one.attr == "names" for side in sides for one in ast.walk(side))
    return of_dims and any(_tells(side, between=r"\s+") for side in sides)


def _asks_a_name(node: ast.AST) -> bool:
    asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKS
    return asked and any(_tells(argument) for argument in node.args)


def _tells(node: ast.AST, between: str = r"\W+") -> bool:
    words = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return bool(TELLING & {*words, *(word for text in texts for word in re.split(between, text))})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_guesses_what_a_parameter_is(path):
    tree = tree_of(path)
    assert not GONE & set().union(*map(names_defined, ast.walk(tree)))
    assert guesses(tree) == []
    assert path == DECLARES_DIMS or lists_of_dims(tree) == []


@pytest.mark.parametrize(
    "line",
    [
        'narrow = "vocab" not in compute.names',
        'layout.names[-1:] == ("operands",)',
        'set(layout.names).difference(("heads", "layers"))',
        "call.module.startswith((EMBEDDING, HEAD))",
        'name.startswith("head")',
        'first += layout.names[0] == "layers"',
        "part.startswith(BLOCKS)",
        'path.endswith("/bias")',
        "name.endswith(AMAX)",
    ],
)
def test_what_guesses_is_seen(line):
    assert len(guesses(ast.parse(line))) == 1


def test_a_list_of_dims_is_seen():
    assert lists_of_dims(ast.parse('NEVER_CUT = ("d_head", "d_qk", "d_rope")\nNOT_DIMS = ("d_head", "other")')) == [
        "('d_head', 'd_qk', 'd_rope')"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "name in x.names",
        '"mlp.router.bias" in x.names',
        'name.endswith(".csv")',
        'row.spec.role == "table"',
        "names == a",
    ],
)
def test_what_does_not_is_let_pass(line):
    assert guesses(ast.parse(line)) == []
