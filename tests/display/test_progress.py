"""Nothing waits in silence: what is waited for is named within a second or two, and again every few seconds."""

import errno
import gc
import io
import os
import pathlib
import subprocess
import sys

import pytest

from parallax.display.progress import ProgressPrinter, loading, printing_progress, stop_progress, waiting
from parallax.display.units import duration, in_bytes

ROOT = pathlib.Path(__file__).parents[2]


class Clock:
    """A clock that only we move, and a printer that looks at it every half second."""

    def __init__(self, stream, log=lambda line: None):
        self.now = 100.0
        self.printer = ProgressPrinter(stream, log, clock=lambda: self.now)

    def run(self, secs):
        for _ in range(round(2 * secs)):
            self.now += 0.5
            self.printer.tick()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_a_file_gets_a_line_within_two_seconds_and_then_every_few():
    out, kept = io.StringIO(), []
    clock = Clock(out, kept.append)
    with printing_progress(clock.printer), waiting("compiling"):
        clock.run(130)
    named = [1, 5, 9, 19, 29, 39, 49, 59, 89, 119]
    lines = [*(f"compiling: {duration(secs)} so far" for secs in named), "compiling: done in 2m10s"]
    assert out.getvalue().splitlines() == kept == lines


def test_how_much_is_done_is_in_the_line():
    out = io.StringIO()
    clock = Clock(out)
    with printing_progress(clock.printer), waiting("tokenising", unit=in_bytes) as show:
        show(0, 1 << 20)
        clock.run(1)
        show(1 << 18, 1 << 20)
        clock.run(4)
    assert out.getvalue().splitlines() == [
        "tokenising: 0 B of 1.0 MiB, 1s so far",
        "tokenising: 256.0 KiB of 1.0 MiB, 5s so far, about 15s left",
        "tokenising: done in 5.0 s",
    ]


def test_what_is_soon_over_is_not_named_but_the_silence_goes_on():
    out = io.StringIO()
    clock = Clock(out)
    with printing_progress(clock.printer):
        with waiting("reading"):
            clock.run(0.5)
        assert out.getvalue() == ""
        with waiting("planning"):
            clock.run(0.5)
    assert out.getvalue() == "planning ...\n"


def test_the_innermost_wait_is_named_and_the_outer_one_after_it():
    out = io.StringIO()
    clock = Clock(out)
    with printing_progress(clock.printer), waiting("preparing"):
        with waiting("training a bpe"):
            clock.run(1)
        clock.run(1)
    assert out.getvalue().splitlines() == ["training a bpe: 1s so far", "preparing: 2s so far"]


def test_a_terminal_has_one_line_that_changes_and_makes_room(terminal):
    kept = []
    clock = Clock(terminal, kept.append)
    with printing_progress(clock.printer):
        with waiting("compiling " + "x" * 200):
            clock.run(2)
        assert terminal.getvalue().endswith("\r\x1b[K") and "\n" not in terminal.getvalue()
        shown = [line for line in terminal.getvalue().split("\x1b[K") if line.strip("\r")]
        assert len(shown) == 3 and all(len(line.strip("\r")) <= 80 for line in shown)
        with waiting("saving"):
            clock.run(6)
    assert terminal.getvalue().endswith("\r\x1b[Ksaving: done in 6.0 s\n")
    assert [line[:6] for line in kept] == ["compil", "saving", "saving", "saving"]


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    clock = Clock(terminal)
    with printing_progress(clock.printer), waiting("compiling"):
        clock.run(1)
    assert terminal.getvalue() == "compiling: 1s so far\n"


def test_after_an_error_nothing_is_said(terminal):
    clock = Clock(terminal)
    with printing_progress(clock.printer):
        with pytest.raises(ZeroDivisionError), waiting("compiling"):
            clock.run(10)
            raise ZeroDivisionError
        shown = terminal.getvalue()
        clock.run(10)
    assert terminal.getvalue() == shown and shown.endswith("\r\x1b[K") and "\n" not in shown


