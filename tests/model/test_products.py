"""Products in 8 bits are those of operands that NumPy rounds, and what would overflow is clipped."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.tiny_model import mesh_of

from parallax.config.sections import AXES, ModelConfig
from parallax.errors import ConfigError
from parallax.model import products
from parallax.model.products import (
    MEASURED,
    ROUNDED,
    ProductInput,
    apart,
    largest_weights,
    latest_amax,
    product_of,
    rounded_kernels,
    scaled_product,
    unit_of,
    with_largest_weights,
)
from parallax.sharding.collectives import as_varying, reshard, sum_over
from parallax.sharding.eight_bits import EIGHT_BIT_DTYPES, to_eight_bits
from parallax.sharding.layout import Layout

PATTERNS = {
    "batch seq d_model, d_model heads d_head -> batch seq heads d_head": ("bsd,dhk->bshk", (2, 3, 8), (8, 2, 4)),
    "batch seq heads d_head, heads d_head d_model -> batch seq d_model": ("bshk,hkd->bsd", (2, 3, 2, 4), (2, 4, 8)),
}
BACKWARD = {"bsd,dhk->bshk": ("bshk,dhk->bsd", "bsd,bshk->dhk"), "bshk,hkd->bsd": ("bsd,hkd->bshk", "bshk,bsd->hkd")}
# Of each form, the dtypes of operands and of the output's gradient.
DTYPES = {"int8": (np.int8, np.int8), "float8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
LARGEST = {ml_dtypes.float4_e2m1fn: 6, np.int8: 127, ml_dtypes.float8_e4m3fn: 448, ml_dtypes.float8_e5m2: 57344}
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
    product = product_of(form)
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
    how = SCALES, "float32", form
    collections = apart(rounded_kernels({"kernel": jnp.asarray(w), "amax": amax}, *how), *how)
    values, place = collections[ROUNDED]["kernel"], collections["params"]["kernel"]
    assert values.dtype == EIGHT_BIT_DTYPES[product_of(form).operand] and not place.any()
    multiply = lambda x, w, amax: scaled_product(pattern, x, w, amax, form=form, rounded=values)  # noqa: E731
    again, pull = jax.vjp(multiply, x, place, amax)
    of_x, of_w, of_amax = pull(dy)
    for one, other in ((again, y), (of_x, dx), (of_w, dw), (of_amax[::2], found[::2])):
        np.testing.assert_array_equal(one, other)
    weights = {"kernel": jnp.asarray(w)[None], "amax": amax[None]}
    grads = {"kernel": of_w[None], "amax": of_amax[None]}
    np.testing.assert_array_equal(
        with_largest_weights(grads, largest_weights(weights, SCALES, "float32"))["amax"][0], found
    )


def test_operands_in_bfloat16_give_bfloat16():
    pattern = next(iter(PATTERNS))
    _, x, w, dy = (
        jnp.asarray(array, "bfloat16") if not isinstance(array, str) else array for array in operands(pattern)
    )
    for form in (MEASURED, *DTYPES):
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


# ---- scales of the same step


WIDE = {
    "batch seq d_model, d_model heads d_head -> batch seq heads d_head": ("bsd,dhk->bshk", (2, 64, 256), (256, 2, 64)),
    "batch seq heads d_head, heads d_head d_model -> batch seq d_model": ("bshk,hkd->bsd", (2, 64, 2, 64), (2, 64, 64)),
}
OWN = [f"{dtype} {scales}" for dtype in DTYPES for scales in ("current", "row", "block")]
OWN += ["float8 mxfp8", "int8 fixed", "float8 fixed"]
FLOAT4 = "float4 nvfp4"
RANGES = (4.0, 0.25, 0.5)


def parts_of(scales, dims, shape, others, columns=False):
    """The shape of the parts of an operand that have a scale each; the product sums over dims that the `others` have,
    too."""
    summed = [dim for dim in dims if dim in others]
    kept_apart = {dim: 1 for dim in dims}
    if scales == "mxfp8":
        return kept_apart | {summed[-1]: 32}
    if scales == "block" and not columns:
        in_blocks = summed[-1:] if "b" in dims else [dim for dim in dims if dim != "h"]
        return kept_apart | {dim: min(128, size) for dim, size in zip(dims, shape) if dim in in_blocks}
    over = summed if columns or (scales == "row" and "b" in dims) else dims
    return kept_apart | {dim: size for dim, size in zip(dims, shape) if dim in over}


def rounded_by_itself(x, parts, dtype, fixed=None, power_of_two=False):
    """What an operand counts as, whose parts have a scale each."""
    cut = x.reshape([size for whole, part in zip(x.shape, parts) for size in (whole // part, part)])
    most = np.abs(cut).max(axis=tuple(range(1, cut.ndim, 2)), keepdims=True) if fixed is None else np.float32(fixed)
    unit = 2.0 ** np.ceil(np.log2(most / LARGEST[dtype])) if power_of_two else rounded_up(most) / FULL[dtype]
    scaled = np.clip(np.float32(cut) * (1 / np.float32(unit)), -LARGEST[dtype], LARGEST[dtype])
    whole = (np.rint(scaled) if dtype == np.int8 else scaled).astype(dtype).astype(np.float64) * unit
    return whole.reshape(x.shape)


def rounded_up(x):
    """To 4 bits of mantissa behind the first."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.ceil(fraction * 32) / 32, exponent)


