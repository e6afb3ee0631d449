"""Tensor-parallel families and forms of context parallelism: the strings from which layers are built."""

from typing import Any, NamedTuple

import jax
from jax import Array, lax

from parallax.sharding.activations import CONTEXT_AXIS, SEQ, activation
from parallax.sharding.collectives import reshard
from parallax.sharding.streams import Streams, as_streams, gather_as_streams
from parallax.sharding.zigzag import ZIGZAG

# Which keys a query attends to: all that the device holds, in order; gathered ones, with queries sharded over context
# ranks; those of all ranks, one rank after the other.
WHOLE, GATHERED, RING = "whole", "gathered", "ring"


class ContextForm(NamedTuple):
    """How attention's tokens are sharded: whether cp shards seq of queries and of keys, or their heads."""

    queries: str  # of seq
    keys: str
    meets: str  # WHOLE, GATHERED or RING
    heads: str = "heads/tp"
    order: str = ZIGZAG  # of the tokens on context ranks


CONTEXTS = {
    # Every rank has its queries and all keys, gathered.
    "all_gather": ContextForm(SEQ, "seq", GATHERED),
    # Every rank has its queries; keys move from rank to rank.
    "ring": ContextForm(SEQ, SEQ, RING),
    # Every rank has all tokens of its heads (Jacobs et al. 2023).
    "ulysses": ContextForm("seq", "seq", WHOLE, f"heads/tp/{CONTEXT_AXIS}"),
}


class Family(NamedTuple):
    """Layouts of projections; `{dim}` is the contracted dim."""

    contracted: str  # layout of that dim, in a projection's input and in its kernel
    keeps_tp: bool  # whether the kernel's output dims are sharded over tp
    context: ContextForm = ContextForm(SEQ, SEQ, WHOLE)
    streams: bool = False  # whether whole tokens are streams of each rank's
    norms_apart: bool = False  # whether the gradient of an MLP's norm is apart from its products

    def read(self, residual: str, x: Array) -> Array | Streams:
        """What projections of d_model read of the residual stream, which has the layout `residual`."""
        pattern = f"{residual} -> {self.input('d_model')}"
        return gather_as_streams(pattern, x) if self.streams else reshard(pattern, x)

    def normed(self, x: Array | Streams) -> Array | Streams:
        """What an MLP's products read of its normed input. If norms are apart, the compiler fuses nothing that reads
        its gradient into these products."""
        return with_gradient_apart(x) if self.norms_apart else x

    def given_back(self, x: Array) -> Array | Streams:
        """All tokens of an activation [B, S, ...] in the form in which `read` has them."""
        return as_streams(x) if self.streams else x

    def input(self, dim: str, *, seq: str = SEQ) -> str:
        """The layout that an input of `dim` must have.

        >>> FAMILIES["scatter"].input("d_model").split()[-1]
        'd_model/tp'
        """
        return activation(self.contracted.format(dim=dim), seq=seq)

    def into(self, dim: str, out: str) -> str:
        """The layout of a kernel from `dim` to `out`; `out` says how the output is sharded.

        >>> [FAMILIES[name].into("d_model", "d_ff/tp") for name in FAMILIES]
        ['d_model d_ff/tp', 'd_model/tp d_ff', 'd_model d_ff/tp']
        """
        out = out if self.keeps_tp else out.replace("/tp", "")
        return f"{self.contracted.format(dim=dim)} {out}"

    def back(self, dims: str) -> str:
        """Layout of a kernel from sharded `dims` back to d_model: partial sums, reduce-scattered, in all families.

        >>> FAMILIES["scatter"].back("d_ff/tp")
        'd_ff/tp d_model'
        """
        return f"{dims} d_model"


@jax.custom_vjp
def with_gradient_apart(x: Any) -> Any:
    """The same arrays, whose gradients are behind a barrier: the compiler writes them, and fuses them with nothing that
    reads them."""
    return x


with_gradient_apart.defvjp(lambda x: (x, None), lambda _, dx: (lax.optimization_barrier(dx),))


FAMILIES = {
    # Gather the input over tp; each rank computes its own columns of the output.
    "column_row": Family("{dim}", keeps_tp=True),
    # Keep the input sharded; each rank computes a partial sum of the whole output, which is reduce-scattered.
    "scatter": Family("{dim}/tp", keeps_tp=False),
    # Column, then row, but the gather and the reduce-scatter are permutes of each rank's tokens.
    "streams": Family("{dim}", keeps_tp=True, streams=True),
}
