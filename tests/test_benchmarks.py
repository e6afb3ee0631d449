"""Every benchmark says at once what it does, runs at its smallest size, and takes what is wrong as one line."""

import itertools
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from support.tiny_model import make_batch, mesh_of, settings_of

from parallax.analysis.planned.topology import CUDA_PLUGINS
from parallax.config.settings import with_code
from parallax.pipeline import ShardedModel
from parallax.sharding.layout import Layout, named_leaves

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
# What they share, the models that bare.py and gspmd.py compare with, which these run, layers of overlap.py, and the
# picture of timeline.py.
MODULES = {"arguments.py", "bare_model.py", "gspmd_model.py", "joined.py", "theirs.py", "timeline_picture.py"}
NAMES = sorted({path.name for path in FOLDER.glob("*.py")} - MODULES)  # so that none is forgotten
PAIRS = r"( [\d.,]+ / [\d.,]+ \| [+−]\d+\.\d % \|){3}"  # predicted, compiled and the error
# What is run of each, --smoke apart, and a line of figures that it must print.
RUNS = {
    "account.py": r"mlp +\d+\.\d% +\d+\.\d%",
    "attention.py": r"\| 2 x 128 \| blocks in XLA \| \d+\.\d\d ms \| \d+\.\d\d \|",
    "bare.py": r"ours/bare \d+\.\d{3}",
    "buckets.py": r"\| save \|( [\d,]+\.\d{3} \|){4}",
    "checkpoints.py": r"load and check +\d+ MB/s = \d+\.\d\d of the disk's writing",
    "checkpoints.py --meanwhile": r"steps meanwhile +\d+\.\d{3} s = \d+\.\d\d steps, \d+\.\d a save",
    "context.py": r"ring +\d+\.\d\d +\d+\.\d{3}  \d+\.\d+",
    "experts.py": r"experts +\d+\.\d\d +\d+\.\d{3} +\d+\.\d\d",
    "experts.py --products": r"blocks +\d+\.\d\d +\d+\.\d{3}",
    "closed_form.py": r"at most: 0\.\d\d % of the time, \d+\.\d % of the memory",
    "compile_time.py": r" +1 +\d+\.\d",
    "curves.py": r"\| all \| \d\.\d{4} \| [+-]\d+\.\d\d % \|",
    "curves.py --recipes": r"\| float8 row \| \d\.\d{4} \| [+-]\d+\.\d\d % \|",
    "data.py": r" +256 +32 +\d+\.\d +\d+\.\d +\d+\.\d",
    "decoding.py --ours": r"\| mla \| 2 \|( [\d,]+ \|){2}( - \|){4} \d+\.\d \|",
    "first_step.py": r"\| until here \| \d+\.\d \| \d+\.\d \| \d+ \| \d+\.\d \|",
    "gspmd.py": r"losses, and gradients of \d+ parameters: gspmd/ours 1\.000000",
    "gspmd.py --here": r"gspmd/ours \d+\.\d{3}",
    "gpus.py": r"\| `tiny_gqa` \| H100:1x8 \| fits \|( [\d.]+ MiB \|){2} [\d.e-]+ s \| \d+ % \| [\d.]+ MiB \| .* \|",
    "guard.py": r"CPU time +with / without +\d+\.\d{3}",
    "hf_table.py": r"\| \w+ \| 1·1·1 \| \d\.\de-\d+ \|.*",
    "large.py": r"\| tiny_gqa \| 2xv5p:2x2x1 \| replica 2 dp 4; .* \| [\d.]+ KiB \| 0\.00 s \| .* GB/s \|",
    "llmq.py": r"\| H100:1 \| bf16 \| bfloat16 \| \[1\]\(.*\) \| 100% \| 0\.\d \| [\d,]+ \| \d+% \| - \| - \| - \|",
    "tasks.py": r"\| sentences \| brier_score \| \d\.\d{6} \| \d\.\d{6} \|",
    "mixture.py": r"worst share 0\.\d{3} rows",
    "meshes.py": r" 1  1  1  \d\.\d{5} +0\.0e\+00",
    "overlap.py": r"\| nothing \| \d+\.\d\d \|.* \d+\.\d % \|( \d+\.\d \|){2}",
    "one_gpu.py --parts step kernels": r"\| kernels \| done \| \d+ \| build/one_gpu/kernels\.txt \|",
    "one_pass.py": r"F&B( +\d+\.\d\d){6}",
    "options.py": r"\| weights bfloat16 \|( [+-]\d\.\d\d GiB \|){2}( [+-]\d+\.\d % \|){2}",
    "options.py --here": r"\| weights bfloat16 \|.*\| not reported \|( [+-]\d+\.\d % \|){2} \d\.\d{6} \|",
    "orders.py": r"near\*2 +all_gather +contiguous +\d+\.\d\d +\d\.\d{3} +\d+\.\d\d +\d+\.\d{3}",
    "plan.py": r"Spearman's correlation of 2 layouts: -?1\.00",
    "predictions.py": rf"\| tiny_gqa \| 1·1·1 \| accumulate \| layer \|{PAIRS}.*",
    "predictions.py --tpu": rf"\| tiny_gqa \| 1·4·1 \| accumulate \| layer \|{PAIRS}.*",
    "published.py": r"\| \[tiny_gqa\]\(nowhere\) \| fitted \| 1\.00 s \| \d\.\d{3} s \|( \d+\.\d\d \|){2} \d+\.\d % \|",
    "published.py --analytic": r"fitted: (median \d+\.\d %, worst \d+\.\d %; (as theirs )?){2}1 rows",
    "rates.py": r"\| 256 x 64 x 256 \| int8 \| \d+ us \| \d+ \|",
    "rates.py --only joined grouped operations": r"\| 256, 4, 64 x 64 \| padded \| \d+\.\d\d ms \| \d+ \|",
    "recipes.py": r"\| int8 row \|( \d+\.\d+ \|){4} \d+\.\d % \|",
    "recipes.py --topology v5p:2x2x1": r"\| int8 row \| \d+\.\d\d ms \| \d+\.\d\d \|",
    "schedules.py memory": r"one_f_one_b +\d+\.\d / \d+\.\d .*",
    "schedules.py time": r"one_f_one_b +\d+\.\d\d +\d+\.\d\d",
    "schedules.py flops": r"one_f_one_b +1\.0000 +1\.0000",
    "schedules.py compile": r"one_f_one_b +\d+\.\d +\d+\.\d\d",
    "soak.py": r'\{"kills": 2, "bitwise on one mesh": true, .*"damaged": \{"still": 0, "moving": 0\}\}',
    "timeline.py": r"  a step, \d+\.\d ms: products \d+\.\d, other compute \d+\.\d, .*waits \d+\.\d",
    "step.py": r"1,1,1 +1 +\d+\.\d%.* GiB",
    "step.py --floor --same-rows": r"1,1,1 +1 +\d+\.\d%.* GiB +\d+\.\d\d +1\.00 +1\.00",
    "tpu_kernels.py": r"\| this project's \| 256 \| 256 \| 9 \| \d\.\d\d \|",
    "tpu_compile.py": r"gpipe +\d+\.\d\d.*",
    "updates.py": r"\| float8, float8, bfloat16 \| \d+\.\d\d \|( \d\.\d{3} GiB \|){2} \d+\.\d\d, \d\.\d{3} GiB \|",
}
NEED_LIBTPU = (
    "one_pass.py",
    "options.py",
    "overlap.py",
    "predictions.py --tpu",
    "recipes.py --topology v5p:2x2x1",
    "timeline.py",
    "tpu_compile.py",
    "tpu_kernels.py",
    "updates.py",
)
NEED_CUDA = ("gpus.py", "published.py")
NEED_TRANSFORMERS = {"hf_table.py": ("torch", "transformers"), "tasks.py": ("torch", "transformers", "lm_eval")}
PROCESSES = (
    "curves.py",
    "curves.py --recipes",
    "first_step.py",
    "one_gpu.py --parts step kernels",
    "options.py --here",
    "recipes.py",
    "soak.py",
    "step.py",
    "step.py --floor --same-rows",
)
# The others compile seconds of programs: those are run always that share the least.
SECONDS = (
    "large.py",
    "bare.py",
    "closed_form.py",
    "compile_time.py",
    "context.py",
    "decoding.py --ours",
    "experts.py",
    "experts.py --products",
    "gspmd.py",
    "gspmd.py --here",
    "guard.py",
    "meshes.py",
    "orders.py",
    "plan.py",
    "rates.py --only joined grouped operations",
    "schedules.py memory",
    "schedules.py time",
    "schedules.py flops",
    "schedules.py compile",
)


