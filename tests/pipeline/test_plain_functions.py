"""The step is plain functions: what is called is written where it is called, and is not handed on in a variable."""

import ast
import pathlib

import pytest

PIPELINE = pathlib.Path(__file__).parents[2] / "parallax" / "pipeline"
FILES = sorted(PIPELINE.glob("*.py"))
FUNCTIONS = ("Callable", "partial", "FunctionType", "type[")


def is_function_type(annotation):
    return any(name in ast.unparse(annotation) for name in FUNCTIONS)


def broken(tree):
    """Fields and parameters that may hold a function, and parameters whose annotation does not say what they hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and is_function_type(field.annotation):
                    yield f"{node.name}.{field.target.id}"
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in given:
                if argument.arg not in ("self", "cls") and (
                    argument.annotation is None or is_function_type(argument.annotation)
                ):
                    yield f"{node.name}({argument.arg})"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_field_and_no_parameter_holds_a_function(path):
    assert [*broken(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_what_holds_a_function_is_found():
    text = """
class Loop:
    step: Callable[[int], int]
    def run(self, given, more: "partial[int]", kind: type[int], fine: int): pass
"""
    assert [*broken(ast.parse(text))] == ["Loop.step", "run(given)", "run(more)", "run(kind)"]
