"""Attention that never stores its scores: JAX's splash attention for TPU, and for GPU cuDNN's or JAX's for Triton.

JAX's types say over which mesh axes a value varies, but Pallas kernels do not declare them. So the kernels run in a
separate shard_map without that check, the only one in this project. There JAX cannot know which gradients must be
summed. So all inputs are marked outside as varying over the axes of any operand: the transpose of this mark is the sum,
and forward and backward pass are each a program of one device, which sends nothing.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec as P

from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.collectives import as_varying, bound_axis_sizes, vary_alike, varying_axes
from parallax.sharding.zigzag import order_of, own_tokens


class Runs(NamedTuple):
    """Platforms (JAX's names) on which a kernel runs natively, and those that only interpret it, slowly."""

    native: tuple[str, ...]
    interpreted: tuple[str, ...] = ()

    @property
    def platforms(self) -> tuple[str, ...]:
        """All platforms on which it can run."""
        return self.native + self.interpreted


# The values of model.kernel and, only here, the platforms on which each runs.
ATTENTION_KERNELS = {
    "xla": Runs(("cpu", "gpu", "tpu")),
    "cudnn": Runs(("gpu",)),
    "splash": Runs(("tpu",), interpreted=("cpu",)),
    "triton": Runs(("gpu",), interpreted=("cpu",)),
}
# What model.kernel="auto" stands for on each platform, where it supports the model and its rows; elsewhere "xla". The
# kernel for Triton has not been timed on a GPU.
FASTEST_KERNEL = {"gpu": "cudnn", "tpu": "splash"}
LONGEST_BIAS = 16_384  # tokens of a row for which "auto" is cuDNN: its mask of documents is then 0.5 GiB in bfloat16
# Largest head width of cuDNN's attention, as limited by JAX. The limit depends on the compute capability, which is only
# known for a GPU that is present; so GPUs with 9.0 or more are listed by name.
WIDEST_HEAD, WIDEST_SINCE_HOPPER = 128, 256
SINCE_HOPPER = ("H20", "H100", "H200", "H800", "B100", "B200", "B300", "GB10", "RTX 50", "Blackwell")
BEFORE_AMPERE = ("P40", "P100", "V100", "T4", "GTX", "TITAN", "Quadro", "RTX 20")  # GPUs without this attention
CUDNN_BLOCK = 128  # tokens on a side of a block of its forward kernel on H100, by the kernel's name
# Tokens on a side of a block of the kernels for Triton: the most for the forward pass, and for the backward pass JAX's
# default. Blocks are in shared memory: float32 blocks with twice as many entries did not compile for H100.
TRITON_BLOCK, TRITON_BACKWARD_BLOCK, TRITON_BLOCK_ENTRIES = 128, 32, 128 * 64
TRITON_LEAST_WIDTH, TRITON_WIDEST = 16, 256  # head widths that these kernels multiply
LANES = 128  # lanes of a TPU's vector registers; blocks are multiples of it
LARGEST_BLOCK = 512  # tokens: the default of MaxText; larger ones compute more of what the mask hides


def causal_attention(q_BSHJ: Array, k_BTGJ: Array, v_BTGK: Array, segments_BT: Array, *, scale: float) -> Array:
    """Softmax attention of each token to those before it in its own segment, [B, S, H, K]. No communication.

    Keys, values and segments are those of whole rows, in order. So are queries, or they are those of this context rank,
    see parallax/sharding/zigzag.py. The kernel holds one block of scores at a time and skips blocks after the diagonal.
    The backward pass recomputes them from q, k, v, the output and each row's logsumexp in float32. `S` is a multiple of
    128, or of 256 if context ranks share the queries, since a block must not cross a chunk's border.
    """
    arrays = (*(x.swapaxes(1, 2) for x in (q_BSHJ * scale, k_BTGJ, v_BTGK)), segments_BT)
    return _attention(_splash_kernel_of, *vary_alike(arrays)).swapaxes(1, 2)


def triton_attention(q_BSHJ: Array, k_BSGJ: Array, v_BSGJ: Array, segments_BS: Array, *, scale: float) -> Array:
    """`causal_attention` of whole rows by JAX's kernels for Triton, with heads of one width, [B, S, H, J]. No
    communication.

    The M query heads that share a key head are a batch dim of the calls, so key heads are not repeated; their gradients
    are summed over that dim. `S` is a multiple of 32.
    """
    q_MBSGJ = rearrange(q_BSHJ * scale, "B S (G M) J -> M B S G J", G=k_BSGJ.shape[2])
    out = _attention(_triton_kernel_of, *vary_alike((q_MBSGJ, k_BSGJ, v_BSGJ, segments_BS)))
    return rearrange(out, "M B S G J -> B S (G M) J")


def cudnn_attention(
    q_BSHJ: Array, k_BTGJ: Array, v_BTGJ: Array, mask_B1ST: Array, *, is_causal: bool, scale: float
) -> Array:
    """Softmax attention by cuDNN, of heads of one width, [B, S, H, J]. No communication.

    With `is_causal`, for queries and keys in order, blocks after the diagonal are skipped. The mask hides further keys:
    cuDNN takes it as a bias and computes masked scores, too. JAX looks for a GPU when it traces the call. If there is
    none, a call with the same operands, results and products takes its place, so that a step for GPUs can be reported,
    planned and compiled on any machine.
    """
    arrays = q_BSHJ, k_BTGJ, v_BTGJ, mask_B1ST
    if platform_traced() and not is_for_absent_gpus():
        how = dict(is_causal=is_causal, scale=scale, implementation="cudnn")
        return _named(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask, **how), *arrays)

    def described(q: Array, k: Array, v: Array, mask: Array) -> Array:
        bias = jnp.where(mask, 0, jnp.finfo(q.dtype).min / 2).astype(q.dtype)
        return described_attention(q, k, v, bias, scale)

    return _named(described, *vary_alike(arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _named(attention: Callable, q: Array, k: Array, v: Array, mask: Array) -> Array:
    """`attention(q, k, v, mask)` with names, for remat policies, on the result and on each row's logsumexp. JAX does
    not name the latter, and without it the backward pass would recompute both."""
    return attention(q, k, v, mask)


def _named_forward(attention: Callable, q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Callable]:
    out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask), q, k, v)
    name = functools.partial(checkpoint_name, name="core")
    named = name(out)
    # Only the logsumexp is float32.
    keep = lambda leaf: named if leaf is out else name(leaf) if leaf.dtype == jnp.float32 else leaf  # noqa: E731
    return named, jax.tree.map(keep, pull)