def run_here(line, monkeypatch):
    """The status of a command line of a benchmark, or of its words, run in this process."""
    name, *arguments = line.split() if isinstance(line, str) else line
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr("parallax.hardware.devices.simulate_devices", lambda count: None)  # eight are here
    caches = jax.config.jax_enable_compilation_cache
    try:
        with pytest.raises(SystemExit) as end, mock.patch.dict(os.environ), mock.patch.object(sys, "path", [*sys.path]):
            sys.path.insert(0, str(FOLDER))
            runpy.run_path(str(FOLDER / name), run_name="__main__")
    finally:
        jax.config.update("jax_enable_compilation_cache", caches)
        for module in {"arguments", *(path.stem for path in FOLDER.glob("*.py"))} & {*sys.modules}:
            del sys.modules[module]
    return end.value.code


def run_apart(line, **env):
    """The same in a process of its own."""
    name, *arguments = line.split()
    command = [sys.executable, str(FOLDER / name), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False)


def only_line(capsys):
    """What was said on stderr, and nothing on stdout."""
    out, error = capsys.readouterr()
    assert not out and len(error.splitlines()) == 1, (out, error)
    return error


def has_figures(line, out):
    return any(re.fullmatch(RUNS[line], printed) for printed in out.splitlines())


def test_every_benchmark_is_run_here():
    assert {line.split()[0] for line in RUNS} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_help_is_there_without_jax(name, tmp_path):
    for module in ("jax", "flax"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('help needs no JAX')")
    done = run_apart(f"{name} --help", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    first = re.match(r'"""(.*)', (FOLDER / name).read_text())[1]
    assert first in done.stdout and f"python benchmarks/{name}" in done.stdout


def test_every_command_has_a_smallest_size(monkeypatch, capsys):
    for line in RUNS:
        assert run_here(f"{line} --help", monkeypatch) == 0
        assert "--smoke" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow) if line in SECONDS else line
        for line in RUNS
        if line not in (*NEED_LIBTPU, *NEED_CUDA, *PROCESSES, *NEED_TRANSFORMERS)
    ],
)
def test_a_benchmark_prints_its_figures(line, monkeypatch, capsys):
    status, (out, error) = run_here(f"{line} --smoke", monkeypatch), capsys.readouterr()
    assert status == 0 and has_figures(line, out), out + error


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_the_annotated_model_computes_with_weights_that_no_data_axis_shards(axis, monkeypatch):
    """Tables whose rows several axes shard once stayed sharded: 1381 ms, not 953. Experts stay sharded over ep."""
    monkeypatch.syspath_prepend(FOLDER)
    from gspmd_model import Annotated

    settings = settings_of(attention="gqa", layers=2, layers_of="moe*2" if axis == "ep" else "")
    model = Annotated(settings, mesh_of(**{"pp": 1, "dp": 4, "tp": 1} | {axis: 2}))
    at_rest = jax.tree.map(
        lambda shape, sharding: jax.device_put(jax.numpy.zeros(shape.shape), sharding), model.shapes, model.shardings
    )
    gathered = jax.jit(lambda params: model.gathered(params, model.plan.rows))(at_rest)
    for name, weight in named_leaves(gathered).items():
        data = {"dp", "cp"} if "experts" in name else {"dp", "cp", "ep"}
        stored = named_leaves(model.layouts)[name]
        kept = (tuple(axis for axis in axes if axis not in data) for axes in stored.axes)
        wanted = jax.sharding.NamedSharding(model.mesh, Layout(stored.names, tuple(kept)).spec(model.mesh))
        assert weight.sharding.is_equivalent_to(wanted, weight.ndim), name


