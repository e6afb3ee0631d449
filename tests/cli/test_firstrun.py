"""The first run on new chips: it holds the plan to what is measured, and writes down whatever happens."""

import dataclasses
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from support.hlo_examples import CHAIN, with_cycles
from support.stand_ins import Chip
from support.tiny_model import build

from parallax.analysis import measured
from parallax.analysis.measured import (
    MEMORY,
    MFU,
    STEP_TIME,
    WARM_UP,
    MeasuredSteps,
    compared,
    make_plan,
    measure,
    planned_memory,
    read_program,
    warnings,
)
from parallax.analysis.planned.topology import read_topology
from parallax.cli import firstrun
from parallax.cli.command import read_command
from parallax.cli.firstrun import CANDIDATES, choose, flags_for, nameless, notes_in
from parallax.step.resolve import Devices, resolve

ROOT = Path(__file__).parents[2]
TINY = [
    f"--config={ROOT / 'configs' / 'tiny_gqa.py'}",
    "--config.mesh.simulate=8",
    "--config.data.seq=16",
    "--config.data.global_batch=8",
    "--config.model.d_model=32",
    "--config.model.d_ff=32",
]
PHASES = ["plan", "trace", "compile", "first state", "steps"]


pytestmark = pytest.mark.usefixtures("known_speed")


def run_of(tmp_path, *words, steps=5):
    """Exit status and file of a first run in this process."""
    out = tmp_path / "first-run.md"
    status = firstrun.main(["firstrun", *TINY, f"--steps={steps}", f"--out={out}", *words])
    return status, out.read_text()


def rows(run):
    """The cells of the table of figures, by the first of each line."""
    return {first: rest for first, *rest in (re.split(r" {2,}", line) for line in [*compared(run)][2:])}


def test_a_first_run_compares_the_plan_with_what_is_measured(tmp_path, capsys, monkeypatch):
    tables = []
    monkeypatch.setattr(firstrun, "compared", lambda run: tables.append(rows(run)) or compared(run))
    status, text = run_of(tmp_path)
    said = capsys.readouterr().err
    assert status == 0 and re.match(r"# First run, [\d-]+\n\n```\n", text) and text.endswith("\n```\n")
    assert re.findall(r"(?m)^(.+): done in [\d.]+ s$", text) == PHASES
    assert all(f"{phase} …\n" in said for phase in PHASES) and "attach it to an issue" in said

    (figures,) = tables
    planned, compiled, taken, share, of_compiled = figures["memory of a device"]
    assert taken == of_compiled == "-"
    assert re.fullmatch(r"[\d.]+ [KM]iB", planned) and re.fullmatch(r"[\d.]+ [KM]iB", compiled)
    assert 50 < float(share.split()[0]) < 150
    planned, _, taken, share, _ = figures["time of a step"]
    assert planned.endswith(" s") and taken.endswith(" s") and share.endswith("%")
    assert figures["MFU"][2].endswith("%")
    assert all(f"{name}  " in text for name in figures) and "work of the model" in text

    losses = [float(loss) for loss in re.findall(r"step \d/5 .* loss ([\d.]+)", text)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert abs(losses[0] / math.log(384) - 1) < 0.1
    settings, _ = json.JSONDecoder().raw_decode(text[text.index("\n{") + 1 :])
    assert settings["mesh"]["dp"] == 8 and settings["train"]["steps"] == 5


@pytest.fixture
def host_is(monkeypatch):
    """A function that gives this host a name."""
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


def test_the_file_has_versions_flags_and_devices_and_no_names(monkeypatch, host_is, tmp_path):
    host_is("node17")
    monkeypatch.setenv("XLA_FLAGS_OF_A_TEST", f"--xla_dump_to={Path.home()}/dump/node17")
    monkeypatch.setenv("NCCL_SOCKET_OF_A_TEST", "10.1.2.3:400")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node3.cluster:8476")
    out = tmp_path / "first-run.md"
    notes_in(str(out))("\n".join([*firstrun.machine(), *firstrun.software(), f"path: {Path.home()}/corpus"]))
    text = out.read_text()
    assert f"jax:    {jax.__version__}\n" in text and "python: {}.{}.{} ".format(*sys.version_info[:3]) in text
    assert (
        "cpu-8, 8 local devices" in text
        and "\ndevices: CpuDevice(id=0) to CpuDevice(id=7)\n" in text
        and "\nflax: " in text
    )
    assert "XLA_FLAGS_OF_A_TEST=--xla_dump_to=~/dump/<host>" in text
    assert "NCCL_SOCKET_OF_A_TEST: <address>" in text and "node=<host>" in text and "path: ~/corpus" in text
    assert not [name for name in (str(Path.home()), "node17", "node3", str(ROOT)) if name in text]


@pytest.mark.parametrize("text", ["libtpu 0.0.42.1", "jax 0.12.0.1", "cudnn 9.8.0.87", "dp=8 tp=1", "v5p:4x4x4"])
def test_versions_are_no_addresses(text):
    assert nameless(text) == text


def test_names_are_taken_out_of_whatever_an_error_says(monkeypatch, host_is):
    host_is("node17.cluster.example")
    monkeypatch.setenv("LOGNAME", "ada")
    said = "at /scratch/ada/run on node17.cluster.example (node17), ada@192.168.0.7, 172.16.3.4:8476; adamw"
    assert nameless(said) == "at /scratch/<user>/run on <host> (<host>), <user>@<address>, <address>; adamw"


# ---- what fails


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("phase", "where"),
    [("trace", "step_of"), ("plan", "planned_memory"), ("first state", "counting_batch"), ("steps", "take_steps")],
)
def test_a_phase_that_fails_is_in_the_file_with_what_was_found_before_it(tmp_path, monkeypatch, capsys, phase, where):
    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: out of memory, {Path.home()}/x\nmore of it")

    monkeypatch.setattr(measured, "plan", lambda settings, topology: SimpleNamespace(secs=1.0, mfu=0.55))
    monkeypatch.setattr(measured, where, fails)
    status, text = run_of(tmp_path)
    done = re.findall(r"(?m)^(.+): done in ", text)
    at = PHASES.index(phase)
    rest = PHASES[at + 1 :] if phase == "plan" else []  # what was not planned can still be measured
    assert status == 1 and done == PHASES[:at] + rest and f"\n{phase} failed after " in text
    assert "JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory, ~/x\nmore of it\n" in text
    assert "GiB" in text and '"d_model": 32' in text and "\nMFU  " in text
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"PhaseError: {phase} failed: JaxRuntimeError: RESOURCE_")
    )


