"""Simulated devices meet collectives in the same order; where they do not, they wait for each other for ever."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.collective_order import out_of_turn
from support.tiny_model import SEQ_CUT, build, make_batch

from parallax.sharding.collectives import after
from parallax.sharding.message_order import Accelerators, SimulatedDevices

ROOT = pathlib.Path(__file__).parents[2]
# A stage of one layer has no loop over layers: its weights could be gathered beside the branch that embeds.
ONE_LAYER = dict(schedule="one_f_one_b", microbatches=2, layers=2, remat="layer")
MIXTURE = dict(layers_of="moe*2", layers=2, experts=8, experts_per_token=2, d_expert=16, shared_experts=1)
CHUNKS = dict(microbatches=2, exchange="ragged", expert_chunk_tokens=16)
GATHERED = dict(exchange="gather", residual=SEQ_CUT, layers_of="moe*4", layers=4, attention="gqa", tied=True)
GATHERED |= dict(embedding="vocab_parallel")
# Attention is recomputed, and the MLP's backward pass does not read it.
RING = dict(attention="gqa", context="ring", residual=SEQ_CUT, remat="core")
WINDOWS = dict(layers_of="near far", kinds="near=(sliding_window=3) far=()")
CASES = {
    "one layer": ((2, 4, 1), ONE_LAYER),
    "one layer, tp": ((2, 2, 2), ONE_LAYER | {"schedule": "zero_bubble", "microbatches": 4, "residual": SEQ_CUT}),
    "one pass": ((2, 2, 2), ONE_LAYER | {"schedule": "dualpipe_v", "microbatches": 4, "layers": 9, "prefetch": 1}),
    "adapters, base in 8 bits": ((2, 2, 1), ONE_LAYER | {"lora_rank": 4, "lora_base": "int8"}),
    "first of several": ((2, 4, 1), ONE_LAYER | {"layers": 6, "prefetch": 1, "remat": "stage"}),
    "hops of a ring": ((1, 1, 2, 1, 4), ONE_LAYER | RING),
    "hops, with branches beside each other": ((1, 1, 2, 1, 4), ONE_LAYER | RING | {"branches": "parallel"}),
    "hops, one pass": ((2, 1, 1, 1, 4), RING | {"schedule": "dualpipe_v", "microbatches": 4, "layers": 9}),
    "hops in windows": ((2, 1, 2, 1, 2), ONE_LAYER | RING | WINDOWS),
    "ends of chunks in windows": ((2, 1, 2, 1, 2), ONE_LAYER | RING | WINDOWS | {"context": "all_gather"}),
    "experts": ((1, 1, 2, 1, 1, 4), MIXTURE | dict(microbatches=2, exchange="ragged")),
    "experts, chunks": ((1, 1, 2, 1, 1, 4), MIXTURE | CHUNKS),
    "experts, chunks, residual cut by tokens": ((1, 1, 2, 1, 1, 4), MIXTURE | CHUNKS | GATHERED),
    "experts, chunks, divided": (
        (2, 1, 2, 1, 1, 2),
        MIXTURE | CHUNKS | {"schedule": "zero_bubble", "exchange": "gather"},
    ),
}


def compiled(mesh, changes):
    model = build(mesh, **changes)
    return jax.jit(model.loss_and_grad).lower(model.shapes, make_batch()).compile().as_text()


@pytest.mark.fast(1)
@pytest.mark.parametrize(("mesh", "changes"), CASES.values(), ids=CASES)
def test_nothing_is_sent_beside_a_loop_or_branch_that_sends(mesh, changes):
    assert out_of_turn(compiled(mesh, changes)) == []


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16])
def test_what_waits_reads_what_it_waits_for(dtype):
    x = jnp.ones(3, dtype)
    assert (after(x, jnp.zeros(2)) == x).all()
    assert not (after(x, jnp.full(2, jnp.nan)) == x).any()


def test_only_calls_are_opened():
    """What reduces has a program, too, but does not run it once."""

    def run(x):
        return jax.jit(lambda x: jax.lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (1,)))(x)

    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(SimulatedDevices(has_loops=True).in_turn(x, run, x), run(x))


def test_untied_gathers_are_out_of_turn(monkeypatch):
    """What the test above would say."""
    monkeypatch.setattr(SimulatedDevices, "after", Accelerators.after)
    found = out_of_turn(compiled(*CASES["one layer"]))
    assert found and all("/F/" in pair and "all-gather" in pair for pair in found)


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", ["hops of a ring", "hops in windows"])
def test_layers_with_loops_that_send_would_be_out_of_turn(case, monkeypatch):
    monkeypatch.setattr(SimulatedDevices, "in_turn", Accelerators.in_turn)
    assert out_of_turn(compiled(*CASES[case]))


STEPS = """
import conftest, jax, numpy, pathlib
from support.run_examples import tiny_config
from parallax.config.settings import read_settings
from parallax.sharding.mesh import make_mesh
from parallax.step.step import init_state, TrainStep, model_of, optimizer_of

changes = {"mesh.pp": 2, "mesh.dp": 4, "pipeline.schedule": "one_f_one_b", "pipeline.microbatches": 2}
settings = read_settings(tiny_config(pathlib.Path(), **changes), model={"vocab": 384})
model = model_of(settings, make_mesh(settings.mesh))
tx = optimizer_of(model)
state, step = init_state(model, tx, seed=0), TrainStep(model, tx, seed=0)
ones = jax.device_put(numpy.ones((8, 32), numpy.int32), model.batch_sharding)
for _ in range(10):
    state, metrics = step(state, dict.fromkeys(["tokens", "labels", "segments", "positions"], ones))
    jax.block_until_ready(metrics)
"""


@pytest.mark.slow
def test_devices_do_not_wait_for_each_other_for_ever():
    """In a process of its own, for XLA ends one that is stuck."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_cpu_collective_call_terminate_timeout_seconds=10"
    changed = {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=os.environ | changed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
