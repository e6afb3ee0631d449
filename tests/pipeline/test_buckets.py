"""Matrices of a layer that are sent in one message: fewer calls, and bitwise what each is alone."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.step_collectives import step_collectives
from support.tiny_model import AS_WRITTEN, build, make_batch, mesh_of, params_of

from parallax.sharding.bucket import Packed
from parallax.sharding.collectives import all_gather, as_varying
from parallax.sharding.rounding import rounding_key

GQA = dict(attention="gqa", layers=2, microbatches=2)
MIXTURE = dict(layers_of="moe*2", experts=4, experts_per_token=2, d_expert=16, shared_experts=1)
ON_MESHES = {
    "tp": ((1, 2, 2), GQA),
    "latent": ((1, 4, 2), dict(layers=2, attention="mla", d_latent_q=16, reduce="compute", dtype="bfloat16")),
    "int8": ((1, 2, 2), GQA | dict(gather_dtype="int8", dtype="bfloat16")),
    "int8 products": ((1, 2, 2), GQA | dict(matmul="int8", dtype="bfloat16")),
    "replicas, context ranks": ((1, 2, 1, 2, 2), GQA | dict(gather_dtype="float8")),
    "rounded sums": ((1, 2, 2), GQA | dict(grads_dtype="bfloat16")),
    "experts": ((1, 2, 1, 1, 1, 2), GQA | MIXTURE | dict(reduce="compute", dtype="bfloat16")),
    "weights whole for a step": ((2, 2, 2), GQA | dict(policy="zero2", schedule="one_f_one_b")),
    "gradients whole for a step": ((1, 8, 1), GQA | dict(policy="lean")),
}

FAST, SLOW = ("int8", "replicas, context ranks"), pytest.mark.slow


def calls_of(mesh, changes, unit):
    """Messages of a layer, by kind, direction and scope: those of the step over its layers and microbatches."""
    model = build(mesh, **changes, bucket=unit)
    kinds, found = ("all-gather", "reduce-scatter", "all-to-all"), Counter()
    for call in step_collectives(model, 64, 16):
        if "dp" in call.axes and "pp" not in call.axes and call.kind in kinds and call.module != "embedding":
            found[call.kind, call.direction, call.module, call.axes] += call.count / 4
    return found


def test_a_layer_sends_one_message_a_pass_and_a_module_one_of_its_own():
    for unit, scopes in (("layer", ["layer"]), ("module", ["attention", "mlp"])):
        passes = [("all-gather", "forward"), ("all-gather", "recompute"), ("reduce-scatter", "backward")]
        expected = {(*each, scope, ("dp",)): 1 for each in passes for scope in scopes}
        assert calls_of(*ON_MESHES["int8"], unit) == expected


def test_what_moves_over_other_axes_has_a_message_of_its_own():
    """Experts, which ep divides, move over dp alone; a router and what every token goes to move with the rest."""
    found = calls_of(*ON_MESHES["experts"], "layer")
    gathers = {(module, axes): count for (kind, way, module, axes), count in found.items() if way == "forward"}
    assert gathers == {("layer", ("dp", "ep")): 1, ("mlp/experts", ("dp",)): 1}
    assert sum(found.values()) == 6


def test_what_moves_once_a_step_is_sent_by_parameter():
    found = calls_of((1, 2, 2), GQA | dict(policy="zero2"), "layer")
    assert found["reduce-scatter", "backward", "layer", ("dp",)] == 1
    assert {module for (kind, _, module, _) in found if kind == "all-gather"} == {
        *(f"attention/{name}" for name in ("q", "k", "v", "out")),
        *(f"mlp/{name}" for name in ("gate", "up", "down")),
    }


def used_and_added(mesh, changes, unit):
    """A layer's weights as it computes with them, and what gradients of its shape, other ones on each rank, add."""
    model = build(mesh, **changes, bucket=unit)
    plan, params = model.plan, params_of(model)

    def local(params):
        blocks = plan.load(jax.tree.map(as_varying, params))["blocks"]
        used = plan.use(jax.tree.map(lambda x: x[0], blocks), "blocks")
        rank = sum(lax.axis_index(axis) * 7**at for at, axis in enumerate(model.axis_sizes))
        grads = jax.tree.map(lambda x: jnp.sin(1e3 * x.astype(jnp.float32) + rank).astype(x.dtype), used)
        totals = plan.zero_grads("blocks", blocks)
        key = as_varying(rounding_key(jnp.zeros(2, jnp.int32)))
        added = plan.add_up("blocks", totals, jnp.int32(1), grads, layer=jnp.int32(1), key=key)
        return jax.tree.map(lambda x: as_varying(x)[None], (used, added))

    specs = jax.tree.map(lambda sharding: sharding.spec, model.shardings)
    run = jax.shard_map(local, mesh=model.mesh, in_specs=(specs,), out_specs=P(model.mesh.axis_names), check_vma=True)
    return jax.tree.map(np.asarray, jax.jit(run)(params))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else SLOW) for name in ON_MESHES])
def test_weights_and_sums_of_gradients_are_bitwise_those_of_messages_by_parameter(name):
    alone = used_and_added(*ON_MESHES[name], "parameter")
    jax.tree.map(np.testing.assert_array_equal, used_and_added(*ON_MESHES[name], "layer"), alone)


def test_a_bucket_is_gathered_in_two_steps_too():
    patterns = ["seq/dp d_ff -> seq d_ff", "heads d_ff/dp -> heads d_ff"]

    def both(x, y):
        packed = Packed.of(patterns, [x, y])
        together = packed.apart(all_gather(packed.pattern, packed.array, first=lambda axes: 2))
        return jax.tree.map(lambda leaf: leaf[None], (together, [*map(all_gather, patterns, [x, y])]))

    specs = P("dp"), P(None, "dp")
    run = jax.shard_map(both, mesh=mesh_of(1, 8, 1), in_specs=specs, out_specs=P("dp"), check_vma=True)
    together, alone = jax.jit(run)(jnp.arange(48.0).reshape(16, 3), jnp.arange(96.0).reshape(4, 24))
    jax.tree.map(np.testing.assert_array_equal, together, alone)


STEPS = {
    "all axes": ((2, 2, 2), dict(attention="gqa", schedule="one_f_one_b")),
    "uneven stages": ((2, 2, 1), dict(layers=5, attention="mla", schedule="zero_bubble", remat="none")),
    "gathered ahead": ((1, 2, 2), dict(attention="gqa", prefetch=1, gather_dtype="int8", reduce="compute")),
    "replicas": ((1, 2, 2, 2), dict(attention="mla", policy="zero2", remat="stage")),
    "experts": ((2, 2, 1, 1, 1, 2), MIXTURE | dict(layers_of="(dense moe)*4", schedule="one_f_one_b")),
    "rounds": ((2, 2, 2), dict(attention="gqa", schedule="interleaved", virtual=2, grads_dtype="bfloat16")),
}


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["module", "layer"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_bitwise_that_of_messages_by_parameter(name, unit):
    (mesh, changes), found = STEPS[name], []
    for each in ("parameter", unit):
        model = build(mesh, **changes, bucket=each)
        step = jax.jit(model.loss_and_grad, compiler_options=AS_WRITTEN)
        found.append(jax.tree.map(np.asarray, step(params_of(model), make_batch())))
    jax.tree.map(np.testing.assert_array_equal, *found)
