"""The source keeps its own rules: who imports whom, and what is never used."""

import ast
import functools
import pathlib
import re

import pytest

from parallax.config.sections import ALL_AXES

PACKAGE = pathlib.Path(__file__).parents[1] / "parallax"
FILES = sorted(PACKAGE.rglob("*.py"))

# A folder, or a module that lies beside the folders, imports only from rows above its own.
ROWS = [
    "version",
    "errors",
    "jaxprs",
    "storage",
    "user_code",
    "display",
    "hardware",
    "schedules",
    "config",
    "processes",
    "sharding",
    "checkpoint",
    "model",
    "pipeline",
    "data",
    "step",
    "inference",
    "interop",
    "analysis",
    "training",
    "cli",
    "__init__",
    "__main__",
]
ROW_OF = {noun: row for row, noun in enumerate(ROWS)}

# The training framework: what a run consists of, and what that stands on. Around it is the workshop, which generates,
# converts, analyses, and has the commands.
WORKSHOP = {"inference", "interop", "analysis", "cli", "__init__", "__main__"}
# Where a run uses the workshop, and what for.
USES_THE_WORKSHOP = {
    "training/build.py": "whether parameters fit on a device, and whether the sample's prompt can be read",
    "training/facts.py": "what a run is about to say of itself: FLOPs, memory, the speed of light",
    "training/run.py": "the sample at its end, and tasks of lm-evaluation-harness",
}

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(path: pathlib.Path) -> str:
    """The folder of a module in the package, or the module's name if it lies beside the folders."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def imported_modules(path: pathlib.Path) -> frozenset[str]:
    """Full names of all that a file imports; `from a import b` may mean the module a.b."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full: `from parallax.sharding.mesh import AXES`"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@every_file
def test_imports_point_to_rows_above(path):
    room = room_of(path)
    others = {name.split(".")[1] for name in imported_modules(path) if name.startswith("parallax.")} - {room}
    below = {other for other in others if ROW_OF[other] >= ROW_OF[room]}
    assert not below, f"{room} imports {below}, which the rows below it have"


def test_the_core_imports_nothing_of_the_workshop():
    """But for what is listed."""
    core = [path for path in FILES if room_of(path) not in WORKSHOP]
    modules = {path: [name for name in imported_modules(path) if name.startswith("parallax.")] for path in core}
    users = {path for path, names in modules.items() if {name.split(".")[1] for name in names} & WORKSHOP}
    assert {str(path.relative_to(PACKAGE)) for path in users} == {*USES_THE_WORKSHOP}


