"""Initial values by NumPy: a traced draw, run equation by equation, with the bits of the compiled program.

XLA takes half a second of CPU time and more to compile a model's draw, however small it is, and 100 ns for each value;
NumPy takes some 50. It runs what this package's layers draw. Other operations, and those that it would round otherwise,
raise Undrawable: then the draw has to be compiled. So must that of a layer of a user's own if it uses these.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from parallax.jaxprs import called, needed
from parallax.sharding.compiler import RUN_ONCE
from parallax.version import version_of

BLOCK = 1 << 14  # values at once, which a processor's cache holds
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
# Of factors that follow each other XLA multiplies values by the product; that of jaxlib 0.12 by each.
FOLDS_FACTORS = version_of("jaxlib").startswith("0.10.")
# XLA's polynomial, which NumPy would round otherwise: a program of few operations, the same for all models.
_erf_inv_of_block = jax.jit(jax.lax.erf_inv, compiler_options=RUN_ONCE)


class Undrawable(Exception):
    """This program, or with these settings of JAX, has other bits if XLA compiles it."""


class Scaled(NamedTuple):
    """values · factor, not yet multiplied."""

    values: np.ndarray
    factor: np.ndarray


def drawn_by_numpy(program: ClosedJaxpr, key: jax.Array) -> list[np.ndarray]:
    """The outputs of a traced program for a key. Raises Undrawable."""
    if str(jax.random.key_impl(key)) != "threefry2x32" or not jax.config.jax_threefry_partitionable:
        raise Undrawable("numbers of another generator")
    return [_product(x) for x in _run(program, [np.asarray(jax.random.key_data(key))])]


def _run(program: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Outputs of a program. Keys are uint32 arrays whose last dim has two entries."""
    jaxpr = program.jaxpr
    value_of = dict(zip(jaxpr.constvars, map(np.asarray, program.consts), strict=True))
    value_of |= dict(zip(jaxpr.invars, inputs, strict=True))

    def value(variable: Any) -> Any:
        return np.asarray(variable.val, variable.aval.dtype) if isinstance(variable, Literal) else value_of[variable]

    for equation in needed(jaxpr):
        values = [value(variable) for variable in equation.invars]
        exact = OF_KEYS if any(map(_is_key, equation.invars)) else OF_NUMBERS
        if inner := called(equation):
            outputs = _run(inner, values)
        elif (name := equation.primitive.name) in ARITHMETIC and equation.outvars[0].aval.dtype.itemsize == 4:
            outputs = [ARITHMETIC[name](*values)]
        elif name in exact:
            result = exact[name](equation, *map(_product, values))
            outputs = result if equation.primitive.multiple_results else [result]
        else:
            raise Undrawable(f"{name} of {[str(variable.aval) for variable in equation.invars]}")
        value_of |= dict(zip(equation.outvars, outputs, strict=True))
    return [value(variable) for variable in jaxpr.outvars]


def _is_key(variable: Any) -> bool:
    return jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.prng_key)


def _product(value: Any) -> np.ndarray:
    return value.values * value.factor if isinstance(value, Scaled) else value


def _mul(x: Any, y: Any) -> Any:
    # A value alone is a constant: see _bits.
    scale, other = (x, y) if not isinstance(x, Scaled) and x.size == 1 else (y, x)
    if isinstance(scale, Scaled) or scale.size != 1:
        raise Undrawable("a product of two arrays")
    factor = scale.reshape(())
    if isinstance(other, Scaled):
        return Scaled(other.values, other.factor * factor) if FOLDS_FACTORS else Scaled(_product(other), factor)
    return scale * other if other.size == 1 else Scaled(other, factor)


def _sum(combine: Callable, x: Any, y: Any) -> np.ndarray:
    for term in (x, y):
        # A compiled sum of a product is rounded once, unless the product is exact.
        if isinstance(term, Scaled) and math.frexp(term.factor)[0] != 0.5:
            raise Undrawable("a sum of products")
    return combine(_product(x), _product(y))