def _named_backward(attention: Callable, pull: Callable, dy: Array) -> tuple[Array, Array, Array, None]:
    return *pull(dy), None


_named.defvjp(_named_forward, _named_backward)


def widest_head(kind: str) -> int:
    """Largest head width that cuDNN's attention supports on devices of this kind; the largest of all kinds for "".

    >>> widest_head("NVIDIA A100-SXM4-80GB"), widest_head("NVIDIA H100")
    (128, 256)
    """
    return WIDEST_SINCE_HOPPER if not kind or any(name in kind for name in SINCE_HOPPER) else WIDEST_HEAD


def platform_traced() -> str:
    """Platform for which a program is being traced, as "cpu"; "" for an abstract mesh, which is for accelerators."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    return jax.default_backend() if mesh.empty else ""


def is_for_absent_gpus() -> bool:
    """Whether the program being traced is for GPUs that are not present: it can be compiled but not run."""
    return platform_traced() == "gpu" != jax.default_backend()


def splash_block_tokens(seq: int, ranks: int = 1) -> int:
    """Tokens on a side of a block of scores: the largest power of two, from 128 to 512, that divides `seq`, or a chunk
    of it if `ranks` context ranks share the queries.

    >>> [splash_block_tokens(seq) for seq in (128, 768, 2048, 4096)], splash_block_tokens(2048, ranks=4)
    ([128, 256, 512, 512], 256)
    """
    tokens = seq if ranks == 1 else seq // (2 * ranks)
    return next(size for size in (LARGEST_BLOCK, 256, LANES) if tokens % size == 0)


def triton_block_tokens(seq: int, width: int) -> int:
    """The same for the forward pass of the kernel for Triton: from 32 to 128, fewer if heads are wide.

    >>> [triton_block_tokens(seq, 64) for seq in (32, 192, 2048)], triton_block_tokens(2048, 192)
    ([32, 64, 128], 32)
    """
    most = max(TRITON_BACKWARD_BLOCK, TRITON_BLOCK_ENTRIES // triton_width(width))
    return next(size for size in (TRITON_BLOCK, 64, TRITON_BACKWARD_BLOCK) if seq % size == 0 and size <= most)


def triton_width(width: int) -> int:
    """The head width that the kernels for Triton multiply: the next power of two."""
    return max(TRITON_LEAST_WIDTH, pl.next_power_of_2(width))


# ---- the kernels and their gradients


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Pull:
    """How to rebuild the backward pass: its tree structure, and the source of each of its arrays. JAX passes it on
    unchanged; it is equal only to itself."""

    structure: Any
    places: tuple[int, ...]  # indices into q, k, v, arrays of the kernel, the output and the other residuals


class SplashKernel(NamedTuple):
    """Splash attention of a row, with tables of the blocks to compute; segments of queries [B, S] and keys [B, T]."""

    of_row: Callable
    segments: splash.SegmentIds

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        return jax.vmap(self.of_row)(q, k, v, self.segments)


class TritonKernel(NamedTuple):
    """Attention of whole rows with these segments, by the kernels for Triton; Pallas interprets them on CPUs."""

    segments: Array

    def __call__(self, q_MBSGJ: Array, k: Array, v: Array) -> Array:
        size = triton_block_tokens(k.shape[1], k.shape[-1])
        back = TRITON_BACKWARD_BLOCK
        sizes = dict(block_q_dkv=back, block_kv_dkv=back, block_q_dq=back, block_kv_dq=back)
        how = dict(causal=True, interpret=platform_traced() == "cpu")
        blocks = _for_triton().BlockSizes(block_q=size, block_k=size, **sizes)
        attend = lambda q: _for_triton().mha(q, k, v, self.segments, block_sizes=blocks, **how)  # noqa: E731
        return jax.vmap(attend)(q_MBSGJ)


@functools.cache
def _for_triton() -> Any:
    """JAX's module; on import it warns that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    return attention