def test_the_annotated_model_replaces_nothing_but_the_gradients(monkeypatch):
    """Its own layout of the residual stream once stood in place of the one that layers read to make the first state."""
    monkeypatch.syspath_prepend(FOLDER)
    from gspmd_model import Annotated

    replaced = {name for name in vars(Annotated) if not name.startswith("__") and hasattr(ShardedModel, name)}
    assert replaced == {"loss_grads_and_statistics"}


def test_layers_with_one_product_for_several_kernels_compute_the_same(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from joined import JoinedGQA, JoinedMLP

    settings = settings_of(attention="gqa", layers=1, microbatches=1, schedule="gpipe", virtual=1)
    joined = with_code(settings, {"model.attention": JoinedGQA, "model.mlp": JoinedMLP})
    models = [ShardedModel(each, mesh_of(1, 1, 2)) for each in (settings, joined)]
    params, batch = models[0].init(0), make_batch()
    (apart, of_apart), (together, of_joined) = (jax.jit(model.loss_and_grad)(params, batch) for model in models)
    assert float(together["loss"]) == pytest.approx(float(apart["loss"]), rel=1e-6)
    for joined_grad, grad in zip(*map(jax.tree.leaves, (of_joined, of_apart)), strict=True):
        assert abs(joined_grad - grad).max() <= 1e-5 * abs(grad).max()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", (*NEED_LIBTPU, *NEED_CUDA, *PROCESSES))
def test_a_benchmark_of_processes_or_of_absent_chips_prints_its_figures(line):
    if line in NEED_LIBTPU and find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler, libtpu")
    if line in NEED_CUDA and not any(map(find_spec, CUDA_PLUGINS)):
        pytest.skip("needs XLA's compiler for GPUs, the extra gpu-compiler")
    done = run_apart(f"{line} --smoke")
    assert done.returncode == 0 and has_figures(line, done.stdout), done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("line", NEED_TRANSFORMERS)
def test_tables_beside_transformers_have_figures(line):
    for name in NEED_TRANSFORMERS[line]:
        pytest.importorskip(name, reason=f"{name} is not installed (extra: hf-tests)")
    done = run_apart(f"{line} --smoke")
    assert done.returncode == 0 and has_figures(line, done.stdout), done.stdout + done.stderr[-3000:]


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "one_gpu.py")))


