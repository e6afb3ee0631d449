"""Products of sharded arrays in the notation. They send nothing; the layout of the result says what is left to send."""

import jax.numpy as jnp
from jax import Array

from parallax.errors import NotationError
from parallax.sharding.layout import DIMS, Layout, check_rank


def einsum(pattern: str, *operands: Array, dtype: jnp.dtype | None = None, precision: str | None = None) -> Array:
    """Contract in the notation. Contracting a sharded dim leaves partial sums, and the result must say so.

    `dtype` is the dtype of the sums and the result, by default that of the operands. `precision` is that of the
    products, as in JAX.

    Communication:
        forward   nothing
        backward  nothing

    >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    >>> einsum("batch/dp seq d_ff/tp, d_ff/tp d_model -> batch/dp seq d_model +tp", x, w).shape
    (2, 3, 5)
    """
    letters = einsum_letters(pattern, *operands)
    return jnp.einsum(letters, *operands, preferred_element_type=dtype, precision=precision)


def einsum_letters(pattern: str, *operands: Array) -> str:
    """Check a pattern and return it in NumPy's notation.

    >>> einsum_letters("seq d_model, d_model d_ff/tp -> seq d_ff/tp", jnp.ones((2, 3)), jnp.ones((3, 4)))
    'SD,DF->SF'
    """
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise NotationError(f"{pattern!r}: write 'operand, operand -> result'.")
    inputs, output = [Layout.parse(part.strip()) for part in left.split(",")], Layout.parse(right.strip())
    expected = einsum_layout(inputs, output.names)
    if expected != output:
        raise NotationError(f"{pattern!r}: the result is {str(expected)!r}, not {str(output)!r}.")
    if len(operands) != len(inputs):
        raise NotationError(f"{pattern!r}: it has {len(inputs)} operands, but {len(operands)} arrays are given.")
    sizes: dict[str, tuple[int, Layout]] = {}
    for layout, operand in zip(inputs, operands):
        check_rank(pattern, layout, operand)
        for name, size in zip(layout.names, operand.shape):
            known, where = sizes.setdefault(name, (size, layout))
            if size != known:
                raise NotationError(
                    f"{pattern!r}: on a device {name} is {known} in {str(where)!r} and {size} in {str(layout)!r}."
                )
    letters = ["".join(DIMS[name] for name in layout.names) for layout in (*inputs, output)]
    return f"{','.join(letters[:-1])}->{letters[-1]}"


def einsum_layout(inputs: list[Layout], names: tuple[str, ...]) -> Layout:
    """Layout of the result of an einsum of `inputs`, with the dims `names` and its partial sums."""
    cuts: dict[str, tuple[str, ...]] = {}
    for layout in inputs:
        for name, axes in zip(layout.names, layout.axes, strict=True):
            if cuts.setdefault(name, axes) != axes:
                raise NotationError(
                    f"einsum: {name} is sharded over {'/'.join(cuts[name]) or 'nothing'} in one operand and over "
                    f"{'/'.join(axes) or 'nothing'} in {str(layout)!r}; reshard one of them first."
                )
    missing = [name for name in names if name not in cuts]
    if missing:
        raise NotationError(f"einsum: the result's {missing[0]!r} is in no operand; they have {', '.join(cuts)}.")
    partial = [axis for name in cuts if name not in names for axis in cuts[name]]
    return Layout.parse(str(Layout(names, tuple(cuts[name] for name in names), tuple(partial))))