KernelOf = Callable[[Array, Array, Array], Any]  # of queries, keys and segments


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kernel_of: KernelOf, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return unchecked(lambda q, k, v, kernel: kernel(q, k, v), q, k, v, kernel_of(q, k, segments))


def _forward(kernel_of: KernelOf, q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Any]:
    made = {}

    def run(q: Array, k: Array, v: Array, kernel: Callable) -> tuple[Array, list[Array]]:
        out, pull = jax.vjp(kernel, q, k, v)
        leaves, structure = jax.tree.flatten(pull)
        known = [q, k, v, *jax.tree.leaves(kernel), out]
        rest = [leaf for leaf in leaves if all(leaf is not x for x in known)]
        place = {id(x): at for at, x in enumerate([*known, *rest])}
        made["pull"] = Pull(structure, tuple(place[id(leaf)] for leaf in leaves))
        return out, rest

    out, rest = unchecked(run, q, k, v, kernel_of(q, k, segments))
    out, rest = jax.tree.map(functools.partial(checkpoint_name, name="core"), (out, rest))
    return out, (q, k, v, segments, out, rest, made["pull"])


def _backward(kernel_of: KernelOf, saved: Any, dy: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, rest, pull = saved

    def run(dy: Array, *arrays: Any) -> tuple[Array, ...]:
        leaves = jax.tree.leaves(arrays)
        return jax.tree.unflatten(pull.structure, [leaves[at] for at in pull.places])(dy)

    # The kernel's tables and segments are recomputed, so that a layer saves none.
    return *unchecked(run, dy, q, k, v, kernel_of(q, k, segments), out, rest), None


_attention.defvjp(_forward, _backward)


def _triton_kernel_of(q: Array, k: Array, segments: Array) -> TritonKernel:
    return TritonKernel(segments)


def _splash_kernel_of(q: Array, k: Array, segments: Array) -> SplashKernel:
    """The kernel for queries [B, H, S, J] and keys [B, G, T, J] of rows with these segments, [B, T]. If there are fewer
    queries than keys, they are those of this context rank."""
    (heads, queries), keys = q.shape[1:3], k.shape[2]
    ranks = keys // queries
    kernel = _splash_kernel(heads, keys, ranks, interpreted=platform_traced() == "cpu")
    if ranks == 1:
        return SplashKernel(kernel, splash.SegmentIds(segments, segments))

    def own(table: Array) -> Array:  # [queries], or [1, blocks of queries, blocks of keys]
        dim = table.ndim // 2
        size = table.shape[dim] // ranks
        return lax.dynamic_slice_in_dim(table, lax.axis_index(CONTEXT_AXIS) * size, size, dim)

    return SplashKernel(jax.tree.map(own, kernel), splash.SegmentIds(own_tokens(segments, axis=1), segments))


class ContextMask(splash.CausalMask):
    """The causal mask for keys in order and queries in the order in which context ranks hold them."""

    def __init__(self, seq: int, ranks: int):
        super().__init__((seq, seq))
        self.q_sequence = order_of(ranks, seq).reshape(-1).astype(np.int32)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """The mask of a block. Most blocks have one value, so entries need not be compared: at 131,072 tokens there are
        65,536 blocks."""
        queries, keys = self.q_sequence[block[0]], block[1]
        shape = len(queries), keys.stop - keys.start
        if queries.min() >= keys.stop - 1:
            return np.full(shape, True)
        return super().__getitem__(block) if queries.max() >= keys.start else np.full(shape, False)


@functools.cache
def _splash_kernel(heads: int, seq: int, ranks: int, interpreted: bool) -> Callable:
    """The kernel of all context ranks: its tables are concatenated in the order of the ranks. Pallas interprets it on
    CPUs."""
    size = splash_block_tokens(seq, ranks)
    forward = dict(block_q=size, block_kv=size, block_kv_compute=size)
    # Two backward kernels, one for dq: a fused kernel would store a float32 dq for every block of keys.
    backward = dict(block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size, block_q_dq=size, block_kv_dq=size)
    mask = splash.MultiHeadMask([ContextMask(seq, ranks)] * heads)
    with jax.ensure_compile_time_eval():  # constants, even if they are first needed during tracing
        return splash.make_splash_mha(
            mask,
            block_sizes=splash.BlockSizes(**forward, **backward),
            head_shards=1,
            q_seq_shards=ranks,
            interpret=interpreted,
        )


def unchecked(function: Callable, *arrays: Any) -> Any:
    """`function(*arrays)` on one device, without replication types. Operands are arrays or trees; results vary over
    every axis over which an operand varies.

    For JAX's Pallas kernels, which do not declare replication types, so that the check would refuse their results. The
    code around the call is checked: the results have the correct types.

    Do not differentiate it: a replicated operand's gradient would be that of one device.
    """
    if not bound_axis_sizes():
        return function(*arrays)
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
    # A bitcast to the same type has no known replication.
    unknown = lambda x: lax.bitcast_convert_type(x, x.dtype)  # noqa: E731
    run = lambda *arrays: function(*jax.tree.map(unknown, arrays))  # noqa: E731
    mesh = jax.sharding.get_abstract_mesh()
    local = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=set(), check_vma=False)
    return jax.tree.map(lambda x: as_varying(x, axes), local(*arrays))


