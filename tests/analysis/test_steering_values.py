"""Values that steer a traced program are computed by NumPy as JAX computes them."""

import jax
import numpy as np
import pytest
from jax import lax

from parallax.analysis.traced import trace
from parallax.jaxprs import apply

A, B = np.int32([[-(2**31), -3, 0], [4, 5, 2**31 - 1]]), np.int32([[-1, -3, 7], [3, 5, 1]])
BITS, OTHERS = A > 0, B > 3
LARGE = np.uint32(2**32 - 2)
CASES = {
    **{name: (getattr(lax, name), A, B) for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul")},
    **{name: (getattr(lax, name), A, B) for name in ("max", "min")},
    "and": (lax.bitwise_and, A, B),
    "or": (lax.bitwise_or, BITS, OTHERS),
    "not": (lax.bitwise_not, BITS),
    "not of integers": (lax.bitwise_not, A),
    "unsigned": (lax.add, LARGE, np.uint32(5)),
    "a number of the program": (lambda x: x + 3, LARGE),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), A[:1]),
    "reshape": (lambda x: lax.reshape(x, (3, 2)), A),
    "to fewer bits": (lambda x: lax.convert_element_type(x, "int8"), A),
    "to booleans": (lambda x: lax.convert_element_type(x, bool), A),
    "from booleans": (lambda x: lax.convert_element_type(x, "uint32"), BITS),
    "one of two": (lax.select_n, BITS, A, B),
    "one of three": (lax.select_n, np.int32([[0, 1, 2], [2, 0, 1]]), A, B, A + 1),
    "one for all": (lax.select_n, np.bool_(True), A, B),
    "quotients": (lax.div, A, B),
    "quotients by zero, and too large": (lax.div, A, np.int32([[-1, 0, 0], [-3, -7, 2]])),
    "unsigned quotients": (lax.div, np.uint32([LARGE, 7]), np.uint32([3, 0])),
    "clamp": (lax.clamp, np.int32(-2), A, np.int32(4)),
    "clamp each": (lax.clamp, B - 9, A, B),
    "broadcast of a number": (lambda x: lax.broadcast_in_dim(x, (2, 3), ()), LARGE),
    "broadcast of rows": (lambda x: lax.broadcast_in_dim(x, (3, 2, 4), (1,)), A[:, 1]),
    "broadcast of a dim of 1": (lambda x: lax.broadcast_in_dim(x, (2, 5), (0, 1)), BITS[:, :1]),
    "slice": (lambda x, *starts: lax.dynamic_slice_p.bind(x, *starts, slice_sizes=(1, 2)), A, np.int32(1), np.int32(1)),
    "slice from too far": (
        lambda x, *starts: lax.dynamic_slice_p.bind(x, *starts, slice_sizes=(1, 2)), A, np.int32(5), np.int32(-2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numpy_gives_what_jax_computes(name):
    function, *values = CASES[name]
    (equation,) = jax.make_jaxpr(function)(*values).eqns
    assert equation.primitive.name in trace.BY_NUMPY
    values += [np.asarray(3)] * (len(equation.invars) - len(values))
    (expected,) = map(np.asarray, apply(equation, values))
    (found,) = trace._evaluate(equation, values)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_all_that_numpy_computes_is_tested():
    tested = {jax.make_jaxpr(function)(*values).eqns[0].primitive.name for function, *values in CASES.values()}
    assert tested == trace.BY_NUMPY.keys()
