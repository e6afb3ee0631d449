"""Traces of steps: when they are written, and that what a report says of them adds up."""

import json
import os
import re
from types import SimpleNamespace

import jax
import pytest
from jax.profiler import ProfileData
from support.process_examples import flags_of, launched
from support.run_examples import stop_at, tiny_config
from support.stand_ins import ClientStandIn
from support.tiny_model import mesh_of

from parallax.analysis.compiled.profile import About, Operation, Trace, profile_steps, read_traces
from parallax.analysis.report import report
from parallax.analysis.traced.trace import abstract_mesh
from parallax.cli.report import main
from parallax.config.settings import load_settings, read_settings
from parallax.errors import ConfigError, DataError
from parallax.step.resolve import resolve, rounded_entries
from parallax.step.step import step_of
from parallax.storage.run_files import PROGRAM, TRACED, RunFiles
from parallax.training.profile import Profile
from parallax.training.run import train


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("20-25", "train.profile_steps='20-25' is not a range of steps; write FIRST:LAST, counted from 1, as 20:25"),
        ("0:3", "train.profile_steps='0:3' is not a range of steps"),
        ("3", "train.profile_steps='3' is not a range of steps"),
        ("5:3", "train.profile_steps='5:3' is not a range of steps; write FIRST:LAST"),
        ("7:9", "train.profile_steps='7:9' ends at step 9, but train.steps=8; use steps of the run"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(corpus, written, words):
    with pytest.raises(ConfigError) as error:
        read_settings(tiny_config(corpus, **{"train.profile_steps": written}))
    assert words in str(error.value)


@pytest.fixture
def traces_nothing(monkeypatch):
    """JAX's profiler is not asked, and nothing is compiled for the names in its trace."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, profiler_options: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


class Program:
    """In place of a step: only the text of its program is asked for."""

    model = SimpleNamespace(mesh=mesh_of(1, 1, 1))

    def lower(self, *_):
        return self

    def compile(self):
        return self

    def as_text(self):
        return "HloModule step"


@pytest.mark.parametrize(("written", "steps"), [("", []), ("3:5", [3, 4, 5]), ("8:8", [8])])
def test_a_trace_begins_and_ends_with_its_steps_wherever_the_run_goes_on(
    corpus, written, steps, tmp_path, traces_nothing
):
    settings = read_settings(tiny_config(corpus, **{"train.profile_steps": written}))
    for start in range(8):
        profile, traced = Profile(settings, {settings.data.shapes[0]: Program()}, RunFiles(tmp_path)), []
        traces_nothing.clear()
        if profile.begins_after(start):
            profile.begin(start, ())
        for done in range(start + 1, 9):
            traced += [done] * (traces_nothing[-1:] == ["start"])
            if profile.ends_after(done):
                profile.end(())
            if profile.begins_after(done):
                profile.begin(done, ())
        assert traced == [step for step in steps if step > start]
        assert traces_nothing == (["start", "stop"] if traced else [])


def test_processes_wait_for_a_trace_to_begin_as_long_as_for_a_compilation(corpus, in_job, tmp_path, traces_nothing):
    settings, client = read_settings(tiny_config(corpus, **{"train.profile_steps": "3:5"})), in_job(ClientStandIn())
    profile = Profile(settings, {settings.data.shapes[0]: Program()}, RunFiles(tmp_path))
    profile.begin(2, ())
    profile.end()
    assert [setting for _, setting in client.calls] == ["compile_secs"]


def test_the_program_of_a_trace_is_that_of_its_phase(corpus, tmp_path, traces_nothing):
    data = {"source": "stdlib", "path": "", "mixture": f"text=(path='{corpus}/*.txt')"}
    data["phases"] = "long=(from_step=3, seq=64)"
    changes = {f"data.{name}": value for name, value in data.items()}
    settings = read_settings(tiny_config(corpus, **{"train.profile_steps": "3:5"} | changes))
    first, later = settings.data.shapes
    steps = {first: None, later: Program()}
    Profile(settings, steps, RunFiles(tmp_path)).begin(2, ())
    assert (tmp_path / "profile" / "steps-3-5" / "process-0" / PROGRAM).read_text() == "HloModule step"


@pytest.fixture(scope="module")
def found(observed_run):
    return profile_steps(read_traces(observed_run))


def test_a_run_writes_a_trace_of_its_steps_with_the_program_that_ran(observed_run):
    at = observed_run / "profile" / "steps-3-5" / "process-0"
    assert {TRACED, PROGRAM, "plugins"} == {path.name for path in at.iterdir()}
    assert json.loads((at / TRACED).read_text())["mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    log = (observed_run / "log.txt").read_text()
    assert "python -m parallax.report --trace=" in log
    assert log.index("step 5/8") > log.index("a trace is in") > log.index("step 4/8")


def test_compute_collectives_and_idle_add_up_to_the_wall_time_on_each_device(found):
    assert found.steps == (3, 4, 5) and len(found.devices) == 8 and found.secs > 0
    for one in found.devices:
        assert sum(one[2:]) == pytest.approx(found.secs, rel=1e-9) and min(one[2:]) >= 0
    parts = sum(part.secs for part in (*found.modules, *found.collectives)) + found.idle
    assert parts == pytest.approx(found.secs, rel=1e-9)
    assert [one.place for one in found.devices][:3] == ["pp=0 dp=0 tp=0", "pp=0 dp=0 tp=1", "pp=0 dp=1 tp=0"]


def test_parts_of_the_model_and_the_axes_of_collectives_are_known(found):
    modules = {part.name: part for part in found.modules}
    assert {"attention", "mlp", "embedding", "update"} <= set(modules)
    assert 0 < modules["mlp"].products <= modules["mlp"].secs and modules["update"].products == 0
    sent = {part.name for part in found.collectives}
    assert {"permute over pp", "all-gather over dp", "reduce-scatter over dp"} <= sent
    # Stages, and so steps and layers, are run as often as the config says: 2 microbatches go forth and back.
    calls = {part.name: part.calls / len(found.steps) for part in found.collectives}
    assert calls["permute over pp"] == int(calls["permute over pp"]) >= 2


def test_the_report_is_text_of_80_columns_or_json(observed_run, capsys):
    assert main(["report", f"--trace={observed_run}"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "steps 3 to 5 on 8 devices (cpu), pp=2 dp=2 tp=2" in text and "100.0 %" in text
    file = next(observed_run.rglob("*.xplane.pb"))
    assert main(["report", "--trace", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--trace=nowhere"], 5, "--trace=nowhere holds no trace: there is no *.xplane.pb below it"),
        (["--trace=nowhere", "--html=x"], 2, "unrecognized arguments: --html=x"),
    ],
)
def test_a_trace_that_is_not_there_is_named(capsys, arguments, status, words):
    assert main(["report", *arguments]) == status
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_named(tmp_path):
    file = tmp_path / "some.xplane.pb"
    file.write_bytes(b"no trace at all")
    with pytest.raises(DataError, match="some.xplane.pb is not a trace"):
        read_traces(file)


def ran(start, end, module, collective=False):
    return Operation(start, end, About(module, collective, product=False))


def test_each_moment_is_counted_once():
    """Ten seconds: 0-2 mlp, 2-4 mlp and attention at once, 3-6 a gather of which 3-4 is hidden, 8-12 cut at 10."""
    device = [ran(0, 4, "mlp"), ran(2, 4, "attention"), ran(3, 6, "all-gather", True), ran(8, 12, "update")]
    trace = Trace("hand", {0: device, 1: []}, 10.0, (1,), {}, (0, 1), "")
    found = profile_steps(trace)
    by_name = {part.name: (part.secs, part.hidden) for part in (*found.modules, *found.collectives)}
    # Of an average device: the other one is idle.
    assert by_name == {"mlp": (1.5, 0), "attention": (0.5, 0), "update": (1, 0), "all-gather": (1, 0.5)}
    assert found.idle == 6 and [sum(one[2:]) for one in found.devices] == [10, 10]
    assert found.devices[0][2:] == (6.0, 2.0, 2.0)


# A GPU writes a plane with a line for each stream; kernels know their operation, those of a program that is not ours
# their own names alone.
GPU = """
planes { name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_3" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllGather_RING_LL" } }
  event_metadata { key: 3 value { id: 3 name: "loop_add_fusion_7" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 9 value { id: 9 name: "add.2" } }
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000
      stats { metadata_id: 1 str_value: "dot.1" } stats { metadata_id: 2 str_value: "jit_train_step" } }
    events { metadata_id: 3 offset_ps: 6000000 duration_ps: 1000000
      stats { metadata_id: 1 ref_value: 9 } stats { metadata_id: 2 str_value: "jit_train_step" } } }
  lines { name: "Stream #14(Compute)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 3000000
      stats { metadata_id: 1 str_value: "ag.3" } stats { metadata_id: 2 str_value: "jit_train_step" } } }
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 3 offset_ps: 0 duration_ps: 9000000 } }
}
planes { name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "parallax traced steps" } }
  event_metadata { key: 2 value { id: 2 name: "train" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
  lines { name: "python" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 10000000 }
    events { metadata_id: 2 offset_ps: 0 duration_ps: 100 stats { metadata_id: 1 int64_value: 7 } } }
}
"""
TEXT = """HloModule jit_train_step, is_scheduled=true