def test_what_ends_the_process_leaves_a_file_that_says_where(monkeypatch, tmp_path):
    out = tmp_path / "first-run.md"

    class Killed(BaseException):
        pass

    def killed(*_):
        assert out.read_text().endswith("trace …\n```\n")
        raise Killed

    monkeypatch.setattr(measured, "make_plan", lambda found: None)
    monkeypatch.setattr(measured, "step_of", killed)
    with pytest.raises(Killed):
        measure(found_of(note=notes_in(str(out))))


def test_a_machine_without_devices_is_written_down_too(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise RuntimeError("Unable to initialize backend 'tpu': the chips are in use\nby another process")

    monkeypatch.setattr(jax, "devices", none)
    status, text = run_of(tmp_path)
    assert status == 1 and "\nJAX has no devices: Unable" in text
    assert "the chips are in use\nby another process" in text and "\njax: " in text
    assert "JAX has no devices: Unable to initialize backend 'tpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps=2"], "--steps=2 must be a whole number of 3 or more"),
        (["--out="], "--out='' is empty; leave it out, or write a value: the file to write"),
        (["--out=gs://bucket/first-run.md"], "--out='gs://bucket/first-run.md' is a URL"),
        (["--config.mesh.tp=3"], "mesh"),
    ],
)
def test_what_is_wrong_with_the_command_line_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert firstrun.main(["firstrun", *TINY, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ConfigError: ") and message in line and not list(tmp_path.iterdir())


# ---- what is taken where the user names nothing


def test_on_cpus_the_smallest_config_is_taken_with_the_users_changes():
    words = choose(["--config.data.seq=16"])
    assert words == [f"--config={ROOT / 'configs' / 'tiny_gqa.py'}", "--config.data.global_batch=32"]


@pytest.mark.parametrize(
    ("platform", "room_gib", "taken"),
    [("gpu", 80, "gpu_80gb_x8"), ("gpu", 24, "gpu_24gb_x8"), ("tpu", 95, "llama2_7b_64"), ("tpu", 4, "tiny_gqa")],
)
def test_the_largest_config_that_fits_is_taken(platform, room_gib, taken, monkeypatch, with_chips, capsys):
    """On eight chips, by what the plan says each needs; the plan itself is tested elsewhere."""
    needs_gib, asked = {"gpu": [140, 41, 17, 10, 8], "tpu": [50, 14, 7, 5]}[platform], []

    def planned(settings):
        asked.append(settings)
        return needs_gib[len(asked) - 1] * 2**30

    monkeypatch.setattr(firstrun, "planned_memory", planned)
    with_chips(*[Chip(platform, "a kind", memory={"bytes_limit": room_gib * 2**30})] * 8)
    assert choose([])[0].endswith(f"configs/{taken}.py")
    assert len(capsys.readouterr().err.splitlines()) == len(asked) - (taken != "tiny_gqa")


@pytest.mark.parametrize("candidate", [one for some in CANDIDATES.values() for one in some], ids=str)
def test_every_config_that_may_be_taken_is_right(candidate):
    settings, _ = read_command(["firstrun", *flags_for(candidate)], {})
    assert settings.mesh.sizes["dp"] == -1 and settings.model.kernel in ("cudnn", "splash")


# ---- what is warned of


def taken(secs, loss, grad_norm=1.0, skipped=0.0):
    return {"secs": secs, "loss": loss, "grad_norm": grad_norm, "skipped": skipped}


def found_of(figures=(), **changes):
    """A first run that went well, and what is changed of it."""
    found = MeasuredSteps(resolve(read_command(["firstrun", *TINY], {})[0]))
    found.topology = read_topology("v5e:2x4")
    found.figures |= {(MEMORY, "planned"): 1000, (MEMORY, "compiled"): 1000, (MEMORY, "measured"): 1050}
    found.figures |= {(STEP_TIME, "planned"): 1.0, (STEP_TIME, "measured"): 1.1, **dict(figures)}
    found.steps = [taken(9.0, 5.9), taken(1.0, 5.5), taken(1.1, 5.0), taken(1.1, 5.0), taken(1.1, 5.0)]
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def step(**changes):
    good = found_of().steps
    return [*good[:-1], good[-1] | changes]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, None),
        ({"figures": {(MEMORY, "measured"): 1200}}, "the memory of a device is 120.0 % of what was planned"),
        (
            {"figures": {(MEMORY, "measured"): math.nan, (MEMORY, "compiled"): 1200}},
            "the memory of a device is 120.0 % of what was planned",
        ),
        ({"figures": {(STEP_TIME, "planned"): 0.8}}, "the time of a step is 137.5 % of what was planned"),
        ({"figures": {(STEP_TIME, "planned"): math.nan, (MEMORY, "planned"): math.nan}}, None),
        ({"steps": step(secs=2.0)}, "the slowest step takes 1.8 times the median"),
        ({"steps": step(loss=math.nan)}, "loss or gradient is not finite in step 5"),
        ({"steps": step(loss=5.9)}, "the loss does not fall: 5.9000 in the first step, 5.9000 in the last"),
        ({"steps": step(skipped=1.0)}, "the guard skipped 1 of 5 steps"),
        ({"steps": [taken(1.0, 9.0), *step()[1:]]}, "near ln(vocab) = 5.951"),
        ({"steps": []}, None),
    ],
)
def test_what_somebody_should_look_at_is_a_warning(changes, warning):
    said = list(warnings(found_of(**changes)))
    assert said == [] if warning is None else any(warning in line for line in said)


