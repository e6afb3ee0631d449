"""Initial values are those that XLA draws, distributed as the settings say."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import build
from test_runs import BACK

from parallax.model.initial_values import BLOCK, Undrawable, drawn_by_numpy
from parallax.sharding.layout import named_leaves

NORMS = dict(norm_scale="one_plus", norm_bias=True, qk_norm=True)
EXPERTS = dict(layers_of="dense moe*3", experts=4, experts_per_token=2, d_expert=16, shared_experts=1, shared_gate=True)
PADDED = dict(vocab=61, vocab_multiple=64, tied=False)
OF_KINDS = "near=(sliding_window=4, heads=4) far=(d_head=16, d_ff=96)"
CONFIGS = {
    "mla": dict(layers=4, attention="mla", d_latent_q=16, router_shift=True) | PADDED | EXPERTS,
    "gqa": dict(layers=8, attention="gqa", qkv_bias=True, out_bias=True) | NORMS,
    "zeros": dict(layers=8, attention="gqa", sinks=True, qk_norm=True, qk_norm_scale="one_plus", init_out="zeros"),
    "kinds": dict(layers=4, attention="gqa", layers_of="(near far)*2", kinds=OF_KINDS),
}


def deviation_of(path, dims, row, config):
    """The standard deviation of a parameter's initial values; 0 if all are the same."""
    if row.spec.role == "table":
        return 0.02
    is_back = path.endswith(BACK)
    if row.spec.role != "weight" or (is_back and config.init_out == "zeros"):
        return 0
    fan_in = math.prod(dims[dim] for dim in row.spec.inputs)
    return (fan_in * (2 * config.layers if is_back else 1)) ** -0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_distributed_as_the_settings_say(name):
    model = build((1, 1, 1), **CONFIGS[name])
    values_of, rows = (named_leaves(tree) for tree in (model.init(0), model.plan.rows))
    for path, values in jax.tree.map(np.asarray, values_of).items():
        row, entries = rows[path], model.config.vocab if path.endswith("table") else None
        deviation = deviation_of(path, dict(zip(row.at_rest.names, values.shape, strict=True)), row, model.config)
        if deviation:
            error = 5 * values[:entries].size ** -0.5  # five standard errors of the mean, seven of the deviation
            assert values[:entries].std() == pytest.approx(deviation, rel=error), path
            assert values[:entries].mean() == pytest.approx(0, abs=error * deviation), path
            assert entries is None or not values[entries:].any()
        else:
            scale = "qk_norm_scale" if path.endswith(("q_norm/scale", "k_norm/scale")) else "norm_scale"
            expected = row.spec.role == "norm" and getattr(model.config, scale) == "direct"
            np.testing.assert_array_equal(values, float(expected), err_msg=path)


ADAPTED = dict(layers=4, attention="gqa", lora_rank=4)
DRAWS = {"int8 base": ADAPTED | {"lora_base": "int8"}, "float8 base": ADAPTED | {"lora_base": "float8"}} | CONFIGS


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", DRAWS)
def test_values_are_bitwise_those_of_the_compiled_draw(name):
    assert_drawn_as_compiled(build((1, 1, 1), **DRAWS[name]))


def test_values_of_another_generator_are_those_of_the_compiled_draw():
    with jax.default_prng_impl("rbg"):
        assert_drawn_as_compiled(build((1, 1, 1)))


def test_values_are_the_same_where_jit_is_off():
    model = build((1, 1, 1))
    expected = model.init(3)
    with jax.disable_jit():
        jax.tree.map(np.testing.assert_array_equal, model.init(3), expected)


def assert_drawn_as_compiled(model):
    def declare(key):
        return jax.tree.map(lambda x, like: x.astype(like.dtype), nn.meta.unbox(model.parts.declare(key)), model.shapes)

    values, expected = (jax.tree.map(np.asarray, draw) for draw in (model.init(3), jax.jit(declare)(jax.random.key(3))))
    assert jax.tree.map(lambda x: x.dtype, values) == jax.tree.map(lambda x: x.dtype, expected)
    jax.tree.map(np.testing.assert_array_equal, values, expected)


def test_after_the_first_model_no_draw_compiles_anything(request):
    build((1, 1, 1)).init(0)
    model = build((1, 1, 1), **CONFIGS["kinds"])
    request.getfixturevalue("compiles_nothing")
    model.init(1)


def normals(key, shape=(3, BLOCK // 2 + 1)):
    """More than a block, by rows of which none ends where a block does."""
    return jax.random.normal(key, shape)


def run_by_numpy(draw, key):
    return drawn_by_numpy(jax.make_jaxpr(draw)(key), key)


def test_numbers_and_normals_are_those_of_jax():
    def draw(key):
        keys = jax.random.split(jax.random.fold_in(key, 2**32 - 1), (2, 3))
        bits = jax.random.bits(keys[1, 2], (BLOCK + 1,))
        thirds = jax.lax.shift_right_logical(jnp.arange(bits.size, dtype=jnp.uint32), jnp.uint32(13)).astype(jnp.int32)
        return bits, 0.1 * normals(keys[0, 1]), jax.lax.select_n(thirds, bits, bits >> 1, bits >> 2)

    key = jax.random.key(2**31)
    for values, expected in zip(run_by_numpy(draw, key), jax.jit(draw)(key), strict=True):
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.uniform(key, (8,), minval=-0.1, maxval=0.1),  # a sum of products is rounded once
        lambda key: normals(key) * normals(key),
        lambda key: jax.random.normal(key, (1,)) * 0.1,
        lambda key: jax.random.bits(key, (8,), jnp.uint8),
        lambda key: jax.random.normal(key, (8,), jnp.bfloat16),
        lambda key: jax.random.orthogonal(key, 4),
        lambda key: normals(key).astype(jnp.bfloat16) * 0.3,
        lambda key: (1000 * normals(key)).astype(jnp.int8),  # XLA takes the largest int8, NumPy the last eight bits
        lambda key: jax.lax.bitcast_convert_type(normals(key), jnp.uint8),
        lambda key: normals(key) * normals(key)[0, 0],
        lambda key: jnp.take(normals(key)[0], jnp.array([0, BLOCK])),
        lambda key: normals(jnp.broadcast_to(jax.random.split(key), (3, 2))[1, 1]),
    ],
)
def test_what_numpy_would_round_otherwise_is_left_to_xla(draw):
    with pytest.raises(Undrawable):
        run_by_numpy(draw, jax.random.key(0))


def test_numbers_of_another_generator_are_left_to_xla():
    with pytest.raises(Undrawable, match="another generator"):
        run_by_numpy(normals, jax.random.key(0, impl="rbg"))
