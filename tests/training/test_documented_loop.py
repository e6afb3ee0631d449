"""docs/map.md shows the training loop as the code has it."""

import ast
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "parallax"
# The functions that the loop is written in.
WRITTEN_IN = {
    "training/run.py": {"train", "run_to_end"},
    "training/loop.py": {"run", "take_steps", "take", "next_batch", "act"},
}


def documented():
    """Each call of the page's listing, with the file that is written behind it, else that of the loop."""
    section = re.search(r"## The training loop\n(.*?)\n## ", (ROOT / "docs/map.md").read_text(), re.S)[1]
    listing = textwrap.dedent("".join(line for line in section.splitlines(True) if line.startswith("    ")))
    lines = listing.splitlines()
    assert len(lines) <= 15
    for node in calls_of(ast.parse(listing)):
        if name_of(node) != "range":
            file = re.search(r"# ([\w/]+\.py)", lines[node.lineno - 1])
            yield name_of(node), file[1] if file else "training/loop.py"


def calls_of(tree):
    """The calls in a tree as they are made: those among the arguments of another come first."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda node: (node.end_lineno, node.end_col_offset))


def name_of(call):
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def functions_of(file):
    nodes = ast.walk(ast.parse((PACKAGE / file).read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def called_in_order():
    """Names of all calls of the loop, in the order of the source, callees in place of their calls."""
    bodies = {name: functions_of(file)[name] for file, names in WRITTEN_IN.items() for name in names}

    def expand(name):
        for call in calls_of(bodies[name]):
            called = name_of(call)
            yield called
            if called in bodies and called != name:
                yield from expand(called)

    return list(expand("train"))


def test_the_functions_of_the_documented_loop_are_in_their_files():
    for name, file in documented():
        assert name in functions_of(file), f"{name} in {file}"


def test_the_documented_loop_calls_its_functions_in_the_order_of_the_code():
    rest = iter(called_in_order())
    for name, _ in documented():
        assert name in rest, f"{name} is not called where docs/map.md has it"
