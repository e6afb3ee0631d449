"""A run that is told to stop saves the step that it is in; told twice, it ends at once."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from jax.experimental import multihost_utils
from support.run_examples import at_batch, at_step, stop_at, tiny_config
from support.stand_ins import ClientStandIn

from parallax.checkpoint.steps import latest_step
from parallax.cli.watch import WatchedRun
from parallax.training.run import train
from parallax.training.signals import StopRequest


def test_ctrl_c_saves_as_sigterm_does(corpus, tmp_path, monkeypatch, capsys):
    stop_at(monkeypatch, 2, signal.SIGINT)
    outcome = train(tiny_config(corpus), tmp_path)
    assert outcome.reason == "stopped" and f"stopped by SIGINT: step {outcome.step} is saved" in capsys.readouterr().out
    assert latest_step(tmp_path / "checkpoints") == outcome.step


def test_a_closed_terminal_saves_as_sigterm_does(corpus, tmp_path, monkeypatch, capsys):
    stop_at(monkeypatch, 2, signal.SIGHUP)
    outcome = train(tiny_config(corpus), tmp_path)
    assert outcome.reason == "stopped" and f"stopped by SIGHUP: step {outcome.step} is saved" in capsys.readouterr().out
    assert latest_step(tmp_path / "checkpoints") == outcome.step


def test_a_signal_before_the_first_step_stops_after_it(corpus, tmp_path, monkeypatch):
    at_batch(monkeypatch, "train", lambda step: step == 0 and os.kill(os.getpid(), signal.SIGTERM))
    assert train(tiny_config(corpus), tmp_path) == ("stopped", 1, None)


def test_the_end_of_max_runtime_stops_after_the_step(corpus, tmp_path, capsys):
    assert train(tiny_config(corpus), tmp_path, max_runtime_secs=0.0) == ("stopped", 1, None)
    assert "stopped by --max-runtime: step 1 is saved" in capsys.readouterr().out
    assert latest_step(tmp_path / "checkpoints") == 1


@pytest.mark.slow
def test_a_signal_in_the_last_step_lets_the_run_end_whole(corpus, tmp_path, monkeypatch, capsys):
    stop_at(monkeypatch, 7)
    outcome = train(tiny_config(corpus, **{"sample.prompt": "Document", "sample.tokens": 5}), tmp_path)
    assert outcome.reason == "finished" and outcome.eval_loss is not None
    assert "sample of 5 tokens" in capsys.readouterr().out


def test_a_signal_while_evaluating_stops_after_the_next_step_saved(corpus, tmp_path, monkeypatch):
    at_batch(monkeypatch, "eval", lambda _: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(0.2))
    assert train(tiny_config(corpus), tmp_path) == ("stopped", 5, None)
    assert latest_step(tmp_path / "checkpoints") == 5


@pytest.fixture
def jax_agrees(in_job, monkeypatch):
    """A function that has JAX's preemption service answer for each step by another function."""
    in_job(ClientStandIn())
    return lambda answer: monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", answer)


@pytest.mark.parametrize("agreed", [1, 999, 1000, 1001])
def test_a_stop_is_remembered_whichever_number_jax_agrees_on(jax_agrees, agreed):
    """JAX agrees on the number after the highest that a process has asked for: 1 while a resumed run compiles."""
    asked = []
    jax_agrees(lambda step: asked.append(step) or step == agreed)
    stop = StopRequest()
    stops = [stop.after(step) for step in (999, 1000, 1001, 1002)]
    assert stops == [step >= agreed for step in (999, 1000, 1001, 1002)]
    assert asked == list(range(1, agreed + 1))


@pytest.fixture
def told_to_jax():
    """The signals that a handler of JAX's, which Python knows nothing of, has had."""
    system, told = ctypes.CDLL(None), []
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(told.append)
    system.signal.restype = ctypes.c_void_p
    before = system.signal(signal.SIGTERM, handler)
    yield told
    system.signal(signal.SIGTERM, ctypes.c_void_p(before))


def test_who_asks_for_a_stop_waits_until_all_have_agreed_and_asks_for_no_step_that_it_has_not_taken(
    jax_agrees, told_to_jax, monkeypatch
):
    """JAX answers nobody while it asks for everybody's step: a number asked for again comes back when they agree."""
    calls, sleep, own = [], time.sleep, threading.get_ident()

    def held(secs):
        # A thread that another test has left sleeps on: else it would fill memory with calls.
        calls.append(("held", *told_to_jax)) if threading.get_ident() == own else sleep(secs)

    monkeypatch.setattr(time, "sleep", held)
    jax_agrees(lambda step: calls.append(step) or step == 7)
    with StopRequest() as stop:
        assert not stop.after(5)
        stop.ask("data that cannot be read")
        assert calls[5:] == [("held", signal.SIGTERM), 5] and stop.signal == "data that cannot be read"
        assert [stop.after(step) for step in (6, 7)] == [False, True]


WAITING = """
import time
from parallax.training.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while stop.signal is None: time.sleep(0.01)
"""


def test_a_signal_is_heard_where_nobody_reads_stderr():
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def test_a_second_signal_ends_the_process_at_once():
    code = f"{WAITING}    print(stop.signal, flush=True); time.sleep(60)\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75


def test_a_second_ctrl_c_says_so_and_the_run_counts_as_interrupted(corpus, tmp_path, monkeypatch, exits, capfd):
    said, states = [], []

    def is_heard():
        said.extend(line for line in capfd.readouterr().err.splitlines() if line.startswith("SIGINT"))
        return said

    def twice():
        for is_over in (is_heard, lambda: exits):
            os.kill(os.getpid(), signal.SIGINT)
            while not is_over():
                time.sleep(0.01)
        is_heard()
        states.append(WatchedRun(tmp_path).status)  # before the run goes on, which only `exits` lets it

    at_step(monkeypatch, 2, twice)
    train(tiny_config(corpus), tmp_path)
    words = "SIGINT again: the run ends at once; the same command goes on from the last saved step"
    assert exits[0] == 75 and said[:2] == ["SIGINT: stopping after this step; once more to exit at once", words]
    (status,) = states
    assert (status.state, status.over) == ("interrupted", True) and status.why.endswith(words)


def test_a_terminal_that_is_closed_twice_ends_no_process_and_a_second_sigterm_does():
    """The system says that it is closed, and so does the shell."""
    code = f"{WAITING}    print(stop.signal, flush=True); time.sleep(60)\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGHUP)
            assert process.stdout.readline() == "SIGHUP\n"
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
                process.stderr.readline()
                process.send_signal(number)
            process.stderr.readline()
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 75
        finally:
            process.kill()


def test_under_nohup_a_closed_terminal_is_ignored():
    code = f"{WAITING}    print(stop.signal, flush=True)\n"
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignoring, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n" and process.wait(timeout=20) == 0
        finally:
            process.kill()
