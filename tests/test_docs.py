"""The documentation is held to the code: its commands and blocks run, its equations are JAX's, its names are there."""

import ast
import dataclasses
import doctest
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import flax.linen as nn
import jax
import numpy as np
import pytest
import yaml
from support.docs_commands import (
    BEFORE,
    CHEAPER,
    COMMAND,
    EXTEND,
    FILES,
    PAGES,
    PARSED,
    ROOT,
    SLOW,
    STATUS,
    blocks,
    commands,
    named_in_text,
    without_fences,
)
from support.tiny_model import mesh_of

from configs.base import get_config
from docs import config_keys, notebook_pages
from parallax.config.sections import SECTIONS
from parallax.config.settings import default_settings, read_settings
from parallax.sharding.collectives import as_varying, varying_axes
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import layouts_of
from parallax.version import VERSION, code_version

README = ROOT / "README.md"
AXES_PAGES = [ROOT / "docs" / f"{axis}.md" for axis in ("pp", "dp", "cp", "ep", "tp")]
LEFT_OUT = (".git", ".cache", ".venv*", "build", "runs", "__pycache__", ".hypothesis", ".*_cache", "*.egg-info")
# Of equations; others are 2·2·2.
MESHES = {"docs/cp.md": dict(pp=1, dp=2, cp=2, tp=2), "docs/ep.md": dict(pp=2, dp=1, ep=2, tp=2)}
SIZES = {"batch": 4, "seq": 4, "d_model": 8, "d_ff": 16, "microbatches": 2, "heads": 4, "d_head": 4}
SIZES |= {"experts": 4, "d_expert": 6}
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
ERROR = 1e-5  # of float32 sums in another order, over the largest entry


def name_of(page):
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
pages_with = lambda language: pytest.mark.parametrize(  # noqa: E731
    "page",
    [p for p in PAGES if any(b.language == language for b in blocks(p.read_text())) and p != EXTEND],
    ids=name_of,
)


# ---- the package


def test_nothing_that_a_user_reads_installs_somebody_elses_package():
    """The name of the import is another project's on package indexes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own, extras = project["name"], project["optional-dependencies"]
    assert own != "parallax"
    assert {need.split("[")[0] for needs in extras.values() for need in needs if "parallax" in need} == {own}
    foreign = re.compile(r"""pip install (-\S+ )*["'`]*parallax\b(?!-)|["'`]parallax\[""")
    folders = ("parallax", "benchmarks", "configs", "docs", "launch", "notebooks")
    kinds = (".py", ".md", ".ipynb", ".sh", ".yaml", ".yml")
    read = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    read += [file for file in ROOT.iterdir() if file.is_file() and (file.suffix in kinds or file.name == "Makefile")]
    assert len(read) > 200
    assert [file for file in read if foreign.search(file.read_text())] == []


def test_the_version_is_that_of_the_source_whatever_is_installed_by_the_name_of_the_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "parallax.version.VERSION"}
    assert code_version().startswith(f"{VERSION}+") and re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


# ---- commands


