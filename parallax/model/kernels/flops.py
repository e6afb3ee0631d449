"""FLOPs of attention kernels: of the matrix products in the blocks of scores that each computes."""

import math
import re
from collections.abc import Sequence

from parallax.model.kernels.blockwise import tokens_of_block
from parallax.model.kernels.cudnn import CUDNN_BLOCK
from parallax.model.kernels.splash import splash_block_tokens
from parallax.model.kernels.triton import TRITON_BACKWARD_BLOCK, triton_block_tokens, triton_width


def blockwise_flops(part: str, *, rows: int, heads: int, seq: int, d_qk: int, d_v: int, ranks: int = 1) -> int:
    """FLOPs of the matrix products of `blockwise_attention`, 2 for each multiply-add, in the blocks that it computes.

    `part` is "fwd" or "bwd", which recomputes the scores. `ranks` context ranks share the queries of `seq` tokens, and
    each computes the same number of blocks.

    >>> blockwise_flops("fwd", rows=1, heads=1, seq=128, d_qk=64, d_v=32) == 2 * 128 * 128 * (64 + 32)
    True
    """
    chunks = 1 if ranks == 1 else 2 * ranks
    size = tokens_of_block(seq // chunks)
    blocks = chunks * -(-seq // chunks // size)
    widths = {"fwd": d_qk + d_v, "bwd": 3 * d_qk + 2 * d_v}  # scores, output; scores, dq, dk, dp, dv
    return 2 * rows * heads * blocks * (blocks + 1) // 2 // ranks * size**2 * widths[part]


def splash_flops(part: str, *, rows: int, heads: int, seq: int, d_qk: int, d_v: int, ranks: int = 1) -> int:
    """FLOPs of the matrix products of a splash kernel, 2 for each multiply-add, in the blocks that it computes.

    `part` is "fwd", "dq" or "dkv": the backward pass is the last two, and both recompute the scores. `ranks` context
    ranks share the queries of `seq` tokens, and each computes the same number of blocks.

    >>> splash_flops("fwd", rows=1, heads=1, seq=128, d_qk=64, d_v=32) == 2 * 128 * 128 * (64 + 32)
    True
    """
    size = splash_block_tokens(seq, ranks)
    blocks = seq // size
    scores = rows * heads * blocks * (blocks + 1) // 2 // ranks * size * size
    # fwd: scores, output. dq: scores, dp, dq. dkv: scores, dp, dv, dk.
    widths = {"fwd": d_qk + d_v, "dq": 2 * d_qk + d_v, "dkv": 2 * d_qk + 2 * d_v}
    return 2 * scores * widths[part]


def cudnn_flops(part: str, *, rows: int, heads: int, seq: int, d_qk: int, d_v: int, ranks: int = 1) -> int:
    """The same for cuDNN's kernels, which recompute the scores once: `part` is "fwd" or "bwd".

    For whole rows it skips blocks after the diagonal; if context ranks share the queries, it skips none.
    """
    widths = {"fwd": d_qk + d_v, "bwd": 3 * d_qk + 2 * d_v}  # scores, output; scores, dq, dk, dp, dv
    blocks = -(-seq // CUDNN_BLOCK)
    scores = seq * seq * (blocks + 1) // (2 * blocks) if ranks == 1 else seq * seq // ranks
    return 2 * rows * heads * scores * widths[part]


def triton_flops(part: str, *, rows: int, heads: int, seq: int, d_qk: int, d_v: int, ranks: int = 1) -> int:
    """The same for the kernels for Triton, of whole rows and heads padded to a power of two: `part` is "fwd" or "bwd",
    which recomputes the scores twice, for the gradients of keys and of queries."""
    width = triton_width(max(d_qk, d_v))
    size = triton_block_tokens(seq, width) if part == "fwd" else TRITON_BACKWARD_BLOCK
    blocks = seq // size
    products = {"fwd": 2, "bwd": 7}  # scores, output; scores, dv, dp, dk, and scores, dp, dq
    return 2 * rows * heads * blocks * (blocks + 1) // 2 * size**2 * width * products[part]


def kernel_flops(name: str, float_shapes: Sequence[Sequence[int]]) -> int | None:
    """FLOPs of a traced or compiled Pallas call of this name; None if it is not one of this project's.

    `float_shapes` are the shapes of its floating point operands, in order; a batch dim of size 1 may be missing.
    """
    if part := re.fullmatch(r"cudnn_(fwd|bwd)", name):
        (rows, queries, heads, width), (_, seq, *_) = float_shapes[:2]
        return cudnn_flops(part[1], rows=rows, heads=heads, seq=seq, d_qk=width, d_v=width, ranks=seq // queries)
    if part := re.fullmatch(r"mha_(preprocess|forward|backward)(_backward)?", name):
        (*rows_and_heads, seq, heads, width), *_ = float_shapes
        sizes = dict(rows=math.prod(rows_and_heads), heads=heads, seq=seq, d_qk=width, d_v=width)
        return 0 if part[2] else triton_flops({"forward": "fwd", "backward": "bwd"}[part[1]], **sizes)
    part = re.match(r"splash_mha_(fwd|dq|dkv)_", name)
    if not part:
        return None
    q, _, v, *_ = float_shapes
    *rows, heads, queries, d_qk = q
    seq, d_v = v[-2:]
    sizes = dict(rows=math.prod(rows), heads=heads, seq=seq, d_qk=d_qk, d_v=d_v, ranks=seq // queries)
    return splash_flops(part[1], **sizes)
