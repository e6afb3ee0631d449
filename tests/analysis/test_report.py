"""A report says what a step sends, stores and computes; its parts add up, and its command is as the others."""

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from support import tiny_model
from support.tiny_model import ROWS, SEQ, VOCAB

import parallax as px
from parallax.analysis.compiled.program import ModuleSecs
from parallax.analysis.planned.step_time import StepTime
from parallax.analysis.planned.topology import GET_LIBTPU
from parallax.analysis.report import report
from parallax.analysis.traced.flops import flops_breakdown, flops_by_direction
from parallax.analysis.traced.trace import abstract_mesh
from parallax.cli import report as report_command
from parallax.cli.command import read_command
from parallax.cli.report import main
from parallax.config.sections import AXES
from parallax.display.tables import TEXT_WIDTH
from parallax.errors import ConfigError
from parallax.schedules.pricing import Costs, figures
from parallax.step.optimizer import make_optimizer
from parallax.step.resolve import likely_entries, resolve, rounded_entries
from parallax.step.step import TrainStep, step_of

ROOT = pathlib.Path(__file__).parents[2]
HEAD = 6 * VOCAB * 32 * ROWS * SEQ  # FLOPs of its products, on all devices
QUICKSTART = "--config=configs/quickstart.py"


def on(mesh, **changes):
    """A tiny model on a mesh of no devices, whose chunks of tokens are never filled up."""
    changes = dict(attention="gqa", layers=4, chunk_tokens=64) | changes
    model = tiny_model.model_config(**changes)  # whose kernel no CPU may have
    return tiny_model.build((1, 1, 1), **changes | {"kernel": "xla"}).replace(
        model=model, mesh=abstract_mesh(dict(zip(AXES, mesh)))
    )


def flops_of(mesh, **changes):
    return flops_breakdown(on(mesh, **changes), ROWS, SEQ)


# ---- FLOPs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [((2, 2, 2), dict(schedule="one_f_one_b", remat="none")), ((4, 1, 2), dict(schedule="zero_bubble"))],
    ids=str,
)
def test_parts_add_up_to_the_flops_that_devices_execute(mesh, changes):
    model = on(mesh, **changes)
    flops = flops_breakdown(model, ROWS, SEQ)
    program = jax.make_jaxpr(model.loss_and_grad)(model.shapes, tiny_model.make_batch())
    ranks = [flops_by_direction(program, rank={"pp": rank, "dp": 0, "tp": 0}) for rank in range(mesh[0])]
    assert flops.executed == pytest.approx(sum(sum(rank.values()) for rank in ranks) / len(ranks), rel=1e-12)
    assert (flops.recomputed > 0) == (model.pipeline.remat != "none")
    assert all(part >= 0 for part in flops)


@pytest.mark.fast(1)
@pytest.mark.parametrize("kernel", ["xla", "cudnn"])
def test_on_one_device_without_recomputation_only_hidden_scores_are_beside_the_model(kernel):
    dtype = {"dtype": "bfloat16"} if kernel == "cudnn" else {}
    flops = flops_of((1, 1, 1), remat="none", kernel=kernel, **dtype)
    causal = 3 * 4 * SEQ * 8 * (8 + 8) * ROWS * SEQ  # as many as the model's own: half of all scores
    again = causal / 3  # all scores once more, one of six products; seq is one block
    assert flops == (flops.model, causal + again, flops.padding, 0, 0, 0)
    assert 0 <= flops.padding < 0.1 * flops.model  # at most positions are rotated by products


@pytest.mark.slow
def test_a_kernel_that_skips_hidden_blocks_is_counted_by_its_blocks():
    flops = flops_breakdown(on((1, 1, 1), remat="none", kernel="splash"), 4, 384)
    scores = 4 * 4 * 8 * 384 * 384 * 6 / 9  # of layers, rows and heads; six of nine blocks of 128
    products = 2 + (3 + 4)  # forward; backward in two kernels, both of which make the scores again
    rows = 4 * 4 * 8 * 384 * 8  # each output with its gradient
    causal = 3 * 4 * 384 * 8 * (8 + 8) * 4 * 384
    assert flops.masked == pytest.approx(2 * 8 * products * scores + 2 * rows - causal)
    assert flops.repeated == 0