def wide_operands(pattern):
    """Gradients differ by token in size, as those of a model do."""
    letters, *shapes = WIDE[pattern]
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    y = np.einsum(letters, x, w)
    dy = rng.normal(0, 1e-3, y.shape) * np.exp(2 * rng.normal(size=(*y.shape[:2], *(1 for _ in y.shape[2:]))))
    return letters, x, w / 16, dy.astype(np.float32)


def in_form(form, pattern):
    """A function of x, w and dy: the product and both gradients."""

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: scaled_product(pattern, x, w, form=form), x, w)
        return y, *pull(dy)

    return run


@pytest.mark.fast(9)
@pytest.mark.parametrize("gradients", ["8bit", "compute"])
@pytest.mark.parametrize("pattern", [*WIDE][::-1])
@pytest.mark.parametrize("form", OWN)
def test_a_product_and_its_gradients_are_those_of_operands_rounded_by_themselves(pattern, form, gradients):
    letters, x, w, dy = wide_operands(pattern)
    (dtype, scales), (left, right, result) = form.split(), letters.replace("->", ",").split(",")
    operand, gradient = DTYPES[dtype]
    gradient = gradient if scales in ("current", "fixed") else operand
    words = f"{form} {gradients}" + f" {' '.join(map(str, RANGES))}" * (scales == "fixed")

    def of(array, dims, others, which, kind, columns=False):
        parts = parts_of(scales, dims, array.shape, others, columns).values()
        powers = scales == "mxfp8" or (scales == "block" and not columns)
        return rounded_by_itself(array, parts, kind, RANGES[which] if scales == "fixed" else None, powers)

    y, dx, dw = in_form(words, pattern)(x, w, dy)
    of_x, of_w = BACKWARD[letters]
    anew = scales in ("row", "block", "mxfp8")
    of_weight = x, dy
    if gradients == "8bit":
        of_weight = of(x, left, result if anew else right, 0, operand, anew)
        of_weight = of_weight, of(dy, result, left if anew else right, 2, gradient, anew)
    for found, expected in (
        (y, np.einsum(letters, of(x, left, right, 0, operand), of(w, right, left, 1, operand))),
        (dx, np.einsum(of_x, of(dy, result, right, 2, gradient), of(w, right, result, 1, operand))),
        (dw, np.einsum(of_w, *of_weight)),
    ):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("pattern", WIDE)