@pytest.fixture
def copy(tmp_path):
    """The repository without what was built in it, and the files that commands read."""
    folder = tmp_path / "parallax"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(command, folder):
    """What a command prints, stderr too; it must end as it says."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(folder)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=env, text=True, timeout=540, **streams)
    assert done.returncode == STATUS.get(command, 0), f"{command}\n{done.stdout}"
    return done.stdout


@each_page
def test_every_command_is_run_or_named_with_a_reason(page):
    hidden = COMMAND.findall(without_fences(page.read_text()))
    assert not hidden, f"{name_of(page)}: fence these as bash, or write them behind `$ ` with what they print"
    assert not {block.language for block in blocks(page.read_text())} - {"bash", "python", "diff"}
    assert all(subprocess.run(["bash", "-n", "-c", command]).returncode == 0 for command in commands(page))


def test_tables_of_commands_have_no_others():
    known = {command for page in PAGES for command in commands(page)}
    assert not {*CHEAPER, *PARSED, *STATUS} - known
    assert not {*CHEAPER} & {*PARSED}
    assert {*BEFORE} <= {name_of(page) for page in PAGES}


def quick(page):
    return [command for command in commands(page) if command not in PARSED and not SLOW.search(command)]


@pytest.mark.parametrize("page", [page for page in PAGES if quick(page) and page != EXTEND], ids=name_of)
def test_commands_that_take_no_time_do_what_the_page_shows(page, copy):
    for command in quick(page):
        printed = run(command, copy)
        shown = transcript(page.read_text(), command)
        assert shown is None or printed.split() == shown.split(), command


def transcript(text, command):
    """What a page shows that a command prints, None where it shows nothing."""
    found = re.search(rf"(?m)^    \$ {re.escape(command)}\n((?:    .*\n|\n)*)", text)
    return found and found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if {*commands(page)} - {*PARSED} and page != EXTEND], ids=name_of
)
def test_all_commands_of_a_page_run_in_their_order(page, copy):
    for command in BEFORE.get(name_of(page), []):
        run(command, copy)
    for command in commands(page):
        if command not in PARSED:
            run(CHEAPER.get(command, command), copy)


def read_by_programs(lines):
    """What is wrong with each command line of the project's programs, where anything is."""
    reader = [sys.executable, str(ROOT / "tests" / "support" / "docs_parsing.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(reader, cwd=ROOT, env=env, input=json.dumps(lines), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return {line: why for line, why in zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True) if why}


def is_whole(command):
    """Whether a command that a text names is one to be typed."""
    return "…" not in command and ("--" in command or command.startswith("python benchmarks/"))


def test_commands_that_are_not_run_are_read():
    """Programs of the project read their line, make says what it would do, pip's extras and files are there."""
    told = [command for page in PAGES for command in named_in_text(page)]
    listed = [*PARSED, *filter(is_whole, told)]
    listed = [re.sub(r"^(?:\.venv/bin/)?parallax-", "python -m parallax.", line) for line in listed]
    listed = [re.sub(r"^(?:nohup )?(?:\.venv/bin/)?python (.*?)(?: &)?$", r"python \1", line) for line in listed]
    programs = [
        line for line in listed if line.startswith("python ") and not re.search("pytest|http.server|venv", line)
    ]
    assert not read_by_programs(sorted({*programs}))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in [*PARSED, *told]:
        words = [word for word in shlex.split(command) if "=" not in word]
        if words and words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        assert {extra for listed in re.findall(r"\[([\w,]+)\]", command) for extra in listed.split(",")} <= {*extras}
        files = re.findall(r"(?:launch|benchmarks|configs|tests|docs)/[\w/]+\.(?:py|sh)", command)
        assert all((ROOT / file).is_file() for file in files), command


def test_a_flag_that_is_not_there_is_found():
    broken = [
        "python benchmarks/step.py --gathre step",
        "python -m parallax.plan --config=configs/tiny_gqa.py --analitic",
        "python train.py --config=configs/tiny_gqa.py --config.train.stepz=3",
        "python -m parallax.nothing",
    ]
    assert {*read_by_programs(broken)} == {*broken}


# ---- blocks of Python


@pages_with("python")
def test_python_blocks_run_as_they_stand(page):
    names = {}
    for block in blocks(page.read_text()):
        if block.language == "python":
            exec(compile(block.text, name_of(page), "exec"), names)


def test_the_layer_of_the_readme_is_the_same_on_a_mesh():
    (block,) = [block for block in blocks(README.read_text()) if block.language == "python"]
    names = {}
    exec(compile(block.text, "README.md", "exec"), names)
    layouts, params = layouts_of(names["params"]), nn.meta.unbox(names["params"])
    x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
    specs = jax.tree.map(Layout.spec, layouts, is_leaf=lambda leaf: isinstance(leaf, Layout))
    x_spec = Layout.parse("batch seq d_model/tp").spec()
    apply = names["layer"].apply
    on_mesh = jax.shard_map(apply, mesh=mesh_of(2, 2, 2), in_specs=(specs, x_spec), out_specs=x_spec, check_vma=True)
    np.testing.assert_allclose(on_mesh(params, x), apply(params, x), rtol=ERROR, atol=ERROR)


@pytest.mark.slow
def test_the_losses_of_the_readme_are_those_of_its_command():
    """The last digits of a loss differ from one version of JAX to another, and errors are of rounding: of one size."""
    row = r"(?m)^[ |]*(\d+)[ ·]+(\d+)[ ·]+(\d+)[^|\n]*?[ |]+(\d\.\d{5})[ |]+(\d\.\de[-+]\d\d|)"
    printed = run("python benchmarks/meshes.py", ROOT)
    shown, found = re.findall(row, README.read_text()), re.findall(row, printed)
    assert len(shown) == len(found) == 4
    for (*mesh, loss, error), (*same_mesh, measured, off) in zip(shown, found, strict=True):
        assert mesh == same_mesh and abs(float(loss) - float(measured)) < 2e-5
        assert float(off) / 2 <= float(error or 0) <= 2 * float(off)
    assert max(float(error) for error in re.findall(r"\d\.\de[-+]\d\d", printed)) <= ERROR


def equations(page):
    """The blocks of a page that have LAYOUTS, forward and backward, executed in their order."""
    names, found = {}, []
    for block in blocks(page.read_text()):
        if block.language == "python":
            exec(compile(block.text, name_of(page), "exec"), names)
            if "LAYOUTS" in block.text:
                found.append(dict(names))
    return found


@pytest.mark.parametrize("page", AXES_PAGES, ids=name_of)
def test_a_pages_backward_pass_is_what_jax_makes_of_its_forward_pass(page):
    found = equations(page)
    assert len(found) >= 2
    for names in found:
        mesh = mesh_of(**MESHES.get(name_of(page), dict(pp=2, dp=2, tp=2)))
        check_transposed(names["forward"], names["backward"], dict(names["LAYOUTS"]), mesh)


def check_transposed(forward, backward, layouts, mesh):
    y_layout = layouts.pop("y")
    rng = np.random.default_rng(0)
    shapes = [[SIZES[name] for name in Layout.parse(text).names] for text in (*layouts.values(), y_layout)]
    *arrays, dy = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    def both(*arrays):
        *inputs, dy = arrays
        y, pull = jax.vjp(forward, *inputs)
        dy = as_varying(dy, varying_axes(y))
        return pull(dy), backward(*inputs, dy)

    specs = [Layout.parse(text).spec(mesh) for text in layouts.values()]
    mapped = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(*specs, Layout.parse(y_layout).spec(mesh)),
        out_specs=(tuple(specs), tuple(specs)),
        check_vma=True,
    )
    expected, actual = jax.tree.map(np.asarray, jax.jit(mapped)(*arrays, dy))
    for e, a in zip(expected, actual, strict=True):
        assert np.abs(e).max() > 0
        assert np.abs(e - a).max() <= ERROR * np.abs(e).max()


def test_an_equation_without_its_sum_is_found():
    *_, scale = equations(ROOT / "docs" / "dp.md")
    wrong = lambda x, scale, dy: (dy * scale[None, None], (x * dy).sum(axis=(0, 1)))  # noqa: E731
    with pytest.raises((AssertionError, ValueError)):
        check_transposed(scale["forward"], wrong, dict(scale["LAYOUTS"]), mesh_of(2, 2, 2))


# ---- names

DOTTED = re.compile(r"`(parallax(?:\.\w+)+)`")
PATH = re.compile(r"`((?:parallax|tests|docs|configs|benchmarks|launch|notebooks)/[\w./]*)(?:::[\w]+)?`")
KEY = re.compile(rf"`(?:--config\.)?((?:{'|'.join(SECTIONS)})\.(?!py\b|json)\w+)[=`]")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@each_page
def test_names_of_the_package_are_there(page):
    for name in DOTTED.findall(page.read_text()):
        assert resolves(name), f"{name_of(page)}: {name} is not there"


def resolves(name):
    parts = name.split(".")
    if len(parts) == 2 and importlib.util.find_spec(f"parallax.cli.{parts[1]}"):
        return True  # a command; imported by this name, its module would hide px.plan
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute) and attribute not in getattr(found, "__dataclass_fields__", {}):
                return False
            found = getattr(found, attribute, None)
        return True
    return False