def test_times_leave_the_warm_up_out(monkeypatch):
    found, clock = found_of({(MFU, "planned"): 0.55}, steps=[]), iter([0, 9, 10, 11, 20, 21.1, 30, 31.1, 40, 42])
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=clock.__next__))
    found.settings = dataclasses.replace(found.settings, train=dataclasses.replace(found.settings.train, steps=5))
    metrics = {"loss": 5.0, "grad_norm": 1.0, "skipped": False}
    measured.take_steps(found, lambda state, batch: (state, metrics), None, {})
    assert WARM_UP == 2 and rows(found)["time of a step"][:3] == ["1 s", "-", "1.1 s"]
    assert rows(found)["MFU"] == ["55.0 %", "-", "50.0 %", "90.9 %", "-"]


def test_a_chip_that_nobody_knows_is_measured_without_a_planned_time(with_chips):
    notes = []
    found = MeasuredSteps(resolve(found_of().settings, Devices.here()), notes.append)
    with_chips(*[Chip("gpu", "NVIDIA X1")] * 8)
    make_plan(found)
    (note,) = notes
    assert note.startswith("warning: no time was planned: chip 'NVIDIA X1' is unknown")
    assert found.figures[MEMORY, "planned"] > 1000 and rows(found)["MFU"] == ["-"] * 5


class Program:
    """A compiled program of this text."""

    def __init__(self, text):
        self.as_text = lambda: text
        sizes = ("argument", "temp", "output", "alias", "host_argument", "host_output", "host_temp")
        self.memory_analysis = lambda: SimpleNamespace(
            peak_memory_in_bytes=0, **{f"{name}_size_in_bytes": 0 for name in sizes}
        )


@pytest.mark.parametrize(
    ("text", "secs", "said"),
    [
        (with_cycles(CHAIN), 6 * 4750 / 1.5e9, ""),  # of six turns
        (CHAIN, None, ""),
        ("no program", None, "the compiled program cannot be read: KeyError"),
    ],
)
def test_a_program_that_cannot_be_read_is_run_all_the_same(text, secs, said, capsys):
    found = found_of({(MEMORY, "compiled"): math.nan})
    read_program(found, build((2, 4, 1)), Program(text))
    assert said in capsys.readouterr().err
    assert found.figures[STEP_TIME, "compiled"] == pytest.approx(math.nan if secs is None else secs, nan_ok=True)


def test_the_memory_that_is_planned_is_that_of_these_devices():
    settings = resolve(read_command(["firstrun", *TINY], {})[0], Devices.here())
    assert settings.mesh.sizes == {"pp": 1, "dp": 8, "tp": 1} and settings.model.vocab == 384
    half = dataclasses.replace(settings.data, global_batch=16)
    assert planned_memory(dataclasses.replace(settings, data=half)) > planned_memory(settings) > 0


@pytest.mark.slow
def test_two_processes_write_one_file(tmp_path):
    out = tmp_path / "first-run.md"
    words = [*TINY, "--steps=3", f"--out={out}"]
    launcher = ["-m", "parallax.launch", "--processes=2", "--devices-per-process=4", "--", "-m", "parallax.firstrun"]
    ended = subprocess.run([sys.executable, *launcher, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "cpu-8, 4 local devices" in out.read_text() and "steps: done in" in out.read_text()