def test_each_folder_and_module_of_the_package_has_one_row():
    assert sorted(ROWS) == sorted({room_of(path) for path in FILES})


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count, too: they hide a circle, and do not undo it."""
    name_of = {path: ".".join(("parallax", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES}
    files = {name.removesuffix(".__init__"): path for path, name in name_of.items()}
    left = {
        name: {other for other in imported_modules(path) if other in files} - {name} for name, path in files.items()
    }
    while free := {name for name, needs in left.items() if not needs & {*left}}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left


# What is read from traced programs needs no compiler, and what is read from compiled ones no plan.
ROOMS_OF_ANALYSIS = ("traced", "compiled", "planned")


@pytest.mark.parametrize("room", ROOMS_OF_ANALYSIS)
def test_rooms_of_the_analysis_import_one_way(room):
    files = [*(PACKAGE / "analysis" / room).glob("*.py")]
    imported = set().union(*map(imported_modules, files))
    later = ROOMS_OF_ANALYSIS[ROOMS_OF_ANALYSIS.index(room) + 1 :]
    assert files and not {name for name in imported if name.startswith(tuple(f"parallax.analysis.{o}" for o in later))}
    assert "parallax.analysis.report" not in imported


@every_file
def test_the_pipeline_is_used_through_its_front(path):
    inner = {f"parallax.pipeline.{file.stem}" for file in (PACKAGE / "pipeline").glob("*.py")}
    if path.parent.name != "pipeline":
        assert not inner & imported_modules(path), "import from parallax.pipeline"


PURE = [
    "config/",
    "errors.py",
    "display/html.py",
    "display/tables.py",
    "display/svg.py",
    "storage/files.py",
    "storage/run_files.py",
    "user_code.py",
    "schedules/",
    "cli/schedules.py",
    "cli/watch.py",
    "analysis/load_picture.py",
    "training/goodput.py",
    "training/slow_processes.py",
]


@pytest.mark.parametrize("pure", PURE)
def test_schedules_need_no_jax(pure):
    files = [f for f in FILES if str(f.relative_to(PACKAGE)).startswith(pure)]
    names = set().union(*(imported_modules(f) for f in files))
    assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "optax")}


def test_only_the_command_line_sees_a_config_dict():
    users = {f.relative_to(PACKAGE) for f in FILES if "ml_collections" in imported_modules(f)}
    assert {str(user) for user in users} == {"cli/command.py"}


PATHS = PACKAGE / "storage" / "files.py"
PATH_MODULES = {"shutil", "fcntl", "glob", "tempfile", "mmap"}
# What opens a file, or lists or changes a folder; what is there, a path says itself.
PATH_METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "pread", "preadv", "fsync"}
PATH_METHODS |= {"unlink", "mkdir", "rename", "makedirs", "touch", "chmod", "symlink_to"}
PATH_METHODS |= {"iterdir", "glob", "listdir", "scandir"}
NOT_A_PATH = {"files", "file_system", "tensorstore", "KvStore", "signal", "self"}  # have such methods
# What touches files by itself, and why.
OWN_WAY = {
    "analysis/": "what people keep of a plan, and traces of JAX's profiler",
    "data/": "corpora, which are the user's, and shards, which are mapped",
    "errors.py": "/dev/null, for a stream that nobody reads any more",
    "hardware/devices.py": "the devices of this machine, in /dev and /sys",
    "version.py": "the package's own source",
    "storage/copies.py": "copies of what is elsewhere, in a folder of its own",
    "cli/command.py": "config files, which are the user's, and the width of the terminal",
    "cli/schedules.py": "the width of the terminal",
}


def path_touches(path: pathlib.Path) -> set[str]:
    """Calls that open, look at or change files, and modules that do."""
    found = {*imported_modules(path) & PATH_MODULES}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.add("open")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PATH_METHODS:
            owner = node.func.value
            if not (isinstance(owner, ast.Name) and owner.id in NOT_A_PATH):
                found.add(ast.unparse(node.func))
    return found


@every_file
def test_files_are_opened_and_made_in_one_module(path):
    found = path_touches(path)
    assert not found or path == PATHS or str(path.relative_to(PACKAGE)).startswith((*OWN_WAY,)), (
        f"use storage/files.py for {found}"
    )


# Text that Python reads or writes in the locale's encoding unless it is told another.
TEXT_CALLS = {"open": 1, "read_text": 0, "write_text": 1}  # places of the mode, or of the encoding
SOURCES = [*FILES, PACKAGE.parent / "train.py"]
SOURCES += [file for folder in ("benchmarks", "configs", "docs") for file in (PACKAGE.parent / folder).glob("*.py")]


def takes_the_locales_encoding(call: ast.Call) -> bool:
    """Whether a call opens text, or the text of another process, and does not say in which encoding."""
    said = {word.arg: word.value for word in call.keywords}
    owner, name = getattr(call.func, "value", None), getattr(call.func, "attr", getattr(call.func, "id", ""))
    if "encoding" in said or getattr(owner, "id", "") in ("os", "gzip", "tensorstore", "sources"):
        return False
    if {"text", "universal_newlines"} & {*said}:
        return True
    if name not in TEXT_CALLS or (owner is None and name != "open"):
        return False
    if name != "open":
        return len(call.args) <= TEXT_CALLS[name]
    place = 1 if owner is None else 0  # open(path, mode), but path.open(mode)
    mode = call.args[place] if len(call.args) > place else said.get("mode", ast.Constant("r"))
    return isinstance(mode, ast.Constant) and "b" not in mode.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_text_is_read_and_written_in_a_named_encoding(path):
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    assert [ast.unparse(call) for call in calls if takes_the_locales_encoding(call)] == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("open(path)", True),
        ("open(path, 'a')", True),
        ("open(path, 'rb')", False),
        ("path.open()", True),
        ("path.open('wb')", False),
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command)", False),
    ],
)
def test_what_opens_text_is_told_apart(call, expected):
    assert takes_the_locales_encoding(ast.parse(call).body[0].value) == expected


# Pallas kernels have no replication types: one adapter runs them where none are checked, and says the types itself.
UNCHECKED = PACKAGE / "model" / "kernels" / "pallas.py"


@every_file
def test_what_is_never_written_is_not_there(path):
    text = path.read_text()
    never = {
        "private JAX": r"jax\._src",
        "shard_map without its check": r"check_(vma|rep)\s*=\s*False",
        "a default born outside config/sections.py": r"config\w*\.get\(",
        "what runs code of a file that it loads": r"import (cloud)?pickle|\b(eval|exec)\(|allow_pickle=True|yaml\.load|"
        r"trust_remote_code=|torch\.load",
    }
    found = [why for why, pattern in never.items() if re.search(pattern, text)]
    assert found == (["shard_map without its check"] if path == UNCHECKED else [])


# Only these modules name the data axes. To add another, change them, its exceptions below, and a page.
DATA_AXES_ARE_SAID_IN = (
    "config/sections.py",
    "sharding/activations.py",
    "sharding/plan.py",
    "sharding/mesh.py",
    "sharding/layout.py",
)
# What else names one, and why.
NAME_AN_AXIS = {
    "model/checks.py": "experts must divide over ep",
    "model/experts/experts.py": "the layouts of experts' weights: ep shards them in a layer, too",
    "analysis/planned/layouts.py": "the layouts that a search tries",
    "analysis/planned/plan.py": "the columns and flags of a plan's tables",
    "analysis/planned/step_time.py": "which messages are a policy's",
    "analysis/planned/sweep.py": "the sizes, colours and labels of the layouts that it prices",
}
OF_LAYERS_AND_STEPS = ("model/", "pipeline/", "sharding/", "inference/", "step/", "training/", "analysis/")


def data_axes_named(tree: ast.AST) -> set[str]:
    """Strings that are a data axis or a layout with one; those of docstrings are left out."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    axis = re.compile(r"/({0})\b|^({0})$".format("|".join({*ALL_AXES} - {"pp", "tp"})))
    return {node.value for node in strings if id(node) not in docstrings and axis.search(node.value)}