@pytest.mark.parametrize("how", ["closed", "none", "broken pipe", "terminal that is gone"])
def test_a_stream_that_nobody_reads_ends_nothing(how, monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    os.close(read)
    if how == "closed":
        stream.close()
    if how == "terminal that is gone":
        stream = Terminal()
        stream.write = lambda text: (_ for _ in ()).throw(OSError(errno.EIO, "gone"))
        file = open(tmp_path / "terminal", "w")  # noqa: SIM115
        stream.fileno = file.fileno
    clock = Clock(None if how == "none" else stream)
    with printing_progress(clock.printer), waiting("compiling"):
        clock.run(10)


def test_without_a_speaker_a_library_is_silent(capsys):
    with waiting("compiling") as show:
        show(1, 2)
    stop_progress()
    assert capsys.readouterr() == ("", "")


COMMANDS = {
    "train.py": ["train.py", "--config=configs/quickstart.py"],
    "plan": ["-m", "parallax.plan", "--config=configs/quickstart.py"],
    "report": ["-m", "parallax.report", "--config=configs/quickstart.py"],
    "generate": ["-m", "parallax.generate", "--workdir", "runs/none"],
    "evaluate": ["-m", "parallax.evaluate", "--workdir=runs/none"],
    "replay": ["-m", "parallax.replay", "--workdir=runs/none"],
    "convert": ["-m", "parallax.convert", "export", "runs/none", "out"],
}
SILENT = {"PARALLAX_PROCESS_ID": "1", "PARALLAX_PROGRESS": "off"}


def test_commands_speak_before_jax_is_there_and_where_their_results_do_not_go(tmp_path):
    """JAX's import waits here until what the command says by then was read; another process of a job says nothing."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import sys; sys.stdin.read(); sys.stdout.flush(); sys.exit(7)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PARALLAX_PROGRESS"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"

    def start(arguments, **changes):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        environment_of = environment | changes
        return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment_of, text=True, **pipes)

    running = {name: start(arguments) for name, arguments in COMMANDS.items()}
    silent = [start(COMMANDS["train.py"], **{name: value}) for name, value in SILENT.items()]
    said = {}
    for name, process in running.items():
        said[name] = (process.stdout if name == "train.py" else process.stderr).readline()
    ended = {name: process.communicate(timeout=60) for name, process in running.items()}
    assert all(line.startswith("loading JAX") for line in said.values()), (said, ended)
    assert {process.returncode for process in running.values()} == {7}
    assert ended["train.py"][1] == "" and not any(out for name, (out, _) in ended.items() if name != "train.py")
    assert [process.communicate(timeout=60) for process in silent] == [("", "")] * len(silent)


def test_what_checks_a_config_and_plans_loads_no_checkpoint_library():
    program = (
        "import sys, parallax.config.settings, parallax.cli.plan; print(*{'orbax', 'rich.progress'} & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "\n"


def test_ctrl_c_while_jax_is_loaded_is_quiet(tmp_path):
    """No traceback of imports, and the status of shells."""
    (tmp_path / "jax.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    for command in (["train.py"], ["-m", "parallax.plan"], ["-m", "parallax.generate"]):
        ended = subprocess.run(
            [sys.executable, *command, "--config=configs/tiny_gqa.py"],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ended.returncode == 130 and "Traceback" not in ended.stderr + ended.stdout, ended.stderr


@pytest.mark.parametrize(("module", "searched"), [("__main__", False), ("parallax.cli.train", True)])
def test_what_a_command_loads_is_not_searched_for_garbage(module, searched, monkeypatch):
    """Another program that imports the command decides about its own."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])  # no progress is printed
    before = gc.get_freeze_count()  # Python has frozen some since 3.12
    try:
        with loading(module, None):
            assert gc.isenabled() == searched
        assert gc.isenabled()
        assert (gc.get_freeze_count() > before) == (not searched)
    finally:
        gc.unfreeze()