@each_page
def test_files_and_keys_that_a_page_names_are_there(page):
    text = page.read_text()
    if page.name == "coming-from.md":  # the other columns are of others
        text = re.sub(r"(?m)^(\|[^|]*\|).*$", r"\1", text)
    assert not {path for path in PATH.findall(text) if not (ROOT / path).exists()}, name_of(page)
    keys = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__dataclass_fields__}
    others = {"model.loss_and_grad", "model.logits", "model.safetensors"}
    assert not set(KEY.findall(text)) - keys - others, name_of(page)


@each_page
def test_links_lead_to_files(page):
    text = re.sub(r"`[^`]*`", "", without_fences(page.read_text()))
    lost = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    assert not lost, name_of(page)


def test_figures_of_the_readme_are_those_of_the_pages_that_measure():
    section = README.read_text().partition("## What is measured")[2]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 5
    pages = "".join(page.read_text() for page in PAGES if page.name not in ("README.md", "CHANGELOG.md"))
    pages += (ROOT / "benchmarks" / "README.md").read_text()
    for figure in re.findall(r"\d[\d.,]*(?:e-\d+)?(?: %)?", "".join(rows)):
        assert re.search(rf"(?<![\d.]){re.escape(figure.rstrip('.,'))}(?!\d)", pages), f"{figure} is measured nowhere"