@pytest.mark.slow
def test_the_kernel_for_triton_is_counted_by_its_blocks_and_its_wider_heads():
    flops = flops_breakdown(on((1, 1, 1), remat="none", kernel="triton"), 4, 384)
    pairs = 4 * 4 * 8 * 384 * 384  # of layers, rows and heads
    forward, backward = 2 * pairs * 6 / 9, 7 * pairs * 21 / 36  # products, in blocks of 128 and of 64
    causal = 3 * 4 * 384 * 8 * (8 + 8) * 4 * 384
    assert flops.masked == pytest.approx(2 * 16 * (forward + backward) - causal)  # 16 entries of a head for 8
    assert flops.repeated == 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_waiting_is_the_schedules_bubble(schedule):
    model = on((4, 1, 1), schedule=schedule, remat="none")
    flops = flops_breakdown(model, ROWS, SEQ)
    blocks = flops.executed - HEAD / 4
    kernels = 4 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 64) * ROWS * SEQ / 4
    bubble = figures(model.schedule, Costs(blocks / 3, 2 * blocks / 3, 2 * kernels)).lockstep_bubble
    assert flops.waiting / (flops.waiting + blocks) == pytest.approx(bubble)


@pytest.mark.slow
def test_stages_of_unequal_size_wait_for_the_largest():
    flops = flops_of((4, 1, 1), layers=5, remat="none")
    # Stages of 2, 1, 1, 1 layers, 4 microbatches: of 7 ticks the first one's 4 take 2 layers, the others 1.
    layers_in_time, layers_of_a_rank = 4 * 2 + 3, 4 * 5 / 4
    waiting = layers_in_time / layers_of_a_rank - 1
    assert flops.waiting == pytest.approx(waiting * (flops.executed - HEAD / 4))


@pytest.mark.slow
def test_vocab_that_is_no_token_is_padding():
    model = on((1, 1, 1), remat="none")
    all_tokens, some = (flops_breakdown(model, ROWS, SEQ, entries=entries) for entries in (None, VOCAB - 10))
    assert all_tokens.model - some.model == 6 * 10 * 32 * ROWS * SEQ == some.padding - all_tokens.padding


# ---- the report


@pytest.fixture(scope="module")
def quickstart():
    settings, _ = read_command(["report", f"--config={ROOT}/configs/quickstart.py"], {})
    found = report(
        step_of(resolve(settings), abstract_mesh({"pp": 2, "dp": 2, "tp": 2}, simulated=True)),
        name="quickstart",
        entries=rounded_entries(settings),
    )
    return dataclasses.replace(found, compiled_for="Nothing was compiled: --trace-only.")


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_report_is_plain_data_that_fits_the_width(quickstart):
    plain = json.loads(quickstart.to_json())
    assert all(len(line) <= TEXT_WIDTH for line in str(quickstart).splitlines())
    assert sum(one["bytes"] * one["count"] for one in plain["sent"]) == sum(one.total_bytes for one in quickstart.sent)
    assert plain["mesh"] == {"pp": 2, "dp": 2, "tp": 2} and plain["tokens"] == 16 * 256 and plain["compiled"] is None
    assert plain["flops"]["mfu_ceiling"] == quickstart.flops.mfu_ceiling < 1
    assert sum(plain["memory"].values()) == plain["peak"] and "<iframe" in quickstart._repr_html_()


def test_a_step_whose_cycles_are_known_says_where_its_time_goes(quickstart):
    time = StepTime(0.06, {"dp": 0.03, "tp": 0.0}, 0.01, 0.1, 0.05, 0.5)
    computed = (ModuleSecs("mlp", 0.05, 0.002), ModuleSecs("update", 0.0, 0.008), ModuleSecs("head", 1e-5, 0.0))
    timed = dataclasses.replace(quickstart, time=time, computed=computed)
    lines = str(timed).splitlines()
    assert [line.split() for line in lines[lines.index("time of a step               share") + 1 :]] == [
        ["compute", "0.060", "s", "60.0", "%"],
        ["attention", "kernel", "0.010", "s", "10.0", "%"],
        ["exposed", "over", "dp", "0.030", "s", "30.0", "%"],
        ["step", "0.100", "s", "100.0", "%"],
        ["MFU", "50.0", "%,", "kernels", "at", "70", "%", "of", "peak."],
        ["An", "average", "rank", "waits", "for", "others", "5.0", "%", "of", "the", "time."],
        [],
        ["compute", "of", "products", "the", "rest", "share", "of", "the", "step"],
        ["mlp", "0.050", "s", "0.002", "s", "52.0", "%"],
        ["update", "0.000", "s", "0.008", "s", "8.0", "%"],
    ]
    assert json.loads(timed.to_json())["time"]["exposed_secs"] == {"dp": 0.03, "tp": 0.0}


def test_every_byte_is_in_the_totals_and_at_a_place(quickstart):
    sections = str(quickstart).split("\n\n")
    calls = sum(one.count for one in quickstart.sent if one.bytes)
    assert f"{calls:,}" in next(line for line in sections[2].splitlines() if line.startswith("all "))
    places = [line.split() for line in sections[4].splitlines() if line.startswith("  ")]
    assert sum(int(cells[-3].replace(",", "")) for cells in places) == calls
    assert {cells[-5] for cells in places} >= {"attention/out", "mlp", "embedding", "model/loss"}