@every_file
def test_layers_the_executor_and_analyses_know_no_data_axis(path):
    """No layout of the batch and no name of a data axis is written outside of the modules that are listed."""
    name = str(path.relative_to(PACKAGE))
    found = data_axes_named(tree_of(path))
    if name in NAME_AN_AXIS:
        assert found, f"{name} names no data axis any more: take it off the list"
    elif name.startswith(OF_LAYERS_AND_STEPS) and name not in DATA_AXES_ARE_SAID_IN:
        assert not found


# A reader must guess what these name.
VAGUE = {"at", "found", "how", "one", "own", "way"}


def names_bound(tree: ast.AST) -> set[tuple[str, int]]:
    """Names of variables, parameters, fields, functions and classes where they get a value, with their lines."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            bound.add((getattr(node, "id", getattr(node, "attr", None)), node.lineno))
        elif isinstance(node, ast.arg):
            bound.add((node.arg, node.lineno))
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name, node.lineno))
        elif isinstance(name := getattr(node, "name", getattr(node, "rest", None)), str):
            bound.add((name, node.lineno))
    return bound


def test_a_name_says_what_it_is():
    files = [*FILES, PACKAGE.parent / "train.py"]
    vague = [f"{path}:{line} {name}" for path in files for name, line in names_bound(tree_of(path)) if name in VAGUE]
    assert vague == []


@pytest.mark.parametrize(
    "text",
    [
        "at = 1",
        "at: int",
        "self.at = 1",
        "x, *at = y",
        "[at for at in x]",
        "if at := x: pass",
        "lambda at: 0",
        "def f(*, at): pass",
        "def at(): pass",
        "class at: pass",
        "from x import at",
        "import x as at",
        "try: pass\nexcept E as at: pass",
        "match x:\n case at: pass",
        "match x:\n case {**at}: pass",
    ],
)
def test_every_binding_of_a_name_is_seen(text):
    assert "at" in {name for name, _ in names_bound(ast.parse(text))}
    assert not names_bound(ast.parse("x.at[i].set(at, at=at)"))


# What each command has, which parallax/cli/command.py calls.
OF_EVERY_COMMAND = {"main", "act", "parse", "parser", "run", "FLAGS", "USAGE", "__all__"}


def names_defined(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module gives to something: those in tuples, and of attributes, too."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return {statement.name} if hasattr(statement, "name") else set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    written = [
        node for target in targets for node in ast.walk(target) if isinstance(getattr(node, "ctx", 0), ast.Store)
    ]
    return {name for node in written if (name := getattr(node, "id", getattr(node, "attr", None)))}


def test_a_public_name_is_defined_in_one_module():
    homes = {}
    for path in FILES:
        for name in set().union(*map(names_defined, tree_of(path).body)):
            if not name.startswith("_") and name not in OF_EVERY_COMMAND:
                homes.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    assert len(homes) > 1000
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
    assert names_defined(ast.parse("a, (b, *c.d) = e").body[0]) == {"a", "b", "d"}