def test_the_readme_names_what_was_measured_on_an_accelerator_with_its_command():
    page = (ROOT / "docs" / "measured" / "h100.md").read_text().partition("# Measured on one H100")[2]
    (command,) = re.findall(r"`(python -m parallax.firstrun [^`]+)`", page.partition("\n| ")[0].replace("\n", " "))
    (step,) = re.findall(r"(?m)^\| step of [^|]*\|[^|]*\| (\d\.\d+ s) ", page)
    (mfu,) = re.findall(r"(?m)^\| MFU \|[^|]*\| (\d\d\.\d %) ", page)
    (row,) = [line for line in README.read_text().splitlines() if f"`{command}`" in line]
    assert step in row and mfu in row
    header = (ROOT / re.search(r"configs/\w+\.py", command)[0]).read_text()
    assert f"MFU {float(mfu[:-2]):.0f} %" in header


def test_the_page_of_limits_names_what_is_used_of_flax_linen():
    page = (ROOT / "docs" / "limits.md").read_text().partition("## What rests on Flax Linen")[2]
    used = set()
    for file in (ROOT / "parallax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nn":
                used.add(f"nn.{node.attr}")
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "flax":
                used |= {f"flax.{alias.name}" for alias in node.names} if node.module == "flax" else {node.module}
    assert used == {*re.findall(r"`((?:nn|flax)\.\w+)`", page)}


@each_page
def test_a_loss_that_a_page_shows_says_which_pythons_library_it_is_of(page):
    """Each version of Python has another standard library, which is what the quickstart learns from."""
    for before, block in re.findall(r"(?m)((?:^(?! {4}).+\n)+)\n((?: {4}.*\n)+)", page.read_text()):
        if re.search(r"\bloss \d", block):
            assert re.search(r"Python\s3\.\d", before), block


# ---- what is made from the code


def test_the_base_config_and_the_reference_are_those_of_the_sections():
    for path, text in ((config_keys.BASE, config_keys.base()), (config_keys.PAGE, config_keys.page())):
        assert path.read_text() == text, "`python docs/config_keys.py` writes it anew"
    assert read_settings(get_config()) == default_settings()


def test_the_reference_of_configs_has_every_preset():
    listed = re.findall(r"(?m)^\| `(configs/\w+\.py)` \| .+ \| .+ \|$", config_keys.PAGE.read_text())
    there = {f"configs/{file.name}" for file in ROOT.glob("configs/*.py")}
    assert {*listed} == there - {"configs/base.py"} and len(listed) > 4


def test_examples_of_what_makes_pages_are_right():
    tried = doctest.testmod(config_keys)
    assert tried.attempted
    assert not tried.failed


def test_the_reference_of_configs_has_every_key_with_its_meaning():
    for name, section in SECTIONS.items():
        keys = re.search(rf"(?ms)^## {name}\n(.+?)(^## |\Z)", config_keys.PAGE.read_text())[1]
        assert re.findall(r"(?m)^\| `(\w+)` \| `.+` \| .*\w+.* \|$", keys) == [*section.__dataclass_fields__]
    assert all(field.metadata["key"].meaning for section in SECTIONS.values() for field in dataclasses.fields(section))


# ---- the site


class Site(yaml.SafeLoader):
    """mkdocs.yml, without the tags of its own that a YAML may have."""


def navigation():
    """The pages that mkdocs.yml lists."""

    def walk(entries):
        for entry in entries:
            for value in entry.values():
                yield from walk(value) if isinstance(value, list) else [value]

    return [*walk(yaml.load((ROOT / "mkdocs.yml").read_text(), Site)["nav"])]


def elsewhere():
    """The pages of the site that do not lie in docs/: docs/hooks.py, which needs mkdocs, has them."""
    tree = ast.parse((ROOT / "docs" / "hooks.py").read_text())
    (found,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "ELSEWHERE")
    return ast.literal_eval(found)


def test_every_page_is_in_the_navigation_once():
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).as_posix() for page in docs.glob("**/*.md")] + [*elsewhere()]
    pages += [f"{file.stem}.md" for file in NOTEBOOKS]
    assert sorted(navigation()) == sorted(pages)
    assert all((ROOT / source).is_file() for source in elsewhere().values())


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebooks_page_has_its_texts_code_and_pictures(file):
    markdown, pictures = notebook_pages.page(file, lambda text: text)
    cells = json.loads(file.read_text())["cells"]
    assert all("".join(cell["source"]).strip() in markdown for cell in cells[1:])
    assert markdown.startswith(
        "".join(cells[0]["source"]).partition("\n")[0] + f"\n\n*`notebooks/{file.name}`, as it ran.*\n"
    )
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = ["".join(output["text"]).strip() for output in outputs if output["output_type"] == "stream"]
    assert all(text in markdown for text in printed)
    drawn = [form for output in outputs for form in output.get("data", {}) if form in notebook_pages.SUFFIXES]
    assert len(drawn) == len(pictures) == len(re.findall(r"(?m)^!\[.+\]\((.+)\)$", markdown)) > 0
    starts = {".png": b"\x89PNG", ".svg": "<svg"}
    assert all(content.startswith(starts[name[-4:]]) for name, content in pictures.items())


