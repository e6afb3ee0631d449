"""FLOPs of attention kernels: of the matrix products in the blocks of scores that each computes."""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from parallax.model.kernels.blockwise import scores_in_window, tokens_of_block
from parallax.model.kernels.cudnn import CUDNN_BLOCK
from parallax.model.kernels.cudnn_window import piece_in_window
from parallax.model.kernels.splash import has_short_window, splash_block_tokens
from parallax.model.kernels.splash_window import window_tokens
from parallax.model.kernels.triton import filled_tokens, triton_blocks
from parallax.model.kernels.triton_blocks import triton_width
from parallax.sharding.zigzag import ZIGZAG, order_of

# By kernel, the products of each pass: how many are as wide as queries and keys, and how many as values. Forward:
# scores; the output. Backward: scores again, dq and dk; the weights' gradient and dv. Splash and Triton have a kernel
# for dq alone, and make scores and the weights' gradient in both; in a short window splash does not.
KERNEL_PRODUCTS = {
    "xla": {"fwd": (1, 1), "bwd": (3, 2)},
    "cudnn": {"fwd": (1, 1), "bwd": (3, 2)},
    "splash": {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)},
    "splash_window": {"fwd": (1, 1), "bwd": (3, 2)},
    "triton": {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)},
}


def attention_flops(
    kernel: str,
    part: str,
    *,
    rows: int,
    heads: int,
    seq: int,
    d_qk: int,
    d_v: int,
    ranks: int = 1,
    window: int = 0,
    ring: bool = False,
    order: str = ZIGZAG,
) -> int:
    """FLOPs of the matrix products of an attention kernel in a pass, a key of KERNEL_PRODUCTS, 2 for each multiply-add.

    `ranks` context ranks share the queries of `seq` tokens, in an `order`; the FLOPs are those of the rank with the
    most blocks, in a `ring` hop by hop. A `window` is as in Mask.

    >>> attention_flops("splash", "fwd", rows=1, heads=1, seq=128, d_qk=64, d_v=32) == 2 * 128 * 128 * (64 + 32)
    True
    """
    of_qk, of_v = KERNEL_PRODUCTS[kernel][part]
    window = window if window < seq else 0
    if kernel == "triton":
        d_qk, d_v = triton_width(d_qk), triton_width(d_v)
        seq = filled_tokens(seq, max(d_qk, d_v))
    scores = computed_scores(kernel, part, seq, max(d_qk, d_v), ranks, window, ring, order)
    return 2 * rows * heads * scores * (of_qk * d_qk + of_v * d_v)


def kernel_in_window(kernel: str, window: int, seq: int, ranks: int, width: int) -> str:
    """The key of KERNEL_PRODUCTS for layers with this window.

    >>> [kernel_in_window("splash", window, 4096, ranks=1, width=128) for window in (0, 1024, 2048)]
    ['splash', 'splash_window', 'splash']
    """
    short = kernel == "splash" and has_short_window(window if window < seq else 0, ranks, width)
    return f"{kernel}_window" if short else kernel


def tokens_read_twice(windows: Iterable[int], seq: int) -> list[int]:
    """Twice the number of tokens that a token reads on average, in layers with these windows.

    >>> tokens_read_twice([0, 1024, 8192], 8192)
    [8192, 1920, 8192]
    """
    return [window * (2 * seq - window) // seq if 0 < window < seq else seq for window in windows]


def computed_scores(
    kernel: str, part: str, seq: int, width: int, ranks: int, window: int, ring: bool, order: str
) -> int:
    """Scores of a head that a rank computes: those of blocks of which the mask shows some by the tokens' places. If
    context ranks share the queries, cuDNN computes all, in a window those of its pieces."""
    if kernel == "cudnn" and ranks == 1:
        blocks = -(-seq // CUDNN_BLOCK)
        return seq * seq * _blocks_seen(blocks, CUDNN_BLOCK, window) // blocks**2
    if kernel == "cudnn":
        piece = piece_in_window(seq, ranks, window) if window else None
        return seq // ranks * (piece[1] if piece else seq)
    if window and kernel == "xla":
        return scores_in_window(seq, ranks, window, ring, order)
    if kernel == "splash_window":
        return seq * window_tokens(seq, window)[1]
    chunks = 1 if ranks == 1 else 2 * ranks
    size = {
        "xla": lambda: tokens_of_block(seq // chunks),
        "splash": lambda: splash_block_tokens(seq, ranks),
        "triton": lambda: triton_blocks(seq, width)[part != "fwd"],
    }[kernel]()
    blocks = chunks * -(-seq // chunks // size)
    if ranks == 1:
        return _blocks_seen(blocks, size, window) * size**2
    seen = np.minimum(order_of(ranks, blocks, order) + 1, _reach(blocks, size, window))
    return int(seen.sum(axis=1).max()) * size**2


def _blocks_seen(blocks: int, size: int, window: int) -> int:
    """Pairs of blocks of `size` tokens, of a row of `blocks`, in which some query sees some key."""
    reach = _reach(blocks, size, window)
    return reach * (reach + 1) // 2 + (blocks - reach) * reach


def _reach(blocks: int, size: int, window: int) -> int:
    """The number of blocks that one sees, itself included."""
    return min(blocks, (window + size - 2) // size + 1) if window else blocks


def kernel_flops(name: str, float_shapes: Sequence[Sequence[int]], window: int = 0, order: str = ZIGZAG) -> int | None:
    """FLOPs of a traced or compiled Pallas call of this name; None if it is not one of this project's.

    `window` and `order` are as in Mask. `float_shapes` are the shapes of its floating point operands, in order; a batch
    dim of size 1 may be missing.
    """
    if part := re.fullmatch(r"cudnn_(fwd|bwd)", name):
        (rows, queries, heads, width), (_, seq, *_) = float_shapes[:2]
        if queries < seq:  # it is told of neither a diagonal nor a window
            return 2 * rows * heads * queries * seq * sum(KERNEL_PRODUCTS["cudnn"][part[1]]) * width
        return attention_flops("cudnn", part[1], rows=rows, heads=heads, seq=seq, d_qk=width, d_v=width, window=window)
    if part := re.fullmatch(r"mha_(fwd|dq|dkv)", name):
        (*rows, seq, heads, d_qk), _, (*_, d_v), *_ = float_shapes
        sizes = dict(rows=math.prod(rows), heads=heads, seq=seq, d_qk=d_qk, d_v=d_v, window=window)
        return attention_flops("triton", part[1], **sizes)
    part = re.match(r"splash_(mha|window)_(fwd|bwd|dq|dkv)", name)
    if not part:
        return None
    q, _, v, *_ = float_shapes
    *rows, heads, queries, d_qk = q
    seq, d_v = v[-2:]
    sizes = dict(rows=math.prod(rows), heads=heads, seq=seq, d_qk=d_qk, d_v=d_v, ranks=seq // queries)
    sizes |= dict(window=window, order=order)
    return attention_flops({"mha": "splash", "window": "splash_window"}[part[1]], part[2], **sizes)