def _hashed(key: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds, of the 64-bit numbers from `start` to `stop`: their upper and their lower halves,
    uint32 [..., stop - start] for keys [..., 2]. J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3."""
    keys = key[..., :1], key[..., 1:], key[..., :1] ^ key[..., 1:] ^ PARITY
    numbers = np.arange(start, stop, dtype=np.uint64)
    x, y = (numbers >> np.uint64(32)).astype(np.uint32) + keys[0], numbers.astype(np.uint32) + keys[1]
    turned = np.empty_like(y)
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            np.add(x, y, out=x)
            np.left_shift(y, np.uint32(bits), out=turned)
            np.right_shift(y, np.uint32(32 - bits), out=y)
            np.bitwise_or(y, turned, out=y)
            np.bitwise_xor(y, x, out=y)
        np.add(x, keys[(group + 1) % 3], out=x)
        np.add(y, keys[(group + 2) % 3] + np.uint32(group + 1), out=y)
    return x, y


def _split(equation: JaxprEqn, key: np.ndarray) -> np.ndarray:
    shape = equation.params["shape"]
    return np.stack(_hashed(key, 0, math.prod(shape)), axis=-1).reshape(*key.shape[:-1], *shape, 2)


def _fold_in(equation: JaxprEqn, key: np.ndarray, data: np.ndarray) -> np.ndarray:
    if data.ndim:
        raise Undrawable("several numbers in a key")
    return np.concatenate(_hashed(key, int(data), int(data) + 1), axis=-1)


def _bits(equation: JaxprEqn, key: np.ndarray) -> np.ndarray:
    if equation.params["bit_width"] != 32:
        raise Undrawable("numbers that do not have 32 bits")
    size = math.prod(equation.params["shape"])
    if equation.outvars[0].aval.size == 1:
        raise Undrawable("a value alone, which would be taken for a constant")
    drawn = np.empty((key.size // 2, size), np.uint32)
    for row, key_of_row in zip(drawn, key.reshape(-1, 2), strict=True):
        for start in range(0, size, BLOCK):
            np.bitwise_xor(*_hashed(key_of_row, start, min(start + BLOCK, size)), out=row[start : start + BLOCK])
    return drawn.reshape(equation.outvars[0].aval.shape)


def _erf_inv(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    if x.dtype != np.float32:
        raise Undrawable(f"erf_inv of {x.dtype}")
    flat = x.reshape(-1)
    padded = np.zeros(-(-flat.size // BLOCK) * BLOCK, np.float32)
    padded[: flat.size] = flat
    blocks = [_erf_inv_of_block(block) for block in padded.reshape(-1, BLOCK)]
    return np.concatenate([np.empty(0, np.float32), *blocks])[: flat.size].reshape(x.shape)


def _broadcast(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return _along(equation.params["broadcast_dimensions"], x, equation.params["shape"])


def _iota(equation: JaxprEqn) -> np.ndarray:
    shape, dim = equation.params["shape"], equation.params["dimension"]
    return _along([dim], np.arange(shape[dim], dtype=equation.params["dtype"]), shape)


def _along(dims: Sequence[int], x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array with the dims of `x` in these places, broadcast to a shape."""
    sizes = [1] * len(shape)
    for dim, size in zip(dims, x.shape, strict=True):
        sizes[dim] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(equation: JaxprEqn, key: np.ndarray) -> np.ndarray:
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    return key[tuple(map(slice, starts, limits, equation.params["strides"] or [None] * len(starts)))]


def _selected(equation: JaxprEqn, key: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """A gather that selects keys of a vector."""
    numbers = indices[..., 0]
    if key.ndim != 2 or equation.params["dimension_numbers"].offset_dims or not np.all(numbers < len(key)):
        raise Undrawable("a gather that selects other than keys of a vector")
    return key[numbers]


def _round(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    if equation.params["rounding_method"] != jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        raise Undrawable(str(equation.params["rounding_method"]))
    return np.round(x)


def _as_floats(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    if (x.dtype, equation.params["new_dtype"]) != (np.uint32, np.float32):
        raise Undrawable(f"the bits of {x.dtype} as {equation.params['new_dtype']}")
    return x.view(np.float32)


def _converted(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        converted = x.astype(equation.params["new_dtype"])
    is_whole = jax.dtypes.issubdtype(converted.dtype, np.integer)
    if is_whole and not np.array_equal(converted.astype(x.dtype), np.trunc(x)):
        raise Undrawable(f"numbers that are too large for {converted.dtype}")
    return converted


ARITHMETIC: dict[str, Callable] = {
    "mul": _mul,
    "add": functools.partial(_sum, np.add),
    "sub": functools.partial(_sum, np.subtract),
}
OF_KEYS: dict[str, Callable] = {
    "random_split": _split,
    "random_fold_in": _fold_in,
    "random_bits": _bits,
    "slice": _slice,
    "squeeze": lambda equation, key: np.squeeze(key, equation.params["dimensions"]),
    "unstack": lambda equation, key: list(np.moveaxis(key, equation.params["axis"], 0)),
    "gather": _selected,
}
OF_NUMBERS: dict[str, Callable] = {
    "erf_inv": _erf_inv,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "round": _round,
    "bitcast_convert_type": _as_floats,
    "convert_element_type": _converted,
    "max": lambda _, x, y: np.maximum(x, y),
    "min": lambda _, x, y: np.minimum(x, y),
    "or": lambda _, x, y: x | y,
    "lt": lambda _, x, y: x < y,
    "shift_right_logical": lambda _, x, y: x >> y,
    "select_n": lambda _, which, *cases: np.choose(which, cases, mode="clip"),
}