# ---- cuDNN's operands, results and products as Pallas calls; for GPUs that are not present, as opaque calls


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def described_attention(q_BSHJ: Array, k_BTGJ: Array, v_BTGJ: Array, bias_B1ST: Array, scale: float) -> Array:
    """The computation of cuDNN, with one call for each of its calls; for tracing, and interpreted on CPU for tests. If
    there are as many queries as keys, they are in order, and attention is causal."""
    return _described_forward(q_BSHJ, k_BTGJ, v_BTGJ, bias_B1ST, scale)[0]


def _described_forward(q: Array, k: Array, v: Array, bias: Array, scale: float) -> tuple[Array, Any]:
    def kernel(q_ref, k_ref, v_ref, bias_ref, out_ref, logsumexp_ref):
        scores_BGHST = _scores(q_ref[...], k_ref[...], bias_ref[...], scale)
        logsumexp = jax.nn.logsumexp(scores_BGHST, axis=-1, keepdims=True)
        weights = jnp.exp(scores_BGHST - logsumexp).astype(v_ref.dtype)
        out_ref[...] = jnp.einsum("BGHST,BTGJ->BSGHJ", weights, v_ref[...]).reshape(out_ref.shape)
        logsumexp_ref[...] = logsumexp.reshape(logsumexp_ref.shape)

    rows, seq, heads, _ = q.shape
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((rows, heads, seq), jnp.float32)]
    out, logsumexp = unchecked(_described_call("cudnn_fwd", kernel, shapes), q, k, v, bias)
    return out, (q, k, v, bias, out, logsumexp)