def test_benchmarks_know_what_the_parts_for_one_gpu_ask_of_them(one_gpu, tmp_path, monkeypatch):
    asked = SimpleNamespace(smoke=False, out=tmp_path)
    words = [command.words for part in one_gpu.PARTS for command in one_gpu.commands_of(part, tmp_path, asked)]
    lines = [(pathlib.Path(name).name, *rest) for name, *rest in words if name.startswith("benchmarks/")]
    assert {name for name, *_ in lines} == {"attention.py", "decoding.py", "gspmd.py", "options.py", "rates.py"}
    for name, *rest in lines:  # what is wrong before --help is said in its place
        assert run_here([name, *rest, "--help"], monkeypatch) == 0, (name, rest)


def test_traces_of_one_gpu_are_with_the_users_flags_for_xla(monkeypatch, request, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    one_gpu = request.getfixturevalue("one_gpu")
    asked = SimpleNamespace(smoke=False, out=tmp_path)
    training = one_gpu.commands_of("kernels", tmp_path, asked)[0]
    assert training.environment["XLA_FLAGS"] == "--xla_mine=1 --xla_gpu_enable_command_buffer="


def test_a_part_ends_at_its_limit_with_all_its_processes(one_gpu, tmp_path):
    sleeping = "import os, time; os.fork(); print('started', flush=True); time.sleep(600)"
    ends = os.pipe()
    with open(ends[1], "w") as printed:
        assert one_gpu.status_of(one_gpu.Command(["-c", sleeping]), printed, 3.0) is None
    with open(ends[0]) as pipe:  # it ends when nobody can write to it any more
        assert pipe.read() == "started\nstarted\n"


@pytest.mark.parametrize("signals", itertools.product((signal.SIGINT, signal.SIGTERM), repeat=2))
def test_a_second_signal_does_not_interrupt_the_end_of_a_part(one_gpu, tmp_path, monkeypatch, signals):
    ended, before = [], {number: signal.getsignal(number) for number in signals}

    def run_part(*_):
        try:
            signal.raise_signal(signals[0])
        finally:  # where a part's processes are ended
            signal.raise_signal(signals[1])
            ended.append("with its processes")

    monkeypatch.setitem(one_gpu.main.__globals__, "run_part", run_part)
    monkeypatch.setattr(sys, "argv", ["one_gpu.py", f"--out={tmp_path}"])
    try:
        with pytest.raises(SystemExit) as end:
            one_gpu.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == ["with its processes"] and end.value.code == 128 + signals[0]


def test_after_a_command_that_fails_a_part_ends_and_the_next_begins(one_gpu, tmp_path):
    failing = [one_gpu.Command(["-c", f"print({number}); raise SystemExit({number})"]) for number in (0, 3, 4)]
    ended = [one_gpu.run_part(part, failing[first:], tmp_path, 60) for part, first in (("all", 0), ("last", 2))]
    assert [part.how for part in ended] == ["failed with status 3", "failed with status 4"]
    printed = (tmp_path / "all.txt").read_text().splitlines()
    assert [line for line in printed if not line.startswith("$")] == ["0", "3"]
    assert len([*one_gpu.summary(ended)]) == 4


@pytest.mark.parametrize("arguments", [["--smoke", "memory"], ["memory", "--smoke"]])
def test_smoke_may_stand_before_the_name_of_a_command(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["schedules.py", *arguments])
    monkeypatch.syspath_prepend(FOLDER)
    parsed = runpy.run_path(str(FOLDER / "schedules.py"))["parse"]()
    assert parsed.smoke and (parsed.config, parsed.microbatches, parsed.rounds) == ("tiny_gqa", [2], 1)


def test_a_mesh_is_compared_with_the_first_one_of_its_own_round(monkeypatch):
    """The machine is half as fast in the second of three rounds, for both meshes, and busy once in the third."""
    monkeypatch.syspath_prepend(FOLDER)
    line = runpy.run_path(str(FOLDER / "step.py"))["line"]
    beside = dict(wall_secs=1.0, compile_secs=1.0, peak_bytes=2**30)
    rounds = [(2.0, 0.5, 1.0), (4.0, 0.25, 2.0), (2.0, 0.5, 1.0)], [(3.0, 0.4, 1.5), (6.0, 0.2, 3.0), (9.0, 0.4, 1.5)]
    names = "cpu_secs", "share", "products_secs"
    first, rows = ([dict(zip(names, secs)) | beside for secs in of_mesh] for of_mesh in rounds)
    printed = "2,2,2 8 40.0% 6.00 1.50 1.25 1.00 1.0 1.00 GiB"
    assert " ".join(line("2,2,2", 8, rows, first).split()) == f"{printed} 1.50 1.50 1.25"
    for row in rows:
        del row["products_secs"]
    assert " ".join(line("2,2,2", 8, rows, first).split()) == printed


def test_a_mesh_with_data_ranks_also_has_as_many_rows_a_device_as_one_without(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    works_of = runpy.run_path(str(FOLDER / "step.py"))["works_of"]
    args = SimpleNamespace(meshes=["1,1,8", "1,4,2"], microbatches=8, same_rows=True)
    assert [*works_of(args)] == [("1,1,8", 8), ("1,4,2", 8), ("1,4,2", 2)]


# ---- what is wrong


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_flag_is_one_line(name, monkeypatch, capsys):
    command = "memory" if name == "schedules.py" else ""
    assert run_here(f"{name} {command} --stepz=3", monkeypatch) == 2
    assert only_line(capsys) == "ConfigError: unrecognized arguments: --stepz=3\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("account.py --mesh 2,2", "argument --mesh: '2,2' is not a mesh; write PP,DP,TP such as 2,2,2"),
        ("bare.py --rounds 2", "--rounds=2 is too few to compare losses after three steps; use 3 or more"),
        ("checkpoints.py nowhere", "'nowhere' is not a folder; name one on the disk to measure"),
        ("checkpoints.py --every 99", "--every=99 is more than --steps=48: nothing would be saved"),
        ("compile_time.py --counts 4 x", "argument --counts: 'x' must be a whole number of 1 or more"),
        ("data.py --tokens 5", "--tokens=5 is less than two batches of 32 x 256; use 16384"),
        ("gspmd.py --topology v5e:4x", "--topology=v5e:4x is not a topology"),
        ("gspmd.py --set mesh.tp", "argument --set: 'mesh.tp' is not KEY=VALUE"),
        ("guard.py --rows 0", "argument --rows: '0' must be a whole number of 1 or more"),
        ("hf_table.py --smoke --write", "figures of --smoke must not go into docs/measured/hf.md; leave out --write"),
        ("one_gpu.py --seconds 0", "argument --seconds: '0' must be a number of seconds above 0"),
        ("options.py --here --topology v5e:4x4", "argument --topology: not allowed with argument --here"),
        ("options.py --here --steps 2", "--steps=2 must be a whole number of 3 or more"),
        ("options.py --here --set model.layerz=2", "unknown key model.layerz; did you mean 'layers'?"),
        ("overlap.py --kernels 0", "argument --kernels: '0' is no share; write a number above 0 and at most 1"),
        ("overlap.py --rows 0 99", "--rows 99: llama_1b_16 has rows 0, 1, 2, 4, "),
        ("overlap.py --topology v5e:4x", "--topology=v5e:4x is not a topology"),
        ("predictions.py --configs nothing", "no row is of these configs, meshes, schedules and remat"),
        ("schedules.py memroy", "argument command: invalid choice: 'memroy'"),
        ("schedules.py", "the following arguments are required: command"),
        ("soak.py often", "argument kills: 'often' must be a whole number of 1 or more"),
        ("step.py --config=tiny", "argument --config: invalid choice: 'tiny'"),
        ("timeline.py --rows 0 --names best worst", "--names: 2 names for 1 rows; write one for each"),
        ("timeline.py --kernels 70", "argument --kernels: '70' is no share; write a number above 0 and at most 1"),
        ("timeline.py --rows 0 99", "--rows 99: llama_1b_16 has rows 0, 1, 2, 4, "),
        ("tpu_compile.py --topology v5e:3x3x3", "--topology=v5e:3x3x3 has 3 sizes, but slices of TPU v5e have 2"),
    ],
)
def test_a_wrong_value_is_one_line(line, message, monkeypatch, capsys):
    assert run_here(line, monkeypatch) == 2
    error = only_line(capsys)
    assert error.startswith(f"ConfigError: {message}"), error


@pytest.mark.parametrize("line", NEED_LIBTPU)
def test_without_the_tpu_compiler_a_line_says_how_to_get_it(line, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert run_here(f"{line} --smoke", monkeypatch) == 2
    wanted = "the TPU compiler, libtpu, is not installed: pip install -e '.[tpu]' or 'WHEEL[tpu]'"
    assert only_line(capsys) == f"ConfigError: {wanted}\n"


def test_without_transformers_a_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_here("hf_table.py", monkeypatch) == 2
    assert re.fullmatch(
        r"ConfigError: torch cannot be imported .*; pip install -e '\.\[hf-tests\]'\n", only_line(capsys)
    )
