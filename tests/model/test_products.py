"""Products in 8 bits are those of operands that NumPy rounds, and what would overflow is clipped."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from parallax.config.sections import ModelConfig
from parallax.errors import ConfigError
from parallax.model.products import (
    EIGHT_BIT_PRODUCTS,
    MEASURED,
    ROUNDED,
    ProductInput,
    apart,
    latest_amax,
    rounded_kernels,
    scaled_product,
    unit_of,
    with_largest_weights,
)
from parallax.sharding.eight_bits import EIGHT_BIT_DTYPES, to_eight_bits

PATTERNS = {
    "batch seq d_model, d_model heads d_head -> batch seq heads d_head": ("bsd,dhk->bshk", (2, 3, 8), (8, 2, 4)),
    "batch seq heads d_head, heads d_head d_model -> batch seq d_model": ("bshk,hkd->bsd", (2, 3, 2, 4), (2, 4, 8)),
}
BACKWARD = {"bsd,dhk->bshk": ("bshk,dhk->bsd", "bsd,bshk->dhk"), "bshk,hkd->bsd": ("bsd,hkd->bshk", "bshk,bsd->hkd")}
# Of each form, the dtypes of operands and of the output's gradient.
DTYPES = {"int8": (np.int8, np.int8), "float8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
LARGEST = {np.int8: 127, ml_dtypes.float8_e4m3fn: 448, ml_dtypes.float8_e5m2: 57344}
# What an operand as large as its scale becomes.
FULL = {np.int8: 127, ml_dtypes.float8_e4m3fn: 256, ml_dtypes.float8_e5m2: 32768}
FORMS_OF_8_BITS = [*DTYPES]
SCALES = {"kernel": "amax", "amax": ""}  # of a Dense with 8-bit products


def rounded(x, amax, dtype):
    """What an operand counts as."""
    most, full = np.float32(LARGEST[dtype]), np.float32(FULL[dtype])
    unit = np.float32(amax) * (1 / full)
    scaled = np.clip(x * (1 / unit), -most, most)
    narrow = np.rint(scaled) if dtype == np.int8 else scaled
    return narrow.astype(dtype).astype(np.float64) * unit


def operands(pattern):
    letters, *shapes = PATTERNS[pattern]
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    dy = rng.normal(0, 1e-3, np.einsum(letters, x, w).shape).astype(np.float32)
    return letters, x, w, dy


def product_and_gradients(pattern, x, w, amax, dy, form, **how):
    y, pull = jax.vjp(lambda *args: scaled_product(pattern, *args, form=form, **how), x, w, amax)
    return y, *pull(dy)


@pytest.mark.parametrize("form", FORMS_OF_8_BITS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_product_and_its_gradients_are_those_of_rounded_operands(pattern, form):
    letters, x, w, dy = operands(pattern)
    amax = np.float32([2.0, 1.5, 2e-3])  # some entries are clipped
    operand, gradient = DTYPES[form]
    x_8bit, w_8bit, dy_8bit = (rounded(*each) for each in zip((x, w, dy), amax, (operand, operand, gradient)))
    of_x, of_w = BACKWARD[letters]
    y, dx, dw, found = product_and_gradients(pattern, x, w, jnp.asarray(amax), dy, form)
    np.testing.assert_allclose(y, np.einsum(letters, x_8bit, w_8bit), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum(of_x, dy_8bit, w_8bit), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(dw, np.einsum(of_w, x, dy), rtol=1e-5, atol=1e-8)  # of what was not rounded
    np.testing.assert_array_equal(found, [np.abs(array).max() for array in (x, w, dy)])


@pytest.mark.parametrize("form", FORMS_OF_8_BITS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_8_bit_residuals_the_weights_gradient_is_that_of_the_rounded_input_and_no_more_changes(pattern, form):
    letters, x, w, dy = operands(pattern)
    amax = np.float32([2.0, 1.5, 2e-3])
    plain = product_and_gradients(pattern, x, w, jnp.asarray(amax), dy, form)
    found = product_and_gradients(pattern, x, w, jnp.asarray(amax), dy, form, residuals="8bit")
    for at in (0, 1, 3):
        np.testing.assert_array_equal(found[at], plain[at])
    of_rounded = np.einsum(BACKWARD[letters][1], rounded(x, amax[0], DTYPES[form][0]), dy)
    np.testing.assert_allclose(found[2], of_rounded, rtol=1e-5, atol=1e-8)
    assert not np.allclose(found[2], plain[2], rtol=1e-3)


@pytest.mark.parametrize("form", FORMS_OF_8_BITS)
def test_of_an_input_8_bit_residuals_save_its_8_bits_once_for_several_products(form):
    pattern = next(iter(PATTERNS))
    _, x, w, _ = operands(pattern)

    def saved(residuals):
        def multiply(x, w):
            x = ProductInput.of(x, jnp.ones(3), form=form)
            return [scaled_product(pattern, x, w, jnp.ones(3), form=form, residuals=residuals) for _ in range(2)]

        _, pull = jax.vjp(multiply, jnp.asarray(x), jnp.asarray(w))
        return [leaf for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(pull)}.values() if leaf.shape == x.shape]

    assert [leaf.dtype.name for leaf in saved("compute")] == ["float32"]
    assert [leaf.dtype.name for leaf in saved("8bit")] == [EIGHT_BIT_DTYPES[form].name]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_measured_product_is_the_plain_one(pattern):
    letters, x, w, dy = operands(pattern)
    of_x, of_w = BACKWARD[letters]
    y, dx, dw, found = product_and_gradients(pattern, x, w, jnp.zeros(3), dy, MEASURED)
    np.testing.assert_allclose(y, np.einsum(letters, x, w), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, np.einsum(of_x, dy, w), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(dw, np.einsum(of_w, x, dy), rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(found, [np.abs(array).max() for array in (x, w, dy)])


@pytest.mark.parametrize("form", FORMS_OF_8_BITS)
def test_what_is_larger_than_its_scale_is_clipped(form):
    product = EIGHT_BIT_PRODUCTS[form]
    for kind in (product.operand, product.gradient):
        dtype = EIGHT_BIT_DTYPES[kind].type
        x = to_eight_bits(jnp.float32([1e30, -1e30, 1.0]), unit_of(jnp.float32(1.0), kind), kind).astype(jnp.float32)
        np.testing.assert_array_equal(x, [LARGEST[dtype], -LARGEST[dtype], FULL[dtype]])


@pytest.mark.parametrize("form", FORMS_OF_8_BITS)
def test_a_product_without_scales_is_nan(form):
    pattern = next(iter(PATTERNS))
    _, x, w, dy = operands(pattern)
    y, dx, *_ = product_and_gradients(pattern, x, w, jnp.float32([1, 1, 0]), dy, form)
    assert np.isfinite(y).all() and np.isnan(dx).all()
    assert np.isnan(scaled_product(pattern, x, w, jnp.zeros(3), form=form)).all()


@pytest.mark.parametrize("form", FORMS_OF_8_BITS)
def test_products_of_one_input_take_one_scale_and_each_finds_its_own_maximum(form):
    pattern = next(iter(PATTERNS))
    _, x, w, dy = operands(pattern)
    own, other = jnp.float32([0.0, 2.0, 1e-3]), jnp.float32([3.0, 9.0, 9.0])

    def multiply(own, other):
        return scaled_product(pattern, ProductInput.of(x, other, form=form), w, own, form=form)

    y, pull = jax.vjp(multiply, own, other)
    both = jnp.float32([3.0, 2.0, 1e-3])
    np.testing.assert_array_equal(y, scaled_product(pattern, x, w, both, form=form))
    of_own, of_other = pull(dy)
    np.testing.assert_array_equal(of_own[0], np.abs(x).max())
    np.testing.assert_array_equal(of_other, 0)


@pytest.mark.parametrize("form", FORMS_OF_8_BITS)
def test_a_kernel_rounded_before_gives_the_same_bits(form):
    pattern = next(iter(PATTERNS))
    _, x, w, dy = operands(pattern)
    amax = jnp.float32([2.0, 1.5, 2e-3])
    y, dx, dw, found = product_and_gradients(pattern, x, w, amax, dy, form)
    collections = apart(
        rounded_kernels({"kernel": jnp.asarray(w), "amax": amax}, SCALES, "float32", form), SCALES, "float32"
    )
    values, place = collections[ROUNDED]["kernel"], collections["params"]["kernel"]
    assert values.dtype == EIGHT_BIT_DTYPES[EIGHT_BIT_PRODUCTS[form].operand] and not place.any()
    multiply = lambda x, w, amax: scaled_product(pattern, x, w, amax, form=form, rounded=values)  # noqa: E731
    again, pull = jax.vjp(multiply, x, place, amax)
    of_x, of_w, of_amax = pull(dy)
    for one, other in ((again, y), (of_x, dx), (of_w, dw), (of_amax[::2], found[::2])):
        np.testing.assert_array_equal(one, other)
    weights = {"kernel": jnp.asarray(w)[None], "amax": amax[None]}
    grads = {"kernel": of_w[None], "amax": of_amax[None]}
    np.testing.assert_array_equal(with_largest_weights(grads, weights, SCALES, "float32")["amax"][0], found)


def test_operands_in_bfloat16_give_bfloat16():
    pattern = next(iter(PATTERNS))
    _, x, w, dy = (
        jnp.asarray(array, "bfloat16") if not isinstance(array, str) else array for array in operands(pattern)
    )
    for form in EIGHT_BIT_PRODUCTS:
        y, dx, dw, found = product_and_gradients(pattern, x, w, jnp.ones(3), dy, form)
        assert {array.dtype.name for array in (y, dx, dw)} == {"bfloat16"} and found.dtype == jnp.float32
        _, _, dw, _ = product_and_gradients(pattern, x, w, jnp.ones(3), dy, form, residuals="8bit")
        assert dw.dtype.name == "bfloat16"


def test_a_scale_is_rounded_up_by_less_than_a_sixteenth_and_little_noise_does_not_change_it():
    found = np.random.default_rng(0).lognormal(0, 20, 1000).astype(np.float32)
    scales = np.asarray(latest_amax(found, jnp.ones(1000)))
    assert (scales >= found).all() and (scales < found * (1 + 2**-4)).all()
    noisy = np.asarray(latest_amax(found * np.float32(1 + 2**-22), jnp.ones(1000)))
    assert (noisy != scales).sum() <= 1
    np.testing.assert_array_equal(latest_amax(scales, jnp.ones(1000)), scales)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (dict(matmul="fp8"), "model.matmul='fp8' is unknown"),
        (
            dict(matmul_parts="mpl"),
            "model.matmul_parts='mpl' is unknown; did you mean 'mlp'. Known: attention, mlp, experts",
        ),
        (
            dict(matmul="int8", matmul_parts="mlp experts"),
            "has 'experts', which no layer of this model has; use a set of ",
        ),
        (
            dict(matmul="int8", matmul_parts="attention mlp", layers=2, layers_of="moe*2"),
            "has 'mlp', which no layer of this model has; use a set of attention, experts",
        ),
        (dict(matmul_parts=" "), "is not a set of parts; use a set of attention, mlp, experts"),
        (dict(matmul="int8", matmul_residuals="int8"), "model.matmul_residuals='int8' is unknown"),
        (dict(matmul_residuals="8bit"), "model.matmul_residuals='8bit' does nothing with model.matmul='compute'"),
        (
            dict(matmul="int8", matmul_parts="mlp experts", matmul_residuals="8bit", shared_experts=1)
            | dict(layers=2, layers_of="moe*2"),
            "model.matmul_residuals='8bit' does nothing with model.matmul='int8' and model.matmul_parts='mlp ",
        ),
        (dict(matmul="int8", d_ff=2**18), "sums products of a dim of 262144 in int32, which holds 133144 of them"),
        (dict(matmul="int8", d_latent=2**18), "sums products of a dim of 262144 in int32, which"),
        (dict(matmul="int8", d_latent_q=2**18), "sums products of a dim of 262144 in int32, which"),
        (dict(matmul="int8", shared_experts=2, d_expert=2**17), "sums products of a dim of 262144 in int32, which"),
        (dict(matmul="int8", d_expert=2**18), "sums products of a dim of 262144 in int32"),
    ],
)
def test_what_cannot_be_is_refused(written, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**written)
