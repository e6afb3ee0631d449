"""Grouped products are those of each group alone, whatever the sizes of groups and the form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from parallax.model.grouped import FORMS, grouped_dot, grouped_sums, rows_of_block

ROWS, INTO, OUT = 300, 12, 20
# Sums over up to 300 float32 terms, in another order.
ERROR = 2e-6
SIZES = {
    "even": [75, 75, 75, 75],
    "uneven": [1, 130, 9, 160],
    "one gets all": [0, 0, 300, 0],
    "none": [0, 0, 0, 0],
    "rows left over": [20, 0, 7, 100],
    "the last gets none": [299, 1, 0, 0],
}


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (ROWS, INTO), (4, INTO, OUT), (ROWS, OUT)
    return [rng.normal(size=shape).astype(np.float32).astype(dtype) for shape in shapes]


def plain(x, w, dy, sizes):
    """(y, dx, dw) in float64, group by group."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw, first = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for group, size in enumerate(sizes):
        own = slice(first, first + size)
        y[own], dx[own], dw[group] = x[own] @ w[group], dy[own] @ w[group].T, x[own].T @ dy[own]
        first += size
    return y, dx, dw


def with_gradients(x, w, dy, sizes, form):
    def run(x, w, sizes):
        dx = grouped_dot(dy, w, sizes, transposed=True, form=form)
        return grouped_dot(x, w, sizes, form=form), dx, grouped_sums(x, dy, sizes, form=form)

    return jax.tree.map(np.asarray, jax.jit(run)(x, w, jnp.array(sizes)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_is_multiplied_by_its_own_matrix(sizes, form):
    found = with_gradients(*arrays(), sizes, form)
    for a, e in zip(found, plain(*arrays(), sizes), strict=True):
        assert np.abs(a - e).max() <= ERROR * max(np.abs(e).max(), 1e-30)


def test_bfloat16_is_summed_in_float32():
    """Results are rounded to 8 bits, 2^-9; sums are not."""
    sizes = SIZES["uneven"]
    found = with_gradients(*arrays(jnp.bfloat16), sizes, "blocks")
    assert {a.dtype for a in found} == {jnp.dtype(jnp.bfloat16)}
    for a, e in zip(found, plain(*arrays(jnp.bfloat16), sizes), strict=True):
        assert np.abs(np.float64(a) - e).max() <= 2**-8 * np.abs(e).max()


def test_rows_that_are_not_in_use_reach_nothing():
    """Even where they are no numbers."""
    sizes, (x, w, dy) = SIZES["rows left over"], arrays()
    x[sum(sizes) + rows_of_block(ROWS, 4) :] = np.nan
    for a, e in zip(with_gradients(x, w, dy, sizes, "blocks"), with_gradients(*arrays(), sizes, "blocks")):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("rows", [1, 16, 1000, 4096])
def test_what_is_computed_grows_with_rows_not_with_groups(rows):
    groups = 64
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows, INTO), (groups, INTO, OUT))]
    sizes = jax.ShapeDtypeStruct((groups,), "int32")
    loops = [
        e for e in equations(lambda *a: grouped_dot(*a, form="blocks"), *shapes, sizes) if e.primitive.name == "scan"
    ]
    (count,) = (loop.params["length"] for loop in loops)
    assert count * rows_of_block(rows, groups) <= 1.25 * rows + 8 * groups
