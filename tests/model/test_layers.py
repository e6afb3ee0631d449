"""Each layer alone computes what a few lines of NumPy at float64 compute."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from support import numpy_layers
from support.sharded_layers import ROWS, SEQ, SIZES, YARN, attention_layer, call, declared, residual_layers, windows
from support.tiny_model import HIDDEN_CUT, build, model_config
from support.traced_equations import equations

from parallax.analysis.planned.moves import SentPerUse
from parallax.errors import ConfigError
from parallax.model.families import FAMILIES
from parallax.model.mask import Mask
from parallax.model.mlp import ACTIVATIONS, Activation
from parallax.model.rope import Rope, rotate
from parallax.sharding.layout import named_leaves
from parallax.sharding.parameter import parameter

EPS = 1e-6
# float32 against float64: outputs of size 1 to 100, sums of up to 64 terms.
CLOSE = dict(rtol=2e-5, atol=2e-5)


def layer(name):
    return residual_layers(HIDDEN_CUT, FAMILIES["column_row"])[name]


def compiled(layer, rope):
    """One program: operation by operation, most of the time goes into compiling them."""
    return jax.jit(call(layer, rope))


def double(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def test_norm_divides_by_the_root_of_the_mean_square():
    x, *rest = windows()
    _, params = declared(layer("norm"), None)
    expected = numpy_layers.rms_norm(double(x), double(params["scale"]), EPS)
    np.testing.assert_allclose(compiled(layer("norm"), None)(params, x, *rest), expected, **CLOSE)


def test_forms_of_norms_are_what_their_names_say():
    x, *rest = windows()
    results = {}
    for name in ("norm_one_plus", "layer_norm", "layer_norm_alone"):
        _, params = declared(layer(name), None)
        results[name] = double(compiled(layer(name), None)(params, x, *rest)), double(params)
    y, params = results["norm_one_plus"]
    np.testing.assert_allclose(y, numpy_layers.rms_norm(x, 1 + params["scale"], EPS) + params["bias"], **CLOSE)
    y, params = results["layer_norm"]
    np.testing.assert_allclose(y, numpy_layers.layer_norm(x, params["scale"], params["bias"], EPS), **CLOSE)
    y, params = results["layer_norm_alone"]
    np.testing.assert_allclose(y, numpy_layers.layer_norm(x, 1.0, 0.0, EPS), **CLOSE)
    assert params == {}


def test_norm_computes_in_float32_and_returns_what_it_got():
    _, params = declared(layer("norm"), None)
    x = np.full((1, 1, SIZES["d_model"]), 3e3, np.float32)
    y = layer("norm").apply({"params": params}, jnp.asarray(x, jnp.float16))  # squares overflow float16
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y, numpy_layers.rms_norm(double(x), double(params["scale"]), EPS), rtol=1e-3, atol=1e-3)


def test_a_parameter_of_another_shape_is_refused_with_both():
    x, *_ = windows()
    _, params = declared(layer("norm"), None)
    with pytest.raises(ScopeParamShapeError, match=rf'"scale".*\({SIZES["d_model"]},\).*\(3,\)'):
        layer("norm").apply({"params": {"scale": params["scale"][:3]}}, x)


def test_the_gated_mlp_is_swiglu():
    x, *rest = windows()
    _, params = declared(layer("mlp"), None)
    kernels = [double(params[name]["kernel"]) for name in ("gate", "up", "down")]
    expected = numpy_layers.swiglu(double(x), *kernels)
    np.testing.assert_allclose(compiled(layer("mlp"), None)(params, x, *rest), expected, rtol=2e-5, atol=2e-4)


def test_a_clamped_mlp_is_that_of_its_equation():
    x, *rest = windows()
    _, params = declared(layer("mlp_clamped"), None)
    gate, up, down = (double(params[name]) for name in ("gate", "up", "down"))
    wide_gate, wide_up = (double(x) @ each["kernel"] + each["bias"] for each in (gate, up))
    assert min(wide_gate.min(), wide_up.min()) < -1.5 and min(wide_gate.max(), wide_up.max()) > 1.5
    wide_gate, wide_up = np.minimum(wide_gate, 1.5), np.clip(wide_up, -1.5, 1.5)
    expected = (wide_up + 1) * wide_gate / (1 + np.exp(-1.702 * wide_gate)) @ down["kernel"] + down["bias"]
    np.testing.assert_allclose(compiled(layer("mlp_clamped"), None)(params, x, *rest), expected, rtol=2e-5, atol=2e-4)


def test_a_plain_mlp_is_two_products_and_what_is_between_them():
    x, *rest = windows()
    _, params = declared(layer("mlp_plain"), None)
    up, down = (double(params[name]) for name in ("up", "down"))
    hidden = np.maximum(double(x) @ up["kernel"] + up["bias"], 0) ** 2
    expected = hidden @ down["kernel"] + down["bias"]
    np.testing.assert_allclose(compiled(layer("mlp_plain"), None)(params, x, *rest), expected, rtol=2e-5, atol=2e-4)


def test_activations_are_those_of_their_papers():
    x = np.linspace(-5, 5, 101)
    erf = np.array([math.erf(value / math.sqrt(2)) for value in x])
    inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    expected = {"silu": numpy_layers.silu(x), "gelu": x * (1 + erf) / 2, "gelu_tanh": x * (1 + inner) / 2}
    expected["relu2"] = np.where(x > 0, x**2, 0)
    assert expected.keys() == ACTIVATIONS.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(ACTIVATIONS[name](jnp.float32(x)), values, **CLOSE)


def test_clamped_gates_and_what_they_are_times_end_at_the_limit():
    """Their derivatives, too, are those of what is between both ends, and 0 outside."""
    gate, up = (grid.ravel() for grid in np.meshgrid(np.linspace(-5, 5, 24), np.linspace(-5, 5, 26)))
    near_gate, near_up = np.minimum(gate, 2.0), np.clip(up, -2.0, 2.0)
    sigmoid = 1 / (1 + np.exp(-1.702 * near_gate))
    clamped, args = Activation("clamped", 2.0), (jnp.float32(gate), jnp.float32(up))
    np.testing.assert_allclose(clamped(*args), (near_up + 1) * near_gate * sigmoid, **CLOSE)
    slope = sigmoid * (1 + 1.702 * near_gate * (1 - sigmoid))
    expected = (near_up + 1) * slope * (gate < 2), near_gate * sigmoid * (abs(up) < 2)
    grads = jax.grad(lambda *args: clamped(*args).sum(), (0, 1))(*args)
    for grad, values in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, values, **CLOSE)


def rope(**changes):
    """Positions of heads of 8 dims."""
    width, keys = changes.pop("width", 8), dict(theta=100.0, original_seq=64) | changes
    return Rope(model_config(attention="gqa", d_head=width, **{f"rope_{key}": value for key, value in keys.items()}))


def test_rope_turns_pairs_by_position_times_frequency():
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 5, 3, 8)).astype(np.float32), rng.integers(0, 50, (2, 5))
    expected = numpy_layers.rotated(x, positions, numpy_layers.frequencies(8, 100.0))
    np.testing.assert_allclose(rotate(x, rope().tables(jnp.asarray(positions))), expected, **CLOSE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_halves_change_places_in_a_product_as_they_do_on_gpus(dtype, monkeypatch):
    """To the last bit, gradients too; in a product of operands of the model's dtype."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(2, 5, 3, 8)), dtype) for _ in range(2))
    tables = rope().tables(jnp.arange(10).reshape(2, 5))

    def traced():
        """The dtypes of products, and the value with the gradient."""

        def pulled(x, dy):
            y, pull = jax.vjp(lambda x: rotate(x, tables), x)
            return y, *pull(dy)

        products = [e for e in equations(pulled, x, dy) if e.primitive.name == "dot_general"]
        return {var.aval.dtype.name for e in products for var in e.invars}, pulled(x, dy)

    dtypes, by_product = traced()
    assert dtypes == {dtype}
    monkeypatch.setattr("parallax.model.rope.swaps_in_place", lambda: True)
    dtypes, in_place = traced()
    assert dtypes == set()
    for actual, expected in zip(in_place, by_product, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_longrope_divides_each_frequency_by_its_factor_for_the_length_of_the_row():
    factors = dict(short_factors="1.0 1.5 2.0 2.5", long_factors="2.0 3.0 4.0 5.0")
    scaled = rope(scaling="longrope", original_seq=8, magnitude=1.5, **factors)
    places, plain = jnp.broadcast_to(jnp.arange(9.0), (3, 9)), numpy_layers.frequencies(8, 100.0)
    short, long = (plain / np.array(text.split(), float) for text in factors.values())
    cosines, _ = scaled.tables(places, 9, jnp.array([0, 1, 5]))  # of 9, 8 and 4 tokens
    for row, expected in zip(cosines, (long, short, short)):
        np.testing.assert_allclose(row, 1.5 * np.cos(np.arange(9)[:, None] * expected), **CLOSE)
    for changes, message in (
        (dict(scaling="none", **factors), "rope_short_factors='1.0 1.5 2.0 2.5' does nothing with .*'none'"),
        (dict(scaling="longrope", short_factors="1 2 3", long_factors="1 1 1 1"), "is not 4 numbers .* of the 8 rot"),
        (dict(scaling="longrope", factor=4.0, **factors), "rope_factor=4.0 does nothing with .*'longrope'"),
    ):
        with pytest.raises(ConfigError, match=message):
            rope(**changes)


def test_linear_scaling_divides_positions():
    scaled, plain = rope(scaling="linear", factor=4.0), rope()
    np.testing.assert_allclose(scaled.tables(jnp.array([[20]])), plain.tables(jnp.array([[5]])), **CLOSE)
    assert scaled.temperature() == 1.0


@pytest.mark.parametrize(
    ("width", "theta", "original_seq"), [(8, 100.0, 64), (64, 10_000.0, 4096), (128, 500_000.0, 8192)]
)
def test_yarn_keeps_what_turns_fast_and_stretches_what_turns_slowly(width, theta, original_seq):
    scaled = rope(width=width, theta=theta, scaling="yarn", factor=8.0, original_seq=original_seq)
    actual, plain = scaled.frequencies(), numpy_layers.frequencies(width, theta)
    np.testing.assert_allclose(actual, numpy_layers.yarn_frequencies(width, theta, 8.0, original_seq), rtol=1e-12)
    # The law of the paper's section 3.2: turns in the original context, more than 32 or less than 1. The ramp ends at
    # whole dims around these, so the dims next to them are not held to it.
    turns = original_seq * plain / (2 * np.pi)
    ratio = np.exp(np.log(plain[0] / plain[1]))
    np.testing.assert_allclose(actual[turns > 32 * ratio], plain[turns > 32 * ratio], rtol=1e-12)
    np.testing.assert_allclose(actual[turns < 1 / ratio], plain[turns < 1 / ratio] / 8, rtol=1e-12)
    assert (np.diff(actual / plain) <= 1e-12).all()


def test_yarn_sharpens_attention_by_the_papers_temperature():
    # Section 3.3: sqrt(1/t) = 0.1 ln(s) + 1 on both queries and keys.
    np.testing.assert_allclose(rope(scaling="yarn", factor=np.e).temperature(), 1.1**2)
    assert rope(scaling="yarn", factor=1.0).temperature() == 1.0


@pytest.mark.parametrize(
    ("width", "theta", "original_seq"), [(8, 100.0, 64), (64, 10_000.0, 4096), (128, 500_000.0, 8192)]
)
def test_llama3_goes_from_kept_to_stretched_by_turns(width, theta, original_seq):
    settings = dict(width=width, theta=theta, original_seq=original_seq, factor=8.0, fast_turns=4.0)
    expected = numpy_layers.llama3_frequencies(width, theta, 8.0, original_seq, 1.0, 4.0)
    np.testing.assert_allclose(rope(scaling="llama3", **settings).frequencies(), expected, rtol=1e-12)
    assert rope(scaling="llama3", **settings).temperature() == 1.0


def test_a_temperature_that_is_given_is_taken_and_a_magnitude_multiplies_what_is_rotated():
    assert (
        rope(scaling="yarn", factor=4.0, temperature=1.25).temperature() == rope(temperature=1.25).temperature() == 1.25
    )
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    turned = [rotate(x, rope(magnitude=m).tables(jnp.arange(10).reshape(2, 5))) for m in (1.0, 1.5)]
    np.testing.assert_allclose(turned[1], 1.5 * turned[0], **CLOSE)


@pytest.mark.parametrize("width", [64, 128])
def test_queries_scaled_in_their_rotation_are_rounded_once(width):
    """In bfloat16; scaled afterwards they are rounded again, unless the factor is a power of two."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 4, width)), "bfloat16")
    tables, factor = rope(width=width).tables(jnp.arange(128).reshape(2, 64)), width**-0.5
    exact = factor * double(rotate(x.astype("float32"), tables))
    half_unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)  # of what lies between two numbers of bfloat16
    clear = np.abs(exact) > 0.01  # of smaller ones, differences of large terms, float32 has errors, too

    def largest_error(q):
        assert q.dtype == "bfloat16"
        return (np.abs(double(q) - exact) / half_unit)[clear].max()

    once, after = largest_error(rotate(x, tables, scale=factor)), largest_error(rotate(x, tables) * factor)
    assert once < 1.01
    assert after == once if width == 64 else after > 1.5


def test_scores_depend_on_the_distance_of_positions_alone():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(query, key):
        tables = lambda position: rope().tables(jnp.array([[position]]))  # noqa: E731
        return float(jnp.sum(rotate(q, tables(query)) * rotate(k, tables(key))))

    assert all(score(at + 7, at) == pytest.approx(score(7, 0), abs=1e-5) for at in (1, 10, 100))
    assert abs(score(8, 0) - score(7, 0)) > 1e-3


def test_every_head_gets_the_same_angles():
    head = np.random.default_rng(0).normal(size=(2, 5, 1, 8)).astype(np.float32)
    turned = rotate(jnp.repeat(head, 3, axis=2), rope().tables(jnp.arange(10).reshape(2, 5)))
    np.testing.assert_array_equal(turned[:, :, 0], turned[:, :, 2])


@pytest.mark.fast(5)
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize(
    "changes", [{}, YARN | {"qkv_bias": True}, {"qk_norm": True}], ids=["plain", "yarn and bias", "qk norm"]
)
def test_gqa_is_softmax_attention_of_groups(kv_heads, changes):
    model = model_config(attention="gqa", kv_heads=kv_heads, **changes)
    gqa = attention_layer("gqa", HIDDEN_CUT, FAMILIES["column_row"], kv_heads=kv_heads, **changes)
    _, params = declared(gqa, Rope(model))
    x, ids, positions, segments = windows()
    angles = Rope(model).frequencies()
    expected = numpy_layers.gqa(double(params), double(x), positions, segments, angles, Rope(model).temperature())
    np.testing.assert_allclose(
        compiled(gqa, Rope(model))(params, x, ids, positions, segments), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("d_latent_q", [0, 16])
@pytest.mark.parametrize("changes", [{}, YARN | {"qkv_bias": True}], ids=["plain", "yarn and bias"])
def test_mla_is_what_the_paper_writes_out(d_latent_q, changes):
    model = model_config(attention="mla", d_latent_q=d_latent_q, **changes)
    mla = attention_layer("mla", HIDDEN_CUT, FAMILIES["column_row"], d_latent_q=d_latent_q, **changes)
    _, params = declared(mla, Rope(model))
    x, ids, positions, segments = windows()
    temperature, angles = Rope(model).temperature(), Rope(model).frequencies()
    expected = numpy_layers.mla(double(params), double(x), positions, segments, angles, EPS, temperature)
    np.testing.assert_allclose(
        compiled(mla, Rope(model))(params, x, ids, positions, segments), expected, rtol=1e-4, atol=1e-4
    )


def test_the_mask_is_causal_inside_each_document():
    mask = np.asarray(Mask(jnp.array([[1, 1, 2, 2, 0]])).dense(5))[0, 0]
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("form", ["vocab_parallel", "all_to_all"])
def test_the_embedding_looks_up_rows(form):
    embedding = layer(f"embedding_{form}")
    _, params = declared(embedding, None)
    x, ids, *rest = windows()
    np.testing.assert_array_equal(jax.jit(compiled(embedding, None))(params, x, ids, *rest), params["table"][ids])


@pytest.mark.parametrize("form", ["vocab_parallel", "all_to_all"])
def test_the_head_makes_logits_of_normed_activations(form):
    head = layer(f"head_{form}")
    _, params = declared(head, None)
    x, *rest = windows()
    expected = numpy_layers.rms_norm(double(x), double(params["norm"]["scale"]), EPS) @ double(params["table"]).T
    np.testing.assert_allclose(compiled(head, None)(params, x, *rest), expected, **CLOSE)
    assert expected.shape == (ROWS, SEQ, SIZES["vocab"])


def test_branches_of_the_residual_add_up_to_its_size():
    """Kernels start with a standard deviation of fan_in ** -0.5, the last of a branch with less."""
    params = layer("mlp").init(jax.random.key(0), windows()[0])["params"]
    std = lambda name: float(params[name]["kernel"].value.std())  # noqa: E731
    assert std("gate") == pytest.approx(SIZES["d_model"] ** -0.5, rel=0.1)
    assert std("down") == pytest.approx(0.5 * SIZES["d_ff"] ** -0.5, rel=0.1)


OF_LEAF = {"kernel": "weight", "gate": "weight", "up": "weight", "down": "weight", "scale": "norm", "bias": "bias"}
OF_LEAF |= {"table": "table", "amax": "maxima", "gate_amax": "maxima", "up_amax": "maxima", "down_amax": "maxima"}


@pytest.mark.parametrize("attention", ["mla", "gqa"])
def test_every_parameter_says_what_it_is(attention):
    kinds = dict(layers_of="dense*4 moe*4", experts=8, shared_experts=1, d_expert=8, matmul="int8")
    model = build((1, 1, 1), attention=attention, d_latent_q=8, qk_norm=attention == "gqa", qkv_bias=True, **kinds)
    specs = {name: row.spec for name, row in named_leaves(model.plan.rows).items()}
    for name, spec in specs.items():
        *modules, leaf = name.split("/")
        assert spec.role == ("counts" if modules[-1] == "router" and leaf == "bias" else OF_LEAF[leaf]), name
        assert spec.is_trained == (spec.role not in ("counts", "maxima"))
        assert spec.stack == ("/".join(modules[:2]) if modules[0] == "blocks" else ""), name
        of_mixture = next((word for word in ("router", "experts", "shared") if word in modules), "")
        of_layer = of_mixture or ("attention" if "/attention" in name else "mlp")
        assert spec.part == (of_layer if spec.stack else modules[0]), name
        assert bool(spec.inputs) == (spec.role == "weight")
        if spec.scales:
            assert specs["/".join((*modules, spec.scales))].role == "maxima", name
    assert {spec.part for spec in specs.values()} == {
        "embedding",
        "head",
        "attention",
        "mlp",
        "router",
        "experts",
        "shared",
    }
    assert sum(bool(spec.scales) for spec in specs.values()) == sum(spec.role == "maxima" for spec in specs.values())
    assert SentPerUse.of(model.plan).modules == {"attention", "attention_norm", "mlp", "mlp_norm"}


def test_a_parameter_of_an_unknown_role_is_refused():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self):
            return parameter(self, "w", "d_model", SIZES, nn.initializers.zeros, role="wieght")

    with pytest.raises(ConfigError, match="the role of w='wieght' is unknown; did you mean 'weight'"):
        Layer().init(jax.random.key(0))
