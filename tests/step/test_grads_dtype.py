"""Sums of gradients in bfloat16 or in host memory: what a NumPy reference rounds, on every mesh."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.low_precision_reference import ROUNDING, rounded
from support.tiny_model import build, make_batch, optimizer_config, params_of

from parallax.errors import ConfigError
from parallax.sharding.host import rests_on_host
from parallax.sharding.layout import named_leaves
from parallax.sharding.rounding import bits_in_layer, rounding_key

MICROBATCHES, SEED, STEP = 4, 3, 5
MODEL = dict(layers=4, attention="gqa", tied=False, microbatches=MICROBATCHES)
EXPERTS = dict(layers_of="moe*4", experts=4, experts_per_token=2, d_expert=16)
MESHES = {
    "one device": ((1, 1, 1), {}),
    "data": ((1, 4, 1), {}),
    "tensor": ((1, 1, 4), dict(policy="zero2")),
    "all": ((2, 2, 2), dict(schedule="one_f_one_b")),
    "split": ((4, 1, 2), dict(schedule="zero_bubble", remat="none")),
    "rounds": ((2, 2, 1), dict(schedule="interleaved", virtual=2, remat="stage")),
    "one pass": ((2, 1, 1), dict(schedule="dualpipe_v")),
    "context": ((1, 2, 1, 1, 2), dict(context="ring")),
    "experts": ((1, 2, 1, 1, 1, 2), EXPERTS),
}
# What a mesh adds in another order differs by a rounding of float32, 2**-24 of the largest summand. A sum as near as
# that to a boundary becomes the other one of its neighbours, which are 2**-7 of it apart. Most entries of a matrix are
# above 2**-10 of its largest one, so that less than 2**-5 of them should differ.
OTHERS = 2**-5


@functools.cache
def batch_with_all_labels():
    """Each microbatch has the same number of labels, so that its gradient alone is a multiple of its share by 4."""
    batch = make_batch(rows=16)
    return batch | {"labels": np.where(batch["labels"] < 0, 0, batch["labels"])}


@functools.cache
def shares(**kinds):
    """The gradient of each microbatch alone, by parameter, [M, layers, ...]."""
    model = build((1, 1, 1), **MODEL | kinds | {"microbatches": 1})
    run, parts = jax.jit(model.loss_and_grad), []
    for rows in np.split(np.arange(16), MICROBATCHES):
        grads = run(params_of(model), {name: x[rows] for name, x in batch_with_all_labels().items()})[1]
        parts.append(named_leaves(jax.tree.map(lambda x: np.asarray(x) / MICROBATCHES, grads)))
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


@functools.cache
def by_numpy(name, **kinds):
    """The sum of a parameter's gradient, rounded after each microbatch."""
    total = np.zeros_like(shares(**kinds)[name][0])
    for number, share in enumerate(shares(**kinds)[name]):
        key = jax.random.key(SEED, impl="threefry2x32")
        for part in (ROUNDING, STEP, number, np.uint32(zlib.crc32(f"gradients {name}".encode()))):
            key = jax.random.fold_in(key, part)
        bits = np.asarray(jax.random.bits(key, share.shape)).astype(np.int64)
        total = rounded((total + share).astype(np.float32), bits, ml_dtypes.bfloat16, 16).astype(np.float32)
    return total


def gradients(mesh, **changes):
    model = build(mesh, **MODEL | changes)
    found = jax.jit(model.loss_and_grad)(params_of(model), batch_with_all_labels(), jnp.int32([SEED, STEP]))[1]
    return model, named_leaves(found)


