"""Options beside none: where only the moment, the place or the recomputation of something changes, ten steps have the
same bits; where the order of a sum does, they are as far apart as that makes them."""

import dataclasses
import functools
import pathlib
import re

import jax
import numpy as np
import pytest
from support.tiny_model import AS_WRITTEN, build, make_batch, optimizer_config

from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 10
NONE = dict(attention="gqa", schedule="one_f_one_b", remat="none", layers=4, tied=False)
MIXTURE = dict(layers_of="(dense moe)*2", experts=4, d_expert=16, shared_experts=1)
# By name in the page: the option, and what is not as in NONE on both sides.
SAME_BITS = {
    "`pipeline.remat=elementwise`": (dict(remat="elementwise"), {}),
    "`pipeline.remat=attention`": (dict(remat="attention"), {}),
    '`pipeline.remat="norm swiglu ffn qkv core"`': (dict(remat="norm swiglu ffn qkv core"), {}),
    "`pipeline.remat=layer`": (dict(remat="layer"), {}),
    "`pipeline.remat=stage`": (dict(remat="stage"), {}),
    "`pipeline.schedule=zero_bubble`": (dict(schedule="zero_bubble"), {}),
    "`fsdp.prefetch=1`": (dict(prefetch=1), {}),
    "`fsdp.bucket=layer`": (dict(bucket="layer"), {}),
    "`loss.table_first=True`": (dict(table_first=True), {}),
    "`data_parallel.policy=zero2`": (dict(policy="zero2"), {}),
    "`pipeline.residuals_on=host`": (dict(residuals_on="host"), {}),
    '`pipeline.residuals_on="input ffn"`': (dict(remat="norm swiglu", residuals_on="input ffn"), {}),
    "`optimizer.states_on=host`": (dict(states_on="host"), {}),
    "mixture, `pipeline.remat=layer`": (dict(remat="layer"), MIXTURE),
    "mixture, `pipeline.schedule=zero_bubble`": (dict(schedule="zero_bubble"), MIXTURE),
    "mixture, `pipeline.residuals_on=host`": (dict(residuals_on="host"), MIXTURE),
    "mixture, `optimizer.states_on=host`": (dict(states_on="host"), MIXTURE),
}
# Without clipping, which reads the norm: its squares are added in another order.
SAME_BITS_BUT_NORM = {"`pipeline.grads_on=host`, `optimizer.clip_norm=0`": (dict(grads_on="host"), dict(clip_norm=0.0))}
# By test_host_memory.py, without fused multiply-adds: as written a program in bfloat16 has more functions than XLA for
# CPU has room for.
SAME_BITS_IN_BFLOAT16 = ("bfloat16, `optimizer.masters_on=host`",)
OTHER_ORDER = {
    "`data_parallel.policy=lean`": (dict(policy="lean"), {}),  # over microbatches before ranks
    "`data_parallel.policy=zero1`": (dict(policy="zero1"), {}),
    "`data_parallel.policy=ddp`": (dict(policy="ddp"), {}),  # of the norm, too: of whole gradients on each device
    "`pipeline.schedule=gpipe`": (dict(schedule="gpipe"), {}),  # of the embedding's and head's gradients
    "`pipeline.grads_on=host`": (dict(grads_on="host"), {}),  # of the norm, by layers; else SAME_BITS_BUT_NORM
    "`pipeline.schedule=interleaved`": (dict(schedule="interleaved", virtual=2), {}),  # of the norm, by ranks
    "`loss.chunk_tokens=16`": (dict(chunk_tokens=16), {}),  # of the loss
    "Muon, `optimizer.states_on=host`": (dict(states_on="host"), dict(name="muon")),  # of products of a matrix's pieces
}
# Of losses and of parameters, over a parameter's largest: three roundings of float32.
ALLOWED = 2e-7
# Of norms, for which a device adds the squares of its pieces one after another, up to 2048 of each. The rounding of
# such a sum makes these norms 8e-8 (root mean square of 12 batches) from those in float64. So two differ by sqrt(2)
# of that, and the most of ten steps by three times as much, 3.4e-7. With "ddp", whose pieces are twice as large, it is
# sqrt(2) of that, 4.8e-7.
ALLOWED_OF_NORM = 5e-7


def ten_steps(name="adamw", states_on="device", clip_norm=1.0, **changes):
    """(losses, norms of gradients, parameters after them)."""
    model = build((2, 2, 1), **NONE | changes)
    model = model.replace(optimizer=dataclasses.replace(model.settings.optimizer, states_on=states_on))
    config = optimizer_config(name=name, warmup_steps=1, eps=1e-3, clip_norm=clip_norm)
    tx = make_optimizer(config, STEPS, model.plan.rows)
    step = TrainStep(model, tx, seed=0)
    batches = [jax.device_put(make_batch(32, seed=seed), model.batch_sharding) for seed in range(STEPS)]
    state = step.init()
    # Compiled ahead: a cache of such programs, whose operations are functions of their own, needs too many mappings.
    jitted = jax.jit(step.train_step, donate_argnums=0, out_shardings=(step.shardings, None))
    compiled = jitted.lower(state, batches[0]).compile(compiler_options=AS_WRITTEN)
    measured = []
    for batch in batches:
        state, metrics = compiled(state, batch)
        measured.append([metrics["loss"], metrics["grad_norm"]])
    return *np.asarray(measured).T, jax.tree.map(np.asarray, state.params)


@functools.cache
def with_none(**base):
    return ten_steps(**base)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_BITS)
def test_ten_steps_have_the_same_bits(name):
    option, base = SAME_BITS[name]
    jax.tree.map(np.testing.assert_array_equal, ten_steps(**base | option), with_none(**base))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_BITS_BUT_NORM)
def test_ten_steps_have_the_same_bits_but_for_the_norm(name):
    option, base = SAME_BITS_BUT_NORM[name]
    (losses, norms, params), expected = ten_steps(**base | option), with_none(**base)
    jax.tree.map(np.testing.assert_array_equal, (losses, params), (expected[0], expected[2]))
    np.testing.assert_allclose(norms, expected[1], rtol=ALLOWED_OF_NORM)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_ORDER)
def test_ten_steps_differ_by_the_order_of_sums(name):
    option, base = OTHER_ORDER[name]
    (losses, norms, params), expected = ten_steps(**base | option), with_none(**base)
    np.testing.assert_allclose(losses, expected[0], rtol=ALLOWED)
    np.testing.assert_allclose(norms, expected[1], rtol=ALLOWED_OF_NORM)
    for actual, other in zip(*map(jax.tree.leaves, (params, expected[2])), strict=True):
        assert np.abs(actual - other).max() <= ALLOWED * np.abs(other).max()


def test_the_page_says_which_is_which():
    text = (ROOT / "docs/measured/memory.md").read_text()
    rows = re.findall(r"^\| ((?:\w+, )?`.+?`) \| (same|[\de-]+) \|", text, re.MULTILINE)
    same = dict.fromkeys([*SAME_BITS, *SAME_BITS_BUT_NORM, *SAME_BITS_IN_BFLOAT16], "same")
    assert dict(rows) == same | dict.fromkeys(OTHER_ORDER, f"{ALLOWED:.0e}")
    assert f"norms of gradients to differ by {ALLOWED_OF_NORM:.0e}" in " ".join(text.split())
