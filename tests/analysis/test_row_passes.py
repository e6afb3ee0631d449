"""What a plan for TPUs counts beside products of experts: the passes over rows of tokens that nothing is fused with."""

from collections import Counter

import jax
import jax.numpy as jnp

from parallax.analysis.planned.row_passes import ROWS_IN, RowPasses
from parallax.analysis.traced.trace import walk

ROWS, WIDE, GROUPS, HALF = 64, 8, 2, jnp.bfloat16
X, ROW_OF = jax.ShapeDtypeStruct((ROWS // 2, WIDE), HALF), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
W, SIZES = jax.ShapeDtypeStruct((GROUPS, WIDE, WIDE), HALF), jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
OF_ROWS = ROWS * WIDE * 2  # bytes


def moved(function, *arrays, module=ROWS_IN[0]):
    """Bytes that each kind of operation of a module moves."""

    def scoped(*arrays):
        with jax.named_scope(module):
            return function(*arrays)

    program = jax.make_jaxpr(scoped)(*arrays)
    passes = RowPasses(program)
    count = lambda one, origin: Counter({one.primitive.name: passes.bytes(one, origin) or 0})  # noqa: E731
    return +walk(program, rank={}, count=count)


def test_rows_that_are_gathered_for_a_product_are_read_and_written():
    def product(x, row_of, w, sizes):
        return jax.lax.ragged_dot(x[row_of], w, sizes)

    assert moved(product, X, ROW_OF, W, SIZES) == {"gather": 2 * OF_ROWS}
    assert moved(product, X, ROW_OF, W, SIZES, module=ROWS_IN[1]) == {"gather": 2 * OF_ROWS}
    assert moved(product, X, ROW_OF, W, SIZES, module="embedding") == {}


def test_tables_of_places_are_no_rows():
    assert moved(lambda table: table[:, None].astype(jnp.int8), ROW_OF) == {}


def test_rows_that_are_gathered_to_be_added_up_are_read_and_their_sum_is_written():
    def summed(y, row_of):
        return (y[row_of].astype(jnp.float32) + y[row_of + 1].astype(jnp.float32)).astype(HALF)

    assert moved(summed, X, ROW_OF) == {"gather": 2 * OF_ROWS, "convert_element_type": OF_ROWS}


def test_what_is_computed_between_two_products_is_read_and_written():
    def between(gate, up):
        return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(HALF)

    rows = jax.ShapeDtypeStruct((ROWS, WIDE), HALF)
    assert moved(between, rows, rows) == {"convert_element_type": 3 * OF_ROWS}


def test_a_wide_result_of_a_product_is_read_to_be_rounded():
    def rounded(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(HALF).astype(jnp.float32)

    assert moved(rounded, X, W, SIZES) == {"convert_element_type": (4 + 2) * ROWS // 2 * WIDE}