@pytest.mark.fast(2)
@pytest.mark.parametrize("case", MESHES)
def test_sums_in_bfloat16_are_those_of_numpy_on_every_mesh(case):
    mesh, changes = MESHES[case]
    model, grads = gradients(mesh, **changes, grads_dtype="bfloat16")
    kinds = EXPERTS if case == "experts" else {}
    narrow = {name for name, row in named_leaves(model.plan.rows).items() if row.grads == "bfloat16"}
    matrices = {name.removesuffix("/kernel").rpartition("/")[2] for name in narrow}
    assert matrices == {"q", "k", "v", "out", "gate", "up", "down"} and len(narrow) == 7
    for name, grad in grads.items():
        assert (grad.dtype == jnp.bfloat16) == (name in narrow)
        if name not in narrow:
            continue
        found, expected = np.asarray(grad).astype(np.float32), by_numpy(name, **kinds)
        assert (found != expected).mean() <= OTHERS
        # As far apart as roundings of all microbatches, each by at most the distance of neighbours.
        allowed = MICROBATCHES * 2.0**-7 * np.abs(shares(**kinds)[name]).sum(0)
        assert (np.abs(found - expected) <= allowed).all()


@pytest.mark.fast(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_in_host_memory_have_the_same_bits(dtype, monkeypatch):
    # What is in an unset slot is not known; nan shows whether something reads it.
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    case = dict(schedule="one_f_one_b", grads_dtype=dtype)
    model, there = gradients((2, 2, 1), **case, grads_on="host")
    _, here = gradients((2, 2, 1), **case)
    rows = named_leaves(model.plan.rows)
    for name, grad in there.items():
        assert rests_on_host(grad.sharding) == (rows[name].grads_on == "host")
        np.testing.assert_array_equal(np.asarray(grad), np.asarray(here[name]), err_msg=name)
    assert sum(rests_on_host(grad.sharding) for grad in there.values()) == 7


def test_bits_depend_on_seed_step_microbatch_parameter_layer_and_entry():
    layout, whole = build((1, 1, 1), **MODEL).plan.rows["blocks"]["mlp"]["up"]["kernel"].summed, (4, 32, 64)

    def bits(seed=0, step=0, microbatch=0, name="up", layer=0):
        key = jax.random.fold_in(rounding_key(jnp.int32([seed, step])), microbatch)
        return np.asarray(bits_in_layer(key, name, layout, whole, jnp.int32(layer), (32, 64)))

    others = [bits(**{name: value}) for name, value in dict(seed=1, step=1, microbatch=1, name="gate", layer=1).items()]
    assert len(np.unique(np.stack([bits(), *others]))) > 0.999 * 6 * 32 * 64


ERRORS = {
    "summands": (
        dict(mesh=(1, 2, 1), grads_dtype="bfloat16", policy="zero1"),
        "pipeline.grads_dtype='bfloat16' rounds sums of gradients, but with the policy 'zero1' of data_parallel.policy "
        "each of mesh.dp=2 ranks has a summand of blocks/attention/k/kernel, so the result would depend on the mesh; "
        "use 'zero3' or 'zero2' there, without mesh.replica, or grads_dtype='float32'.",
    ),
    "replicas": (
        dict(mesh=(1, 1, 1, 2), grads_dtype="bfloat16"),
        "pipeline.grads_dtype='bfloat16' rounds sums of gradients, but with the policy 'zero3' of data_parallel.policy "
        "each of mesh.replica=2 ranks has a summand of ",
    ),
    "an exception": (
        dict(mesh=(1, 2, 1), grads_dtype="bfloat16", exceptions="blocks/mlp=zero1"),
        "pipeline.grads_dtype='bfloat16' rounds sums of gradients, but with the policy 'zero1' of "
        "data_parallel.exceptions each ",
    ),
    "unknown": (dict(mesh=(1, 1, 1), grads_dtype="float8"), "pipeline.grads_dtype='float8' is unknown; "),
}


@pytest.mark.parametrize("name", ERRORS)
def test_sums_that_cannot_be_rounded_are_refused(name):
    changes, message = ERRORS[name]
    with pytest.raises(ConfigError) as error:
        build(**MODEL | changes)
    assert str(error.value).startswith(message)


def test_sums_of_nothing_are_refused():
    model = build((1, 1, 1), **MODEL)
    frozen = dict(optimizer=optimizer_config(frozen="blocks"))
    with pytest.raises(ConfigError, match="^pipeline.grads_on='host' has no effect: no matrix .* use 'device'"):
        model.replace(**frozen, pipeline=dataclasses.replace(model.pipeline, grads_on="host"))
