"""The source keeps its own rules: who imports whom, what is never used, and how long functions get."""

import ast
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "parallax"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module imports only from rows above its own, and from its own folder.
ROWS = [
    {"plainfile"},
    {"errors", "units", "version", "accelerators"},
    {"arguments", "progress", "runfiles"},
    {"batch", "mesh", "schedules", "tokenizer", "sampling", "jaxprs", "defaults"},
    {"distributed"},
    {"notation", "data", "checkpoint", "chips", "launch", "compile_cache"},
    {"collectives", "contraction", "compiler"},
    {"padding"},
    {"layers", "loss", "optimizer", "guard"},
    {"model"},
    {"pipeline", "checks", "overview"},
    {"sharded_model", "decoding"},
    {"step", "diagnosis", "inside"},
    {"settings"},
    {"assembly", "vocabulary"},
    {"budget", "trained", "watch"},
    {"generate"},
    {"command"},
    {"report", "convert"},
    {"plan"},
    {"loop"},
    {"replay", "evaluate", "run", "firstrun"},
    {"__init__"},
]
ROW_OF = {noun: row for row, nouns in enumerate(ROWS) for noun in nouns}

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def noun(path: pathlib.Path) -> str:
    """The module, or the folder, that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(tree: ast.AST) -> set[str]:
    """Full names of all that a file imports; `from a import b` may mean the module a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full: `from parallax.mesh import AXES`"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_nouns(path: pathlib.Path) -> set[str]:
    names = (name.split(".") for name in imported_modules(ast.parse(path.read_text())))
    return {parts[1] for parts in names if parts[0] == "parallax" and len(parts) > 1}


@every_file
def test_imports_point_to_rows_above(path):
    own = noun(path)
    assert own in ROW_OF, f"give {own!r} a row in the table of this test"
    below = {other for other in imported_nouns(path) - {own} if ROW_OF[other] >= ROW_OF[own]}
    assert not below, f"{own} imports {below} from its own row or one below"


@pytest.mark.parametrize("pure", ["errors", "schedules", "plainfile", "runfiles", "watch"])
def test_schedules_need_no_jax(pure):
    names = set().union(*(imported_modules(ast.parse(f.read_text())) for f in FILES if noun(f) == pure))
    assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "optax")}


def test_only_commands_and_the_loop_see_a_config_dict():
    users = {noun(f) for f in FILES if "ml_collections" in imported_modules(ast.parse(f.read_text()))}
    assert users <= {"loop", "command"}


# Pallas kernels have no replication types: one adapter runs them where none are checked, and says the types itself.
UNCHECKED = PACKAGE / "layers" / "kernels.py"


@every_file
def test_what_is_never_written_is_not_there(path):
    text = path.read_text()
    never = {
        "private JAX": r"jax\._src",
        "shard_map without its check": r"check_(vma|rep)\s*=\s*False",
        "a default born outside configs/base.py": r"config\w*\.get\(",
        "what runs code of a file that it loads": r"import (cloud)?pickle|\b(eval|exec)\(|allow_pickle=True|yaml\.load|"
        r"trust_remote_code=|torch\.load",
    }
    found = [why for why, pattern in never.items() if re.search(pattern, text)]
    assert found == (["shard_map without its check"] if path == UNCHECKED else [])


@every_file
def test_functions_stay_short(path):
    functions = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [f.name for f in functions if f.end_lineno - f.lineno + 1 > 60]
    assert not long