@pytest.mark.slow
def test_a_step_in_a_notebook_is_reported_as_it_runs():
    # With recompute, XLA computes scores once for it and for attention's backward pass, and with one layer for F, too.
    model = tiny_model.build((1, 2, 2), attention="gqa", layers=2, remat="none")
    tx = make_optimizer(tiny_model.optimizer_config(warmup_steps=0), 10, model.plan.rows)
    step = TrainStep(model, tx, seed=0)
    with pytest.raises(ConfigError, match=r"the shape of this step.s batch is not known.*write report\(step, batch\)"):
        px.report(step)
    found = px.report(TrainStep(model, tx, seed=0, batch_shape=(ROWS, SEQ)))
    assert (found.rows, found.seq) == (ROWS, SEQ) and found.compiled_for == "4 x cpu"
    (_, given, arguments), (_, *whole) = found.beside_compiler()
    assert abs(given - arguments) < 100 and whole == [found.peak, found.compiled.together]
    made = found.compiled.collectives
    assert {one.kind for one in made} >= {"all-gather", "reduce-scatter", "all-reduce"}
    ours = [one for one in made if "shard_map" in one.source and one.kind == "reduce-scatter"]
    traced = sum(one.total_bytes for one in found.sent if one.kind == "reduce-scatter")
    assert sum(one.bytes * one.count for one in ours) == traced
    assert found.compiled_flops == (found.flops.executed, 0)
    assert "Compiled collectives beside the traced ones, for 4 x cpu" in repr(found) and "(update)" in repr(found)
    assert json.loads(found.to_json())["compiled"]["temporaries"] == found.compiled.temporaries


# ---- the command


