"""Attention by kernels for Triton, on GPUs, that never stores its scores."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from parallax.model.kernels.blockwise import HIDDEN
from parallax.model.kernels.pallas import pallas_attention
from parallax.model.kernels.triton_blocks import Form, attention_in_documents, triton_width
from parallax.model.mask import Mask
from parallax.sharding.collectives import vary_alike
from parallax.sharding.platform import platform_traced

# Tokens on a side of a block, at most and at least. Blocks are in shared memory, so those of wide heads have fewer.
# Hopper multiplies 64 rows at once; as compiled, its instructions for these are not in blocks of 32.
TRITON_BLOCK, TRITON_BACKWARD_BLOCK, SHORTEST_BLOCK, BLOCK_ENTRIES = 128, 64, 32, 128 * 64
TRITON_WIDEST = 256  # head width that these kernels multiply


def triton_attention(
    q_BSHJ: Array,
    k_BSGJ: Array,
    v_BSGK: Array,
    mask: Mask,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """`splash_attention` of whole rows by kernels for Triton, [B, S, H, K]; Pallas interprets them on CPUs. No
    communication. Rows are filled to whole blocks by tokens of their last document, which the others do not see.
    """
    seq, width = k_BSGJ.shape[1], max(k_BSGJ.shape[-1], v_BSGK.shape[-1])
    if filling := filled_tokens(seq, width) - seq:
        q_BSHJ, k_BSGJ, v_BSGK = (jnp.pad(x, [(0, 0), (0, filling), (0, 0), (0, 0)]) for x in (q_BSHJ, k_BSGJ, v_BSGK))
        mask = mask.replace(segments_BN=jnp.pad(mask.segments_BN, [(0, 0), (0, filling)], mode="edge"))
    kernel_of = TritonKernelOf(scale, cap, *triton_blocks(seq, width))
    return pallas_attention(kernel_of, *vary_alike((q_BSHJ, k_BSGJ, v_BSGK, mask, sinks)))[:, :seq]


def triton_blocks(seq: int, width: int) -> tuple[int, int]:
    """Tokens on a side of a block, forward and backward: fewer if heads are wide, or where they divide the row.

    >>> [triton_blocks(seq, 64) for seq in (40, 192, 2048, 2049)], triton_blocks(2048, 192)
    ([(64, 64), (64, 64), (128, 64), (128, 64)], (32, 32))
    """
    widest = max(SHORTEST_BLOCK, BLOCK_ENTRIES // triton_width(width))

    def block(most: int) -> int:
        sizes = [size for size in (TRITON_BLOCK, 64, SHORTEST_BLOCK) if size <= min(most, widest)]
        whole = [size for size in sizes if seq % size == 0]
        return next(iter(whole), min((size for size in sizes if size >= seq), default=sizes[0]))

    return block(TRITON_BLOCK), block(TRITON_BACKWARD_BLOCK)


def filled_tokens(seq: int, width: int) -> int:
    """Tokens of a row that is filled to whole blocks.

    >>> filled_tokens(2048, 64), filled_tokens(2049, 64)
    (2048, 2176)
    """
    return seq + -seq % max(triton_blocks(seq, width))


class TritonKernelOf(NamedTuple):
    """Makes the kernel for queries [B, S, H, J] and a mask."""

    scale: float
    cap: float
    block: int
    backward_block: int

    def __call__(self, q: Array, k: Array, mask: Mask) -> Partial:
        attend = functools.partial(_attention, self, mask.window, platform_traced() == "cpu")
        return Partial(attend, mask.segments_BN)


def _attention(
    of: TritonKernelOf, window: int, interpret: bool, segments: Array, q: Array, k: Array, v: Array, *sinks: Array
) -> Array:
    form = Form(of.scale, of.cap, window, k.shape[-1], v.shape[-1], of.block, of.backward_block, interpret)
    (sinks_H,) = sinks or (jnp.full(q.shape[2], HIDDEN),)
    return attention_in_documents(q, k, v, sinks_H.astype(jnp.float32), segments, form)
