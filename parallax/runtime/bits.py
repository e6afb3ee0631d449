"""The width of numbers: 32 bits, whatever JAX is set to."""

import contextlib

import jax


def in_32_bits() -> contextlib.ContextDecorator:
    """A context, or the decorator of a function, without JAX's 64-bit types.

    With them (JAX_ENABLE_X64=1) initial values would be drawn in float64, which are other numbers, and scalars of an
    update would be float64, to which other numbers follow.
    """
    return jax.enable_x64(False)
