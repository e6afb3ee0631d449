"""JAX's attention for Triton, on GPUs: attention that never stores its scores."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jax.experimental import pallas as pl
from jax.tree_util import Partial

from parallax.model.kernels.pallas import pallas_attention
from parallax.model.kernels.triton_window import Window, attention_in_window
from parallax.model.mask import Mask
from parallax.sharding.collectives import vary_alike
from parallax.sharding.platform import platform_traced

# Tokens on a side of a block of the kernels for Triton: the most for the forward pass, and for the backward pass JAX's
# default. Blocks are in shared memory: float32 blocks with twice as many entries did not compile for H100.
TRITON_BLOCK, TRITON_BACKWARD_BLOCK, TRITON_BLOCK_ENTRIES = 128, 32, 128 * 64
TRITON_LEAST_WIDTH, TRITON_WIDEST = 16, 256  # head widths that these kernels multiply


def triton_attention(q_BSHJ: Array, k_BSGJ: Array, v_BSGJ: Array, mask: Mask, *, scale: float) -> Array:
    """`splash_attention` of whole rows by JAX's kernels for Triton, with heads of one width, [B, S, H, J]. No
    communication. Models with windows have kernels of this project's, which read the blocks that a window shows.

    The M query heads that share a key head are a batch dim of the calls, so key heads are not repeated; their gradients
    are summed over that dim. `S` is a multiple of 32.
    """
    q_MBSGJ = rearrange(q_BSHJ * scale, "B S (G M) J -> M B S G J", G=k_BSGJ.shape[2])
    out = pallas_attention(TritonKernelOf(mask.hides_earlier), *vary_alike((q_MBSGJ, k_BSGJ, v_BSGJ, mask)))
    return rearrange(out, "M B S G J -> B S (G M) J")


def triton_block_tokens(seq: int, width: int) -> int:
    """Tokens on a side of a block of the forward pass: from 32 to 128, fewer if heads are wide.

    >>> [triton_block_tokens(seq, 64) for seq in (32, 192, 2048)], triton_block_tokens(2048, 192)
    ([32, 64, 128], 32)
    """
    most = max(TRITON_BACKWARD_BLOCK, TRITON_BLOCK_ENTRIES // triton_width(width))
    return next(size for size in (TRITON_BLOCK, 64, TRITON_BACKWARD_BLOCK) if seq % size == 0 and size <= most)


def triton_width(width: int) -> int:
    """The head width that the kernels for Triton multiply: the next power of two."""
    return max(TRITON_LEAST_WIDTH, pl.next_power_of_2(width))


class TritonKernel(NamedTuple):
    """Attention of whole rows with these segments, by the kernels for Triton; Pallas interprets them on CPUs."""

    segments: Array

    def __call__(self, q_MBSGJ: Array, k: Array, v: Array) -> Array:
        size, back = triton_block_tokens(k.shape[1], k.shape[-1]), TRITON_BACKWARD_BLOCK
        sizes = dict(block_q_dkv=back, block_kv_dkv=back, block_q_dq=back, block_kv_dq=back)
        blocks = _for_triton().BlockSizes(block_q=size, block_k=size, **sizes)
        interpret = platform_traced() == "cpu"

        def attend(q: Array) -> Array:
            return _for_triton().mha(q, k, v, self.segments, causal=True, block_sizes=blocks, interpret=interpret)

        return jax.vmap(attend)(q_MBSGJ)


class TritonKernelOf(NamedTuple):
    """Makes the kernel for queries [M, B, S, G, J]; with windows also for layers without one, so that layers of one
    stack save the same."""

    windows: bool

    def __call__(self, q: Array, k: Array, mask: Mask) -> TritonKernel | Partial:
        if not self.windows:
            return TritonKernel(mask.segments_BN)
        seq, width = k.shape[1], k.shape[-1]
        sizes = triton_block_tokens(seq, width), TRITON_BACKWARD_BLOCK
        form = Window(mask.window or seq, *sizes, interpret=platform_traced() == "cpu")
        return Partial(functools.partial(_in_window, form), mask.segments_BN)


def _in_window(form: Window, segments: Array, q_MBSGJ: Array, k: Array, v: Array) -> Array:
    width = k.shape[-1]
    filling = [(0, triton_width(width) - width)]
    q, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + filling) for x in (q_MBSGJ, k, v))
    return jax.vmap(lambda q: attention_in_window(q, k, v, segments, form))(q)[..., :width]


@functools.cache
def _for_triton() -> Any:
    """JAX's module; on import it warns that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    return attention
