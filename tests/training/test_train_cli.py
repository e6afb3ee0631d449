"""The command of the README, in processes of its own: it trains, stops when told, and goes on by itself."""

import contextlib
import itertools
import os
import pathlib
import pty
import signal
import subprocess
import sys

import pytest
from support.process_examples import flags_of
from support.run_examples import losses, tiny_config
from support.stand_ins import ClientStandIn

import train as command_line
from parallax.checkpoint.steps import latest_step
from parallax.config.settings import read_settings
from parallax.training.run import Outcome

ROOT = pathlib.Path(command_line.__file__).parent


@pytest.fixture(scope="module")
def flags(corpus):
    """The tiny run as a command line, on eight simulated devices."""
    sizes = {"mesh.simulate": 8, "mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2, "pipeline.microbatches": 2}
    return flags_of(corpus, **sizes)


HASH_SEEDS = itertools.count(1)  # another one for each process: no order of a set may reach the numbers


def start(*arguments):
    command = [sys.executable, "-u", "train.py", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": str(next(HASH_SEEDS))}
    # In a group of its own: a signal to it is no signal to us.
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def lines_until(process, word):
    seen = []
    for line in process.stdout:
        seen.append(line)
        if word in line:
            return seen
    raise AssertionError(f"no {word!r} in {''.join(seen)}{process.stderr.read()}")


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_goes_on_with_the_same_losses(flags, tmp_path):
    whole = start(*flags, f"--workdir={tmp_path / 'whole'}")
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0 and err == ""
    assert "finished: step 8 is saved" in out and "pp=2  dp=2  tp=2" in out

    stopped = start(*flags, f"--workdir={tmp_path / 'parts'}")
    lines_until(stopped, "step 1/8")
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=300)
    assert stopped.returncode == 0 and "the same command goes on from there" in out
    done = latest_step(tmp_path / "parts" / "checkpoints")
    assert err == "SIGTERM: stopping after this step; once more to exit at once\n" and 1 <= done < 8

    # Without --config: the run's own says what to do.
    resumed = start(f"--workdir={tmp_path / 'parts'}", "--resume=must")
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and err == "" and f"going on from step {done}" in out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_killed_in_the_middle_goes_on_with_the_same_losses(flags, tmp_path):
    arguments = [*flags, "--config.checkpoint.every_steps=2", f"--workdir={tmp_path / 'run'}"]
    killed = start(*arguments)
    lines_until(killed, "step 5/8")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = losses(tmp_path / "run")
    again = start(*arguments)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0 and err == "" and "finished: step 8" in out
    assert len(losses(tmp_path / "run")) == 8 and losses(tmp_path / "run")[: len(before)] == before


def asked(monkeypatch, *arguments):
    """The config and the folder with which the command line trains."""
    given = []
    train = lambda *config_and_folder, **more: given.append(config_and_folder) or Outcome("finished", 3)  # noqa: E731
    monkeypatch.setattr(command_line, "train", train)
    assert command_line.as_command(["train.py", *arguments]) == 0
    return given.pop()


def test_the_command_line_overrides_the_config_and_names_the_folder(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs" / "tiny_gqa.py")
    read, folder = asked(monkeypatch, f"--config={config}", "--config.mesh.tp=4", "--run_name=mine")
    assert read_settings(read).mesh.tp == 4 and folder == pathlib.Path("runs/mine")
    assert asked(monkeypatch, f"--config={config}", "--run-name=m_1")[1] == pathlib.Path("runs/m_1")
    read, folder = asked(monkeypatch, "--config", config, "--config.train.steps", "7")
    assert read_settings(read).train.steps == 7 and folder.name.startswith("tiny_gqa-20")
    monkeypatch.setenv("JOBSET_NAME", "job-7")
    assert asked(monkeypatch, f"--config={config}")[1] == pathlib.Path("runs/job-7")
    assert asked(monkeypatch, f"--config={config}", "--workdir=x")[1] == pathlib.Path("x")


def test_the_processes_of_a_job_take_the_name_that_the_first_gives(in_job):
    in_job(ClientStandIn(values={"text": "20260102-030405"}))
    assert command_line.default_workdir("configs/tiny_gqa.py") == pathlib.Path("runs/tiny_gqa-20260102-030405")


@pytest.mark.parametrize("written", ["soon", "-3h", "0", "1d"])
def test_a_runtime_that_is_no_time_is_refused(written, capsys):
    config = f"--config={ROOT / 'configs' / 'tiny_gqa.py'}"
    assert command_line.as_command(["train.py", config, f"--max-runtime={written}"]) == 2
    assert f"--max-runtime='{written}' is not a time; write it as 3h, 90m" in capsys.readouterr().err


def test_half_a_place_among_processes_is_refused(capsys):
    command = ["train.py", f"--config={ROOT / 'configs' / 'tiny_gqa.py'}", "--distributed.process-id=1"]
    assert command_line.as_command(command) == 2
    assert "--distributed.process-id=1 without --distributed.coordinator" in capsys.readouterr().err


def test_help_config_lists_every_key_with_its_default(capsys):
    assert command_line.as_command(["train.py", "--help-config"]) == 0
    out = capsys.readouterr().out
    for section, keys in read_settings(tiny_config(ROOT)).to_dict().items():
        assert all(f"  --config.{section}.{key} = " in out for key in keys)


@pytest.mark.parametrize(
    ("reason", "flag", "status"),
    [
        ("stopped", [], 0),
        ("stopped", ["--stopped-status=75"], 75),
        ("finished", ["--stopped-status=75"], 0),
        ("stopped", ["--stopped-status=1"], 2),
    ],
)
def test_a_scheduler_can_be_told_that_a_run_was_stopped(monkeypatch, tmp_path, reason, flag, status):
    monkeypatch.setattr(command_line, "train", lambda *_, **how: Outcome(reason, 3))
    config = f"--config={ROOT / 'configs' / 'tiny_gqa.py'}"
    assert command_line.as_command(["train.py", config, f"--workdir={tmp_path}", *flag]) == status


def test_a_run_of_one_process_has_the_limits_of_its_config(monkeypatch, tmp_path):
    limits = []
    monkeypatch.setattr(command_line, "limited", lambda config: limits.append(config) or contextlib.nullcontext())
    monkeypatch.setattr(command_line, "train", lambda *_, **how: Outcome("finished", 3))
    config = f"--config={ROOT / 'configs' / 'tiny_gqa.py'}"
    command_line.as_command(["train.py", config, f"--workdir={tmp_path}", "--config.distributed.wait_secs=77"])
    assert [config.wait_secs for config in limits] == [77]


@pytest.mark.slow
def test_a_run_whose_console_is_closed_takes_all_its_steps(flags, tmp_path):
    process = start(*flags, f"--workdir={tmp_path}")
    lines_until(process, "step 1/8")
    process.stdout.close()
    assert (process.wait(timeout=240), process.stderr.read()) == (0, "")
    assert len(losses(tmp_path)) == 8 == latest_step(tmp_path / "checkpoints")


# Leads the session of its terminal, so that it has SIGHUP when that is closed.
LEADER = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if sys.argv[1]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Terminal:
    """A program in a terminal of its own, which can be closed; a context that leaves no process behind."""

    def __init__(self, *command, nohup=False):
        self._master, slave = pty.openpty()
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        program = [sys.executable, "-c", LEADER, "nohup" if nohup else "", sys.executable, "-u", *command]
        self.process = subprocess.Popen(program, cwd=ROOT, **streams, start_new_session=True)
        os.close(slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.close()

    def read_until(self, word):
        seen = b""
        while word.encode() not in seen:
            seen += os.read(self._master, 1000)  # an error, once the program has ended

    def close(self):
        os.close(self._master)


IN_A_TERMINAL = """
import signal, sys, time
from parallax.errors import CheckpointError, exit_status, tell
heard = []
signal.signal(signal.SIGHUP, lambda *_: heard.append(1))
def act():
    print("ready", flush=True)
    while not heard: time.sleep(0.01)
    if sys.argv[1] == "tells":
        tell("stopped", sys.stdout)
    elif sys.argv[1] == "prints":
        print("the result", flush=True)
    elif sys.argv[1] == "warns":
        try:
            print("a warning of somebody else's", file=sys.stderr)
        except OSError:
            pass
    else:
        raise CheckpointError("a disk is full")
sys.exit(exit_status(act))
"""


@pytest.mark.parametrize(("what", "status"), [("tells", 0), ("prints", 0), ("warns", 0), ("fails", 3)])
def test_a_closed_terminal_changes_no_status(what, status):
    """What is written then is an error, EIO, which Python would turn into a status of 1, or of 120 when it ends."""
    with Terminal("-c", IN_A_TERMINAL, what) as terminal:
        terminal.read_until("ready\r\n")
        terminal.close()
        assert terminal.process.wait(timeout=60) == status


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
def test_a_stream_that_was_closed_before_the_start_changes_no_status(closed):
    failing = "import sys; from parallax import errors\ndef act(): raise errors.CheckpointError\n"
    program = failing + "sys.exit(errors.exit_status(act))"
    assert subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], cwd=ROOT).returncode == 3


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_is_saved(flags, tmp_path):
    with Terminal("train.py", *flags, "--config.train.steps=20000", f"--workdir={tmp_path}") as terminal:
        terminal.read_until("step 2/20000")
        terminal.close()
        assert terminal.process.wait(timeout=240) == 0
    done = latest_step(tmp_path / "checkpoints")
    assert len(losses(tmp_path)) == done > 1
    assert f"stopped by SIGHUP: step {done} is saved" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed(flags, tmp_path):
    with Terminal("train.py", *flags, f"--workdir={tmp_path}", nohup=True) as terminal:
        terminal.read_until("step 1/8")
        terminal.close()
        assert terminal.process.wait(timeout=240) == 0
    assert len(losses(tmp_path)) == 8 == latest_step(tmp_path / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("nohup", "word"), [(False, "stopped by SIGHUP: step"), (True, "finished: step 8")])
def test_a_job_whose_terminal_is_closed_is_saved_and_under_nohup_goes_on(flags, tmp_path, nohup, word):
    launcher = ["-m", "parallax.launch", "--processes", "2", "--devices-per-process", "4", "--", "train.py"]
    steps = [] if nohup else ["--config.train.steps=20000"]
    with Terminal(*launcher, *flags, *steps, f"--workdir={tmp_path}", nohup=nohup) as terminal:
        terminal.read_until(" step 2/")
        terminal.close()
        assert terminal.process.wait(timeout=240) == 0
    assert word in (tmp_path / "log.txt").read_text()
    assert len(losses(tmp_path)) == latest_step(tmp_path / "checkpoints")