@pytest.mark.slow
def test_the_command_traces_what_this_machine_cannot_compile(in_root, capsys, tmp_path):
    page = tmp_path / "report.html"
    arguments = ["--config=configs/llama_1b_16.py", "--config.model.layers=2", f"--html={page}"]
    assert main(["report", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "llama_1b_16: pp=1 dp=16 tp=1 on 16 devices" in out
    assert "Nothing was compiled: the mesh has 16 devices, this machine 8. --config.mesh.simulate=16 compiles" in out
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_the_command_says_how_to_compile_for_chips_that_are_not_here(in_root, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    arguments = [QUICKSTART, "--config.model.layers=2", "--config.mesh.dp=-1", "--topology=v5e:4x4"]
    assert main(["report", *arguments]) == 0
    out = capsys.readouterr().out
    assert "pp=2 dp=4 tp=2 on 16 devices" in out
    assert " ".join(out.split()).endswith(f"Nothing was compiled: {GET_LIBTPU}")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler, libtpu")
def test_the_step_is_compiled_for_chips_that_are_not_here():
    command = [sys.executable, "-m", "parallax.report", QUICKSTART, "--config.model.layers=2", "--topology=v5e:2x4"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "for 8 x TPU v5 lite" in ended.stdout and "cycles" in ended.stdout
    assert re.search(r"^MFU \d+\.\d %; ", ended.stdout, re.M)
    assert all(len(line) <= TEXT_WIDTH for line in ended.stdout.splitlines())


def test_json_is_all_that_is_printed(in_root, capsys):
    assert main(["report", "--config=configs/tiny_gqa.py", "--trace-only", "--json", "--config.mesh.dp=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["devices"]) == ("tiny_gqa", 4)
    assert found["compiled_for"] == "Nothing was compiled: --trace-only."


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["dp=8", "--trace-only"], ["dp=-1", "--trace-only"], ["dp=16"], ["dp=8", "--topology=H100:8"]]
)
def test_a_step_with_cudnn_is_reported_where_no_gpu_is(flags, in_root, capsys, monkeypatch):
    monkeypatch.setattr("parallax.analysis.planned.topology.CUDA_PLUGINS", ())
    arguments = ["--config=configs/tiny_gqa.py", "--config.mesh.simulate=0", "--config.pipeline.microbatches=1", *CUDNN]
    assert main(["report", *arguments, f"--config.mesh.{flags[0]}", *flags[1:]]) == 0
    out = capsys.readouterr().out
    assert "Nothing was compiled: " in out and "attention/q" in out and "mesh.simulate" not in out


def test_the_program_with_names_is_printed_alone_or_written_beside_the_report(
    quickstart, in_root, capsys, monkeypatch, tmp_path
):
    def reported(step, *, name, entries, annotate):
        return dataclasses.replace(quickstart, program="// named\n" * annotate)

    monkeypatch.setattr(report_command, "report", reported)
    file = tmp_path / "step.hlo"
    assert main(["report", QUICKSTART, "--hlo"]) == 0 and capsys.readouterr().out == "// named\n"
    assert main(["report", QUICKSTART, f"--hlo={file}", "--json"]) == 0 and file.read_text() == "// named\n"
    assert "program" not in json.loads(capsys.readouterr().out)


CUDNN, SPLASH = ["--config.model.kernel=cudnn", "--config.model.dtype=bfloat16"], "--config.model.kernel=splash"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing; use one of configs/base.py"),
        ([QUICKSTART, "--traceonly"], "unknown flag --traceonly; did you mean '--trace-only'?"),
        ([QUICKSTART, "--html="], "--html='' is empty; leave it out, or write a value: write the report to this file"),
        ([QUICKSTART, "--topology="], "--topology='' is empty; leave it out, or write a value: compile for chips"),
        ([QUICKSTART, "--topology=v9:2x4"], "chip 'v9:2x4' is unknown"),
        ([QUICKSTART, "--topology=v5e:4x4"], "v5e:4x4 has 16 devices: mesh.pp=2 mesh.dp=2 mesh.tp=2 wants 8 devices"),
        ([QUICKSTART, "--topology=v5e:2x4", *CUDNN], "model.kernel='cudnn' needs GPUs, and these are TPUs (TPU v5e)"),
        ([QUICKSTART, "--topology=h100:8", SPLASH], "model.kernel='splash' needs TPUs, or CPUs to try it on, and "),
        ([QUICKSTART, *CUDNN], "model.kernel='cudnn' needs GPUs, and these are CPUs (cpu); use kernel in {'xla'}."),
        ([QUICKSTART, "--trace-only", *CUDNN], "model.kernel='cudnn' needs GPUs, and these are CPUs (cpu); use kernel"),
        (
            [
                QUICKSTART,
                "--topology=H100:8",
                "--config.mesh.tp=1",
                "--config.mesh.dp=4",
                "--config.data.seq=255",
                *CUDNN,
            ],
            "data.seq=255 is odd, which model.kernel='cudnn' does not take; use seq=256.",
        ),
        ([QUICKSTART, "--html=/nowhere/x.html", "--trace-only"], "--html=/nowhere/x.html cannot be written: No such"),
        (
            [QUICKSTART, "--trace-only", "--hlo"],
            "--hlo shows the compiled program. Nothing was compiled: --trace-only.",
        ),
        ([QUICKSTART, "--hlo", "--json"], "--hlo and --json both print; write one to a file: --hlo=step.hlo"),
        ([QUICKSTART, "--trace-only", "--config.mesh.tp=3"], "mesh.pp=2 mesh.dp=2 mesh.tp=3 wants 12 devices, but"),
        ([QUICKSTART, "--trace-only", "--config.data.seq=255"], "data.seq=255 does not divide over mesh.tp=2"),
        (
            ["--config=configs/llama_1b_16.py", "--trace-only", "--config.model.vocab=0"],
            "model.vocab=0 takes that of the tokenizer 'corpus/tokenizer.json', which cannot be read",
        ),
    ],
    ids=lambda value: value[-1] if value and isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_with_status_2(arguments, message, in_root, capsys):
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out and len(captured.err.splitlines()) == 1 and message in captured.err


@pytest.mark.slow
def test_a_run_is_reported_from_its_folder(in_root, tmp_path):
    settings, _ = read_command(["report", QUICKSTART, "--config.model.layers=2"], {})
    (tmp_path / "config.json").write_text(json.dumps(settings.to_dict()))
    arguments = [f"--config={tmp_path / 'config.json'}", "--trace-only", "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "parallax.report", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and ended.stderr == ""
    assert math.prod(json.loads(ended.stdout)["mesh"].values()) == 8


def test_a_vocab_that_waits_for_a_tokenizer_is_the_one_that_it_will_have(in_root):
    quick, _ = read_command(["report", QUICKSTART], {})
    assert likely_entries(quick.data) == 1024
    assert likely_entries(dataclasses.replace(quick.data, tokenizer="bytes")) == 257


# ---- the docs


def block(command):
    """What docs/measured/report.md says that a command prints, by words: columns and line numbers may move."""
    text = (ROOT / "docs" / "measured" / "report.md").read_text()
    lines = text[text.index(f"    $ {command}\n") :].splitlines()[1:]
    end = next(at for at, line in enumerate(lines) if line and not line.startswith("    "))
    return words("\n".join(lines[:end]))


def words(text):
    return [re.sub(r"\.py:\d+$", ".py", word) for word in text.split()]


def test_the_docs_show_what_the_command_prints(quickstart):
    shown = block("python -m parallax.report --config=configs/quickstart.py --trace-only")
    assert words(str(quickstart)) == shown


@pytest.mark.slow
@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the docs show what this version's compiler makes")
def test_the_docs_show_what_the_compiler_makes():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "parallax.report", QUICKSTART]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    shown = ended.stdout[ended.stdout.index("Memory of a device") :]
    assert ["...", *words(shown)] == block("python -m parallax.report --config=configs/quickstart.py")