def _described_backward(scale: float, saved: Any, dy: Array) -> tuple[Array, Array, Array, Array]:
    def kernel(q_ref, k_ref, v_ref, bias_ref, out_ref, logsumexp_ref, dy_ref, dq_ref, dk_ref, dv_ref):
        q, k, v, dy = q_ref[...], k_ref[...], v_ref[...], _by_group(dy_ref[...], k_ref.shape[2])
        scores_BGHST = _scores(q, k, bias_ref[...], scale)
        weights = jnp.exp(scores_BGHST - logsumexp_ref[...].reshape(*scores_BGHST.shape[:-1], 1))
        dv_ref[...] = jnp.einsum("BGHST,BSGHJ->BTGJ", weights.astype(v.dtype), dy)
        dweights = jnp.einsum("BSGHJ,BTGJ->BGHST", dy, v, preferred_element_type=jnp.float32)
        own = (dy.astype(jnp.float32) * _by_group(out_ref[...], k.shape[2])).sum(axis=-1)
        dscores = (scale * weights * (dweights - rearrange(own, "B S G H -> B G H S 1"))).astype(q.dtype)
        dq_ref[...] = jnp.einsum("BGHST,BTGJ->BSGHJ", dscores, k).reshape(dq_ref.shape)
        dk_ref[...] = jnp.einsum("BGHST,BSGHJ->BTGJ", dscores, _by_group(q, k.shape[2]))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3]]
    grads = unchecked(_described_call("cudnn_bwd", kernel, shapes), *saved, dy)
    return *grads, jnp.zeros_like(saved[3])


described_attention.defvjp(_described_forward, _described_backward)


def _described_call(name: str, kernel: Callable, shapes: list[jax.ShapeDtypeStruct]) -> Callable:
    """For GPUs that are not present: an opaque call with the right operands and results. An interpreted kernel would be
    compiled as written, with all scores in memory."""
    if is_for_absent_gpus():
        return jax.ffi.ffi_call(name, shapes)
    return pl.pallas_call(kernel, shapes, name=name, interpret=True)


def _by_group(x_BSHJ: Array, groups: int) -> Array:
    """Query heads by group, [B, S, G, H / G, J]."""
    return rearrange(x_BSHJ, "B S (G H) J -> B S G H J", G=groups)


def _scores(q_BSHJ: Array, k_BTGJ: Array, bias_B1ST: Array, scale: float) -> Array:
    """Scores in float32, [B, G, H / G, S, T]."""
    q_BSGHJ = _by_group(q_BSHJ, k_BTGJ.shape[2])
    scores = jnp.einsum("BSGHJ,BTGJ->BGHST", q_BSGHJ, k_BTGJ, preferred_element_type=jnp.float32)
    queries, keys = scores.shape[-2:]
    is_seen_ST = jnp.tri(queries, keys, dtype=bool) if queries == keys else jnp.full((queries, keys), True)
    return jnp.where(is_seen_ST, scale * scores + bias_B1ST[:, :, None], -jnp.inf)


# ---- what the kernels cost


def attention_flops(part: str, *, rows: int, heads: int, seq: int, d_qk: int, d_v: int, ranks: int = 1) -> int:
    """FLOPs of the matrix products of a splash kernel, 2 for each multiply-add, in the blocks that it computes.

    `part` is "fwd", "dq" or "dkv": the backward pass is the last two, and both recompute the scores. `ranks` context
    ranks share the queries of `seq` tokens, and each computes the same number of blocks.

    >>> attention_flops("fwd", rows=1, heads=1, seq=128, d_qk=64, d_v=32) == 2 * 128 * 128 * (64 + 32)
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
    return attention_flops(part[1], **sizes)