def test_float4_has_scales_of_16_entries_and_of_the_tensor_and_gradients_without(pattern):
    letters, x, w, dy = wide_operands(pattern)
    left, right, _ = letters.replace("->", ",").split(",")

    def rounded(x, dims, others):
        summed = [dim for dim in dims if dim in others]
        parts = [16 if dim == summed[-1] else 1 for dim in dims]
        cut = x.reshape([size for whole, part in zip(x.shape, parts) for size in (whole // part, part)])
        most = np.abs(cut).max(axis=tuple(range(1, cut.ndim, 2)), keepdims=True)
        whole = 2.0 ** np.ceil(np.log2(most.max() / (6 * 448)))
        unit = np.maximum(np.float32(most * np.float32(1 / 6) / whole), 2**-9).astype(ml_dtypes.float8_e4m3fn)
        unit = unit.astype(np.float32) * np.float32(whole)
        narrow = np.clip(cut * (1 / unit), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        return (narrow.astype(np.float64) * unit).reshape(x.shape)

    y, dx, dw = in_form(FLOAT4, pattern)(x, w, dy)
    expected = np.einsum(letters, rounded(x, left, right), rounded(w, right, left))
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-5 * np.abs(expected).max())
    of_x, of_w = BACKWARD[letters]
    for found, expected in ((dx, np.einsum(of_x, dy, w)), (dw, np.einsum(of_w, x, dy))):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-5 * np.abs(expected).max())
    assert np.isfinite(in_form(FLOAT4, pattern)(0 * x, 0 * w, dy)[0]).all()


@pytest.mark.fast(4)
@pytest.mark.parametrize("form", [f"{form} {gradients}" for gradients in ("compute", "8bit") for form in OWN[:7]])
def test_8_bit_residuals_change_no_more_than_a_weights_gradient(form):
    """With weights' gradients in 8 bits nothing: the same 8 bits are saved."""
    pattern = next(iter(WIDE))
    _, x, w, dy = wide_operands(pattern)
    found = []
    for residuals in ("compute", "8bit"):
        multiply = functools.partial(scaled_product, pattern, form=form, residuals=residuals)
        y, pull = jax.vjp(multiply, x, w)
        saved = [leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == x.shape]
        assert saved == (["float32"] if residuals == "compute" else [EIGHT_BIT_DTYPES[form.split()[0]].name])
        found.append((y, *pull(dy)))
    for at in (0, 1, *([2] if "8bit" in form else [])):
        np.testing.assert_array_equal(found[0][at], found[1][at])
    assert np.linalg.norm(found[0][2] - found[1][2]) < 0.05 * np.linalg.norm(found[0][2])


@pytest.mark.fast(4)
@pytest.mark.parametrize("form", [f"{form} 8bit" + " 8 1 8" * ("fixed" in form) for form in OWN])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(form, bad):
    """In 8 bits it could be any number."""
    pattern = next(iter(WIDE))
    _, x, w, dy = wide_operands(pattern)
    x[1, 5, 7] = bad
    y, _, dw = in_form(form, pattern)(x, w, dy)
    assert not np.isfinite(y[1, 5]).all() and not np.isfinite(dw).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_nan_in_float8_with_fixed_ranges(bad):
    pattern = next(iter(PATTERNS))
    _, x, w, _ = operands(pattern)
    w[0, 0, 0] = bad
    form = "float8 fixed 8bit 8 1 8"
    rounded = rounded_kernels({"kernel": jnp.asarray(w)}, {"kernel": "fixed"}, "float32", form)["kernel"]
    np.testing.assert_array_equal(np.isnan(rounded.astype(jnp.float32)), ~np.isfinite(w))
    for given in ({}, {"rounded": rounded}):
        assert np.isnan(scaled_product(pattern, x, jnp.asarray(w), form=form, **given)[..., 0, 0]).all()


@pytest.mark.parametrize(("dtype", "waits"), [("float8", False), ("int8", True)])
def test_float8_with_fixed_ranges_is_rounded_without_a_pass_over_the_whole_operand(dtype, waits):
    """An entry that is not finite is nan in 8 bits, too. int8 has no nan: it asks whether all entries are finite."""
    pattern = next(iter(WIDE))
    _, x, w, dy = wide_operands(pattern)
    traced = str(jax.make_jaxpr(in_form(f"{dtype} fixed 8bit 4 0.25 0.5", pattern))(x, w, dy))
    assert ("reduce_and" in traced) == waits and "reduce_max" not in traced


def test_what_two_products_read_is_rounded_once_where_xla_would_round_in_each(monkeypatch):
    """With fixed ranges on v7x. A gradient is read by two products, a shared input by those of several weights."""
    pattern, form = next(iter(WIDE)), "float8 fixed 8bit 4 0.25 0.5"
    _, *given = wide_operands(pattern)

    def traced():  # anew
        def both(x, w):
            shared = ProductInput.of(x, None, form=form, shared=True)
            return [scaled_product(pattern, read, w, form=form) for read in (shared, x)]

        def run(x, w, dy):
            y, pull = jax.vjp(both, x, w)
            return *y, *pull([dy, dy])

        return str(jax.make_jaxpr(run)(*given)), jax.jit(run)(*given)

    program, plain = traced()
    assert "optimization_barrier" not in program
    monkeypatch.setattr(products, "rounds_in_products", lambda: True)
    program, behind_barriers = traced()
    assert program.count("optimization_barrier") == 1 + 2  # of the shared input, and of each product's gradient
    for before, after in zip(plain, behind_barriers, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.fast(4)
@pytest.mark.parametrize("form", [f"{form} 8bit" for form in OWN[:7]])
def test_zeros_give_zeros(form):
    """As the gradients of padding do, of which a scale must not make nan."""
    pattern = next(iter(WIDE))
    _, x, w, dy = wide_operands(pattern)
    for array in in_form(form, pattern)(0 * x, 0 * w, 0 * dy):
        np.testing.assert_array_equal(array, 0)


ON_MESH = {  # columns and rows
    "batch/dp seq d_model, d_model d_ff/tp -> batch/dp seq d_ff/tp": "batch/dp seq d_ff/tp",
    "batch/dp seq d_ff/tp, d_ff/tp d_model -> batch/dp seq d_model +tp": "batch/dp seq d_model/tp",
}


@pytest.mark.fast(7)
@pytest.mark.parametrize("pattern", ON_MESH)
@pytest.mark.parametrize("form", OWN[:7])
def test_ranks_find_the_scales_of_one_device(pattern, form):
    """To the bit; sums are in another order."""
    rng, sizes = np.random.default_rng(0), dict(batch=2, seq=32, d_model=256, d_ff=256)
    of_x, of_w = (Layout.parse(part) for part in pattern.partition(" -> ")[0].split(", "))
    x, w, dy = (
        (rng.normal(size=[sizes[name] for name in layout.names])).astype(np.float32)
        for layout in (of_x, of_w, Layout.parse(ON_MESH[pattern]))
    )
    dy *= np.exp(2 * rng.normal(size=(2, 32, 1))).astype(np.float32)

    def run(x, w, dy):
        def multiply(x, w):
            y = scaled_product(pattern, x, w, form=f"{form} 8bit")
            return reshard(f"{pattern.partition(' -> ')[2]} -> {ON_MESH[pattern]}", y)

        y, pull = jax.vjp(multiply, *map(as_varying, (x, w)))
        dx, dw = pull(as_varying(dy))
        # Each rank of dp has a summand of dw, and ranks of tp one of dx where they do not cut it.
        return sum_over(y, ["pp"]), sum_over(dx, {*AXES} - {*of_x.used_axes()}), sum_over(dw, ["pp", "dp"])

    mesh = mesh_of(1, 2, 2)
    specs = of_x.spec(mesh), of_w.spec(mesh), Layout.parse(ON_MESH[pattern]).spec(mesh)
    on_mesh = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(specs[2], *specs[:2])))(x, w, dy)
    for found, expected in zip(on_mesh, jax.jit(run)(x, w, dy), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("form", "width", "dtypes", "calls"),
    [
        ("float8 mxfp8 8bit", 32, (jnp.float8_e4m3fn, jnp.float8_e8m0fnu), 3),
        (FLOAT4, 16, (jnp.float4_e2m1fn, jnp.float8_e4m3fn), 1),
    ],
)
def test_blocks_are_given_to_the_product_that_b200_has(form, width, dtypes, calls, monkeypatch):
    """With the values that other devices compute: here by JAX's own words for it."""

    def scaled_matmul(a, b, of_a, of_b, preferred_element_type):
        assert (a.dtype, of_a.dtype) == (b.dtype, of_b.dtype) == dtypes
        shapes.append((a.shape, b.shape))
        wide = [
            x.astype("float32") * jnp.repeat(s.astype("float32"), width, axis=-1) for x, s in ((a, of_a), (b, of_b))
        ]
        return jnp.einsum("BMK,BNK->BMN", *wide).astype(preferred_element_type)

    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    for pattern in WIDE:
        shapes, found = [], []
        _, x, w, dy = wide_operands(pattern)
        for platform in ("cpu", "gpu"):
            monkeypatch.setattr(products, "multiplies_microscaled", lambda platform=platform: platform == "gpu")
            found.append(in_form(form, pattern)(x, w, dy))
        assert len(shapes) == calls
        for one, other in zip(*found):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max())


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
        (dict(matmul_scales="row"), "model.matmul_scales='row' does nothing with model.matmul='compute'"),
        (dict(matmul_weight_gradients="8bit"), "model.matmul_weight_gradients='8bit' does nothing with model.matmul="),
        (dict(matmul="int8", matmul_scales="tensor"), "model.matmul_scales='tensor' is unknown"),
        (dict(matmul="int8", matmul_scales="fixed"), "'fixed' needs model.matmul_ranges, which is ''"),
        (dict(matmul="int8", matmul_ranges="1 1 1"), "'delayed' reads no model.matmul_ranges, which is '1 1 1'"),
        (dict(matmul="int8", matmul_scales="fixed", matmul_ranges="1 0 1"), "'1 0 1' is not three numbers above 1e-30"),
        (dict(matmul="int8", matmul_scales="fixed", matmul_ranges="1 1"), "'1 1' is not three numbers above 1e-30"),
        (dict(matmul="int8", matmul_scales="mxfp8"), "'mxfp8' is of float8, not of model.matmul='int8'"),
        (dict(matmul="float4"), "float4 and nvfp4 scales are for each other"),
        (dict(matmul="float8", matmul_scales="nvfp4"), "float4 and nvfp4 scales are for each other"),
        (
            dict(matmul="float4", matmul_scales="nvfp4", matmul_weight_gradients="8bit"),
            "model.matmul_weight_gradients='8bit' does nothing with model.matmul='float4', whose gradients",
        ),
        (
            dict(matmul="int8", matmul_parts="experts", matmul_weight_gradients="8bit", layers=2, layers_of="moe*2"),
            "does nothing with model.matmul_parts='experts': gradients of experts' kernels are computed in model.dtype",
        ),
    ],
)
def test_what_cannot_be_is_refused(written, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**written)
