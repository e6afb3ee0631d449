"""Stand-ins for what is outside a process: its end, its devices, the other processes of its job, the disk."""

import builtins
import errno
import os
import pathlib
import pickle
import threading
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import Mesh

from parallax.analysis.planned.topology import read_topology
from parallax.processes import job

AXES = ("pp", "dp", "tp")
COMPILED = []  # a name for each program that was compiled, or read from the cache of them


def note_compilation(event: str, secs: float, **about) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(about.get("fun_name", "a program"))


jax.monitoring.register_event_duration_secs_listener(note_compilation)


@pytest.fixture
def compiles_nothing():
    """Nothing is compiled until the test is over, but for a key, which is of no model."""
    jax.random.key(0)
    before = len(COMPILED)
    yield
    assert COMPILED[before:] == [], COMPILED[before:]


# ---- the end of a process


@pytest.fixture
def exits(monkeypatch):
    """The statuses with which the process was to end at once; it goes on, but the main thread gets SystemExit."""
    statuses = []

    def end(status):
        statuses.append(status)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    return statuses


# ---- devices


class Chip(SimpleNamespace):
    """A stand-in for a device which XLA does not compile for; equal to itself alone, as a device is."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, platform, kind, coords=None, memory=None):
        super().__init__(platform=platform, device_kind=kind, coords=coords, process_index=0)
        self.memory_stats = lambda: memory


class ChipMesh(Mesh):
    """A mesh whose devices JAX has never seen."""

    def __new__(cls, *given):
        return object.__new__(cls)

    def __init__(self, devices, axes=AXES):
        self.__dict__.update(devices=devices, axis_names=axes)


@pytest.fixture
def with_chips(monkeypatch):
    """A function that has JAX find these chips in place of its devices."""

    def find(*chips):
        monkeypatch.setattr(jax, "default_backend", lambda: chips[0].platform)
        monkeypatch.setattr(jax, "device_count", lambda: len(chips))
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda: [*chips])

    return find


@pytest.fixture
def known_speed(monkeypatch):
    """What the CPUs of the tests can do a second is not measured, which takes seconds: they are as fast as a v5e."""
    monkeypatch.setattr("parallax.analysis.planned.devices.measured", lambda dtype: read_topology("v5e:2x4").chip)


# ---- other processes


class ClientStandIn:
    """For the coordinator's client. The others have the values of this process, or what `answer` says of them."""

    phase, is_leaving = "step 3", False

    def __init__(self, **answer):
        self.calls, self.answer = [], answer

    def wait_for_lost(self):
        self.calls.append("waited")

    def leave(self, status, reason):
        self.calls.append((status, reason))

    def set_phase(self, phase, setting):
        self.calls.append((phase, setting))

    def barrier(self, name, values, setting):
        self.calls.append(("barrier", name, setting))
        return {"values": values, "differences": [], "more": 0} | self.answer


@pytest.fixture
def in_job(monkeypatch):
    """A function that makes this process one of several, with this client of the coordinator."""

    def join(client):
        monkeypatch.setattr(job, "_client", client)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        return client

    return join


@pytest.fixture
def second_of_two(monkeypatch):
    """JAX says that this process is the second of two."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)


# ---- files


def on_write(monkeypatch, pattern, act):
    """Call `act(path)` before a file of such a name is written, or gets it; what it raises is what the disk says."""

    def acting(function, place):
        def call(*args, **how):
            if (path := pathlib.Path(args[place])).match(pattern):
                act(path)
            return function(*args, **how)

        return call

    for module, name, place in ((os, "replace", 1), (pathlib.Path, "write_bytes", 0)):
        monkeypatch.setattr(module, name, acting(getattr(module, name), place))


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forbid_code(monkeypatch):
    """From now on nothing may be unpickled or evaluated."""

    def forbidden(*_, **__):
        raise AssertionError("something is unpickled or evaluated")

    for module, names in ((pickle, ("load", "loads", "Unpickler")), (builtins, ("eval", "exec"))):
        for name in names:
            monkeypatch.setattr(module, name, forbidden)