def test_examples_of_notebook_pages_are_right():
    assert doctest.testmod(notebook_pages) == (0, 1)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built."""
    if not importlib.util.find_spec("mkdocs"):
        pytest.skip("needs the extra docs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_the_network(site):
    from docs import docstrings

    assert doctest.testmod(docstrings).failed == 0
    written = [*site.rglob("*.html")]
    assert {page.stem for page in written} >= {pathlib.Path(page).stem for page in navigation()}
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert {page.name: found for page in written if (found := loads.findall(page.read_text()))} == {}
    far = re.compile(r"@import|url\(['\"]?(?:https?:)?//")
    assert not [sheet.name for sheet in site.rglob("*.css") if far.search(sheet.read_text())]


@pytest.mark.slow
def test_the_site_is_searched_from_files(site):
    """Pages from files load no JSON and start no Worker: the index is a script, docs/iframe-worker.js the Worker."""
    index = (site / "search" / "search_index.js").read_text()
    entries = json.loads(index.removeprefix("var __index = "))["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries}
    assert found >= {page.replace(".md", ".html") for page in navigation()}
    assert all(entry["title"] and entry["text"] is not None for entry in entries)
    for page in navigation():
        head, _, body = (site / page.replace(".md", ".html")).read_text().partition("</head>")
        to_root = "../" * page.count("/")
        assert f'<script src="{to_root}iframe-worker.js">' in head and "assets/javascripts/bundle" in body, page
    assert (site / "iframe-worker.js").read_text() == (ROOT / "docs" / "iframe-worker.js").read_text()


@pytest.mark.slow
def test_links_to_notebooks_lead_to_their_pages(site):
    for file in NOTEBOOKS:
        assert f'href="{file.stem}.html"' in (site / "index.html").read_text()
    assert 'href="03_pipeline_schedules.html"' in (site / "pipeline.html").read_text().partition("<article")[2]
    shown = (site / "01_one_model_every_mesh.html").read_text()
    pictures = re.findall(r'<img [^>]*src="(01_one_model_every_mesh_\d\.\w+)"', shown)
    assert len(pictures) == 3 and all((site / name).is_file() for name in pictures)


# ---- the worked changes


def changes():
    """The sections of docs/extend.md, by title."""
    _, *sections = re.split(r"(?m)^## ", EXTEND.read_text())
    return {section.partition("\n")[0]: section for section in sections}


def make_change(title, folder):
    """Write the files of a section and apply its differences; returns its commands."""
    todo = []
    for block in blocks(changes()[title]):
        if block.language == "python":
            (folder / block.title).write_text(block.text)
        elif block.language == "diff":
            command = ["git", "apply", "-C1", "-"]
            applied = subprocess.run(command, cwd=folder, input=block.text, text=True, capture_output=True)
            assert applied.returncode == 0, f"docs/extend.md, {title}: its diff does not fit: {applied.stderr}"
        else:
            todo += block.text.splitlines()
    return todo


CHANGES = [
    "A layer",
    "A norm",
    "An optimizer",
    "Adapters",
    "A product of low rank",
    "A kind of layer",
    "A loss",
    "Preferences",
    "A schedule",
    "A sharding policy",
    "A data source",
    "A mesh axis",
    "In a notebook",
]


def is_as_in_the_repository(path, copy):
    source = ROOT / path.relative_to(copy)
    return source.exists() and source.stat().st_mtime_ns == path.stat().st_mtime_ns  # a copy keeps its time


@pytest.mark.parametrize("title", CHANGES)
def test_a_worked_change_fits_and_does_what_the_page_shows(title, copy):
    printed = [run(command, copy) for command in make_change(title, copy) if not SLOW.search(command)]
    shown = re.findall(r"(?m)^    (\S+ .*)$", re.sub(r"(?ms)^```.*?^```$", "", changes()[title]))
    assert {*shown} <= {*"".join(printed).splitlines()}
    written = [path for path in copy.rglob("*.py") if not is_as_in_the_repository(path, copy)]
    assert written
    for style in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *style, *written]
        checked = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
@pytest.mark.parametrize("title", CHANGES)
def test_a_worked_change_passes_its_tests(title, copy):
    for command in make_change(title, copy):
        run(command, copy)


def test_no_worked_change_is_left_out():
    assert [*changes()] == CHANGES
