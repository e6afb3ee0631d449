"""Tests run on eight simulated CPU devices, with compiled programs kept between runs."""

import collections
import gc
import pathlib
import resource
import signal
from importlib.util import find_spec

import support.environment  # noqa: F401  first of all: it says what jax is imported with

# isort: split
import hypothesis
import jax
import pytest
from support.checkpoint_examples import small_disk
from support.faulty_store import bucket, store
from support.run_examples import corpus, observed_run, shared_programs, whole_run
from support.stand_ins import compiles_nothing, exits, in_job, known_speed, second_of_two, with_chips

from parallax.hardware.devices import simulate_devices

__all__ = ["bucket", "corpus", "observed_run", "shared_programs", "small_disk", "store", "whole_run"]  # fixtures
__all__ += ["compiles_nothing", "exits", "in_job", "known_speed", "second_of_two", "with_chips"]

simulate_devices(8)
# [B, S] + [S] is a mistake more often than a wish.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Traced programs are many objects that live long and form few cycles: looking for those is a tenth of the time.
gc.set_threshold(100_000, 20, 100)

# A shell has its background jobs ignore Ctrl-C, and nohup SIGHUP; so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What needs the extra hf-tests cannot be looked at for doctests without it.
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else ["support/hf_families.py"]

hypothesis.settings.register_profile("parallax", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("parallax")

# A worker keeps programs of a file for the next ones until it has grown by so much.
GROWTH_BYTES = 1 << 30
most_bytes = GROWTH_BYTES


def memory_bytes():
    """What this process has in memory; infinite where the system does not say."""
    pages = pathlib.Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else float("inf")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test with the mark `fast(n)`, n cases spread over all stay fast; the others become slow."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for own in cases.values():
        (count,) = own[0].get_closest_marker("fast").args
        kept = {at * len(own) // count for at in range(count)}
        for at in {*range(len(own))} - kept:
            own[at].add_marker("slow")


def pytest_collection_finish():
    """What is imported and collected stays: each full collection would look for cycles in it, for 0.3 seconds."""
    gc.freeze()


def pytest_sessionfinish():
    """Pytest then collects twice, and Python at its end: each would look through all programs that are still held."""
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Files share programs, as that of the tiny run; held on to, those of all files are gigabytes."""
    global most_bytes
    if nextitem is None or (nextitem.path != item.path and memory_bytes() >= most_bytes):
        jax.clear_caches()
        most_bytes = memory_bytes() + GROWTH_BYTES
