"""cuDNN's attention, on GPUs, and a description of it for GPUs that are not present."""

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import Partial

from parallax.model.kernels.cudnn_window import attention_in_pieces, piece_in_window, starts_and_shown
from parallax.model.kernels.pallas import pallas_attention, unchecked
from parallax.model.mask import Mask
from parallax.sharding.collectives import vary_alike
from parallax.sharding.platform import platform_traced

LONGEST_BIAS = 16_384  # tokens of a row for which "auto" is cuDNN: its mask of documents is then 0.5 GiB in bfloat16
# Largest head width of cuDNN's attention, as limited by JAX. The limit depends on the compute capability, which is only
# known for a GPU that is present; so GPUs with 9.0 or more are listed by name.
WIDEST_HEAD, WIDEST_SINCE_HOPPER = 128, 256
SINCE_HOPPER = ("H20", "H100", "H200", "H800", "B100", "B200", "B300", "GB10", "RTX 50", "Blackwell")
WINDOWS_SINCE = (9, 10, 2)  # cuDNN's version in which a call may have a bias and a window
CUDNN_BLOCK = 128  # tokens on a side of a block of its forward kernel on H100, by the kernel's name


def cudnn_attention(q_BSHJ: Array, k_BTGJ: Array, v_BTGJ: Array, mask: Mask, *, scale: float) -> Array:
    """Softmax attention by cuDNN, of heads of one width, [B, S, H, J]. No communication.

    Of whole rows blocks after the diagonal are skipped, and those before a window, which is then cuDNN's own; queries
    that context ranks share are in pieces in a window, each with the keys in its reach. What else the mask hides, as
    other documents, cuDNN takes as a bias, and computes these scores, too. JAX looks for a GPU when it traces the call.
    If there is none, a call with the same operands and results takes its place, so that a step for GPUs can be
    reported, planned and compiled on any machine.
    """
    queries = q_BSHJ.shape[1]
    is_causal = queries == k_BTGJ.shape[1]
    if mask.hides_earlier:
        return pallas_attention(CudnnKernelOf(scale), *vary_alike((q_BSHJ, k_BTGJ, v_BTGJ, mask)))
    shown_B1ST = mask.same_segment() if is_causal else mask.dense(queries)
    arrays = q_BSHJ, k_BTGJ, v_BTGJ, shown_B1ST
    if platform_traced() and not is_for_absent_gpus():
        by_jax = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, scale=scale)
        return _named(lambda q, k, v, mask: by_jax(q, k, v, mask=mask, implementation="cudnn"), *arrays)
    return _named(lambda q, k, v, mask: described_attention(q, k, v, _bias(mask, q)), *vary_alike(arrays))


class CudnnKernelOf(NamedTuple):
    """Makes the kernel for layers with windows."""

    scale: float

    def __call__(self, q: Array, k: Array, mask: Mask) -> Partial:
        queries, seq = q.shape[1], k.shape[1]
        if queries == seq:
            return Partial(functools.partial(_by_cudnn, self.scale, mask.window), _bias(mask.same_segment(), q))
        by_cudnn = functools.partial(_by_cudnn, self.scale, 0)
        piece = piece_in_window(seq, seq // queries, mask.window) if mask.window else None
        if piece is None:
            return Partial(by_cudnn, _bias(mask.dense(queries), q))
        starts_n, shown = starts_and_shown(mask, queries, piece)
        return Partial(functools.partial(attention_in_pieces, by_cudnn), _bias(shown, q), starts_n)


def _by_cudnn(scale: float, window: int, bias: Array, q: Array, k: Array, v: Array) -> Array:
    if not platform_traced() or is_for_absent_gpus():
        return described_attention(q, k, v, bias)
    reach, is_causal = (window - 1, 0) if window else None, q.shape[1] == k.shape[1]
    by_jax = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, scale=scale, local_window_size=reach)
    return by_jax(q, k, v, bias=bias, implementation="cudnn")


def _bias(mask: Array, q: Array) -> Array:
    return jnp.where(mask, 0, jnp.finfo(q.dtype).min / 2).astype(q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _named(attention: Callable, q: Array, k: Array, v: Array, mask: Array) -> Array:
    """`attention(q, k, v, mask)` with names, for remat policies, on the result and on each row's logsumexp. JAX does
    not name the latter, and without it the backward pass would recompute both."""
    return attention(q, k, v, mask)


def _named_forward(attention: Callable, q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, Callable]:
    out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask), q, k, v)
    named = checkpoint_name(out, "core")

    def saved(leaf: Array) -> Array:
        if leaf is out:
            return named
        return checkpoint_name(leaf, "core") if leaf.dtype == jnp.float32 else leaf  # only the logsumexp is float32

    return named, jax.tree.map(saved, pull)


def _named_backward(attention: Callable, pull: Callable, dy: Array) -> tuple[Array, Array, Array, None]:
    return *pull(dy), None


_named.defvjp(_named_forward, _named_backward)


def widest_head(kind: str) -> int:
    """Largest head width that cuDNN's attention supports on devices of this kind; the largest of all kinds for "".

    >>> widest_head("NVIDIA A100-SXM4-80GB"), widest_head("NVIDIA H100")
    (128, 256)
    """
    return WIDEST_SINCE_HOPPER if not kind or any(name in kind for name in SINCE_HOPPER) else WIDEST_HEAD


def cudnn_version() -> tuple[int, ...]:
    """The version of cuDNN's package that is installed beside JAX; () if it comes from elsewhere."""
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            return tuple(map(int, metadata.version(package).split(".")[:3]))
        except metadata.PackageNotFoundError:
            continue
    return ()


def is_for_absent_gpus() -> bool:
    """Whether the program being traced is for GPUs that are not present: it can be compiled but not run."""
    return platform_traced() == "gpu" != jax.default_backend()


# ---- cuDNN's operands and results as opaque calls, for GPUs that are not present


@jax.custom_vjp
def described_attention(q_BSHJ: Array, k_BTGJ: Array, v_BTGJ: Array, bias_B1ST: Array) -> Array:
    """As many calls as cuDNN gets, with its operands and results; they can be traced, and compiled, but not run."""
    return _described_forward(q_BSHJ, k_BTGJ, v_BTGJ, bias_B1ST)[0]


def _described_forward(q: Array, k: Array, v: Array, bias: Array) -> tuple[Array, Any]:
    rows, seq, heads, _ = q.shape
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((rows, heads, seq), jnp.float32)]
    out, logsumexp = unchecked(jax.ffi.ffi_call("cudnn_fwd", shapes), q, k, v, bias)
    return out, (q, k, v, bias, out, logsumexp)


def _described_backward(saved: Any, dy: Array) -> tuple[Array, Array, Array, Array]:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3]]
    return *unchecked(jax.ffi.ffi_call("cudnn_bwd", shapes), *saved, dy), jnp.zeros_like(saved[3])


described_attention.defvjp(_described_forward, _described_backward)