%region_0 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="psum_invariant"}
  %b = f32[] parameter(1), metadata={op_name="psum_invariant"}
  ROOT %add.0 = f32[] add(%a, %b), metadata={op_name="add"}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %dot.1 = f32[4]{0} dot(%p, %p), metadata={op_name="jit(train_step)/shard_map/F/Block/mlp/up/dot_general"}
  %ag.3 = f32[8]{0} all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}, metadata={op_name="jit(train_step)/a"}
  ROOT %add.2 = f32[4]{0} add(%p, %p), metadata={op_name="jit(train_step)/update/add"}
}
"""


def write_gpu(folder, *, about, process=0):
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(GPU))
    if about:
        (folder / PROGRAM).write_text(TEXT)
        about = {"run": "mine", "mesh": {"pp": 1, "dp": 1, "tp": 2}, "devices": [0, 1], "kind": "H100"}
        about["local"] = [process]
        (folder / TRACED).write_text(json.dumps(about))
    return folder


def test_streams_of_a_gpu_are_read_by_their_operations(tmp_path):
    found = profile_steps(
        read_traces(write_gpu(tmp_path / "run" / "profile" / "steps-7-7" / "process-0", about=True).parents[2])
    )
    secs = {part.name: (round(part.secs * 1e6, 6), round(part.hidden * 1e6, 6)) for part in found.modules}
    sent = {part.name: (round(part.secs * 1e6, 6), round(part.hidden * 1e6, 6)) for part in found.collectives}
    assert secs == {"mlp": (4, 0), "update": (1, 0)} and sent == {"all-gather over tp": (2, 1)}
    assert found.modules[0].products == found.modules[0].secs and found.steps == (7,) and found.kind == "H100"
    assert found.idle * 1e6 == pytest.approx(3) and found.secs * 1e6 == pytest.approx(10)


def test_kernels_of_a_gpu_are_added_up_by_name(tmp_path):
    trace = read_traces(write_gpu(tmp_path / "alone", about=False))
    ((number, ran),) = trace.devices.items()
    again = [op._replace(start=op.start + trace.secs, end=op.end + trace.secs) for op in ran]
    found = profile_steps(trace._replace(devices={number: ran + again}))
    assert [(kernel.name, round(kernel.secs * 1e6, 6), kernel.calls) for kernel in found.kernels] == [
        ("gemm_fusion_dot", 8, 2),
        ("ncclDevKernel_AllGather_RING_LL", 6, 2),
        ("loop_add_fusion", 2, 2),
    ]
    assert re.search(r"gemm_fusion_dot +2 +0\.01 ms", str(found))


def test_a_trace_without_its_program_is_read_by_names(tmp_path):
    found = profile_steps(read_traces(write_gpu(tmp_path / "alone", about=False)))
    assert {part.name for part in (*found.modules, *found.collectives)} == {"dot", "add", "ag"}


def test_the_processes_of_a_job_are_put_together_and_the_newest_steps_are_taken(tmp_path):
    profile = tmp_path / "profile"
    write_gpu(profile / "steps-3-4" / "process-0", about=True)
    os.utime(profile / "steps-3-4", (1, 1))
    write_gpu(profile / "steps-7-7" / "process-0", about=True)
    other = write_gpu(profile / "steps-7-7" / "process-1", about=True, process=1)  # counts its device as 0, too
    moved = GPU.replace("timestamp_ns: 1000", "timestamp_ns: 900000")
    (other / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(moved))
    found = profile_steps(read_traces(tmp_path))
    assert [(one.device, one.place) for one in found.devices] == [(0, "pp=0 dp=0 tp=0"), (1, "pp=0 dp=0 tp=1")]
    # Their clocks differ; each is measured against its own.
    assert found.devices[0][2:] == pytest.approx(found.devices[1][2:])


@pytest.mark.slow
def test_a_run_that_stops_keeps_what_is_traced_and_goes_on_with_the_rest(corpus, tmp_path, monkeypatch):
    changes = {"train.profile_steps": "2:7", "checkpoint.every_steps": 0, "train.eval_every_steps": 0}
    stop_at(monkeypatch, 3)
    done = train(tiny_config(corpus, **changes), tmp_path).step
    monkeypatch.undo()
    assert read_traces(tmp_path).steps == tuple(range(2, done + 1))
    train(tiny_config(corpus, **changes), tmp_path)
    assert read_traces(tmp_path).steps == tuple(range(done + 1, 8))
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"steps-2-7", f"steps-{done + 1}-7"}


@pytest.mark.slow
def test_each_process_of_a_job_traces_its_own_devices(corpus, tmp_path):
    changes = {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2, "train.profile_steps": "3:4"}
    with launched("train.py", *flags_of(corpus, **changes), f"--workdir={tmp_path}") as job:
        status, text = job.end()
    assert status == 0, text
    found = profile_steps(read_traces(tmp_path))
    places = [f"pp={pp} dp={dp} tp={tp}" for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)]
    assert sorted(one.place for one in found.devices) == places
    assert all(one.compute > 0 and sum(one[2:]) == pytest.approx(found.secs, rel=1e-9) for one in found.devices)


def test_a_report_of_a_run_from_weights_counts_their_vocab(observed_run):
    settings, one = load_settings(observed_run), dict(pp=1, dp=1, tp=1)
    given, flops = dict(mesh=one, pipeline=dict(microbatches=2)), []
    for changes in (
        {},
        {"model": {"vocab": 0}, "train": {"init_from": str(observed_run)}, "data": {"tokenizer": "auto"}},
    ):
        changed = read_settings(settings, **given | changes)
        step = step_of(resolve(changed), abstract_mesh(one))
        flops.append(report(step, entries=rounded_entries(changed)).flops)
    assert flops[0] == flops[1]


def in_a_graph(names):
    """The profiler's file of kernels, one after the other, which a GPU ran in a CUDA graph."""
    metadata = [
        f'event_metadata {{ key: {number} value {{ id: {number} name: "{n}" }} }}' for number, n in names.items()
    ]
    stats = (
        'stats { metadata_id: 1 str_value: "command_buffer_26" } stats { metadata_id: 2 str_value: "jit_train_step" }'
    )
    known = [
        f'stat_metadata {{ key: {key} value {{ id: {key} name: "hlo_{n}" }} }}' for key, n in ((1, "op"), (2, "module"))
    ]
    events = [f"events {{ metadata_id: {n} offset_ps: {1000 * n} duration_ps: 1000 {stats} }}" for n in names]
    line = f'lines {{ name: "Stream #14(Compute)" timestamp_ns: 1000 {" ".join(events)} }}'
    text = f'planes {{ name: "/device:GPU:0" {" ".join([*metadata, *known, line])} }}'
    return ProfileData.text_proto_to_serialized_xspace(text)


def test_kernels_in_cuda_graphs_are_told_together_with_the_flag_that_names_them(tmp_path):
    (tmp_path / "host.xplane.pb").write_bytes(in_a_graph({1: "nvjet_sm90_tst_256x128", 2: "loop_add_fusion_12"}))
    found = profile_steps(read_traces(tmp_path))
    assert [part.name for part in found.modules] == ["kernels in CUDA graphs"] and found.modules[0].calls == 2
    assert "trace with XLA_FLAGS=--xla_gpu_enable_command_buffer=" in " ".join(str(found).split())
