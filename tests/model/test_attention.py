"""Laws of attention: nothing sees what comes later or another document, and decoding with a cache changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.sharded_layers import ROWS, SEQ, SIZES, YARN, attention_layer, call, declared, windows
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, mesh_of, model_config

from parallax.model.attention import attend_to_cache
from parallax.model.context import Context
from parallax.model.families import FAMILIES
from parallax.model.mask import Mask
from parallax.model.rope import Rope
from parallax.sharding.collectives import as_varying, bound_axis_sizes
from parallax.sharding.layout import Layout

KINDS = {
    "mla": dict(attention="mla"),
    "mla_latent_queries": dict(attention="mla", d_latent_q=16),
    "mla_yarn_bias": dict(attention="mla", qkv_bias=True, **YARN),
    "gqa": dict(attention="gqa"),
    "mqa": dict(attention="gqa", kv_heads=1),
    "gqa_bias": dict(attention="gqa", qkv_bias=True),
    "gqa_qk_norm": dict(attention="gqa", qk_norm=True),
}


def build(name, residual=HIDDEN_CUT, family="column_row", kv="kv_heads/tp"):
    changes = dict(KINDS[name])
    return attention_layer(changes.pop("attention"), residual, FAMILIES[family], kv=kv, **changes)


@functools.cache
def subject(name):
    """(params, the layer as a compiled function of x, ids, positions and segments)."""
    rope = Rope(model_config(**KINDS[name]))
    _, params = declared(build(name), rope)
    return params, jax.jit(call(build(name), rope))


@pytest.mark.parametrize("name", KINDS)
def test_a_token_changes_nothing_before_it(name):
    params, run = subject(name)
    x, ids, positions, segments = windows()
    segments, positions = np.ones_like(segments), np.broadcast_to(np.arange(SEQ), positions.shape)
    before = run(params, x, ids, positions, segments)
    for changed in (1, SEQ - 1):
        other = x.copy()
        other[:, changed] += 1
        after = run(params, other, ids, positions, segments)
        np.testing.assert_array_equal(after[:, :changed], before[:, :changed])
        assert (np.abs(after[:, changed:] - before[:, changed:]).max((0, 2)) > 1e-4).all()


@pytest.mark.parametrize("name", KINDS)
def test_documents_in_one_window_do_not_see_each_other(name):
    params, run = subject(name)
    x, ids, *_ = windows()
    segments = np.repeat([[1] * 3 + [2] * 5], ROWS, 0).astype(np.int32)
    positions = np.repeat([[0, 1, 2, 0, 1, 2, 3, 4]], ROWS, 0)
    packed = run(params, x, ids, positions, segments)
    other = x.copy()
    other[:, :3] += 1
    np.testing.assert_array_equal(run(params, other, ids, positions, segments)[:, 3:], packed[:, 3:])
    alone = run(params, np.roll(x, -3, 1), ids, np.roll(positions, -3, 1), np.roll(segments, -3, 1))
    np.testing.assert_allclose(alone[:, :5], packed[:, 3:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_only_distances_count(name):
    params, run = subject(name)
    x, ids, positions, segments = windows()
    moved = run(params, x, ids, positions + 17, segments)
    np.testing.assert_allclose(moved, run(params, x, ids, positions, segments), rtol=1e-4, atol=1e-4)
    assert np.abs(run(params, x, ids, 2 * positions, segments) - moved).max() > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_rows_do_not_see_each_other(name):
    params, run = subject(name)
    arrays = windows()
    turned = run(params, *(array[::-1] for array in arrays))
    np.testing.assert_allclose(turned[::-1], run(params, *arrays), rtol=1e-5, atol=1e-5)


def test_a_cache_may_have_narrower_values_and_keys_in_two_parts():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, 3, width)), jnp.float32) for width in (6, 6, 4))
    mask = Mask(jnp.ones((2, 5), int), cursor=0)
    pairs = [(q[..., part], k[..., part].swapaxes(1, 2)) for part in (slice(0, 4), slice(4, 6))]
    narrow = attend_to_cache(pairs, v.swapaxes(1, 2), mask, scale=0.5)
    scores = 0.5 * jnp.einsum("BSHJ,BTHJ->BHST", q, k)
    weights = jax.nn.softmax(jnp.where(np.tri(5, dtype=bool), scores, -jnp.inf), axis=-1)
    np.testing.assert_allclose(narrow, jnp.einsum("BHST,BTHK->BSHK", weights, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_mla_caches_its_latent_and_one_rotated_key_and_gqa_its_heads(name):
    model, layouts = model_config(**KINDS[name]), build(name).cache_layouts()
    per_token = sum(
        np.prod([model.sizes[dim] for dim in Layout.parse(layout).names if dim not in ("batch", "kv_seq")])
        for layout in layouts.values()
    )
    if model.attention == "mla":
        assert per_token == model.d_latent + model.d_rope
        # The same latents serve all heads, so every tp rank holds them whole.
        assert all("tp" not in Layout.parse(layout).used_axes() for layout in layouts.values())
    else:
        assert per_token == 2 * model.kv_heads * model.d_head


def decode_all(layer, rope, prefill):
    """`call`, but by way of the cache: `prefill` tokens at once, then one after another; one document a row."""

    def function(params, x, ids, positions, segments):
        sizes = SIZES | layer.sizes | {"batch": ROWS, "kv_seq": SEQ}
        shape = lambda layout: Layout.parse(layout).local_shape(sizes, bound_axis_sizes())  # noqa: E731
        cache = {name: as_varying(jnp.zeros(shape(layout))) for name, layout in layer.cache_layouts().items()}
        starts, outputs = [0, *range(prefill, SEQ)], []
        for start, stop in zip(starts, [*starts[1:], SEQ]):
            mask, rows = Mask(jnp.ones((len(ids), SEQ), int), cursor=start), jnp.arange(len(ids))
            context = Context(rope.tables(positions[:, start:stop]), rows, None, mask)
            method = type(layer).decode
            y, cache = layer.apply({"params": params}, x[:, start:stop], context, cache, method=method)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1)

    return function


def one_document():
    x, ids, positions, segments = windows()
    return x, ids, np.broadcast_to(np.arange(SEQ), positions.shape), np.ones_like(segments)


@pytest.mark.fast(4)
@pytest.mark.parametrize("prefill", [1, 5])
@pytest.mark.parametrize("name", KINDS)
def test_decoding_with_a_cache_equals_the_call(name, prefill):
    params, run = subject(name)
    expected = run(params, *one_document())
    decoded = jax.jit(decode_all(build(name), Rope(model_config(**KINDS[name])), prefill))(params, *one_document())
    np.testing.assert_allclose(decoded, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.fast(3)
@pytest.mark.parametrize("family", ["column_row", "scatter"])
@pytest.mark.parametrize("name", KINDS)
def test_decoding_with_a_cache_equals_the_call_on_a_mesh(name, family):
    check_decode(name, family, (2, 2, 2), HIDDEN_CUT, prefill=5)


@pytest.mark.parametrize("family", ["column_row", "scatter"])
def test_decoding_with_the_residual_cut_over_seq(family):
    """New tokens come in numbers that divide over tp: here all at once."""
    check_decode("mla", family, (1, 2, 2), SEQ_CUT, prefill=SEQ)


@pytest.mark.parametrize("family", ["column_row", "scatter"])
def test_decoding_on_more_ranks_than_key_heads(family):
    check_decode("gqa", family, (1, 1, 8), HIDDEN_CUT, prefill=5, kv="kv_heads")


def check_decode(name, family, mesh, residual, *, prefill, kv=None):
    params, run = subject(name)
    kv = kv or ("kv_heads" if name == "mqa" else "kv_heads/tp")
    layer, rope = build(name, residual, family, kv), Rope(model_config(**KINDS[name]))
    layouts, _ = declared(layer, rope)
    specs = jax.tree.map(Layout.spec, layouts, is_leaf=lambda leaf: isinstance(leaf, Layout))
    cut = Layout.parse(residual).spec()
    varying = lambda params, *arrays: decode_all(layer, rope, prefill)(jax.tree.map(as_varying, params), *arrays)  # noqa: E731
    over_pp = lambda *args: jax.lax.pmean(varying(*args), "pp")  # noqa: E731
    in_specs = (specs, cut, P("dp"), P("dp"), P("dp"))
    decode = jax.shard_map(over_pp, mesh=mesh_of(*mesh), in_specs=in_specs, out_specs=cut, check_vma=True)
    expected = run(params, *one_document())
    np.testing.assert_allclose(jax.jit(decode)(params, *one_document()), expected, rtol=1e-4, atol=1e-4)
