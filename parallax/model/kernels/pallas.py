"""JAX's Pallas kernels without the check of replication types, and the gradient of those for attention.

JAX's types say over which mesh axes a value varies, but JAX's Pallas kernels do not declare them. A kernel of ours
could declare its results, but interpreted on CPUs its body is checked, too: a loop that starts from zeros is refused,
since they vary over no axis and what is added to them does. So kernels run in a separate shard_map without that check,
the only one in this project. There JAX cannot know which gradients must be summed. So all inputs are marked outside as
varying over the axes of any operand: the transpose of this mark is the sum, and forward and backward pass are each a
program of one device, which sends nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parallax.model.mask import Mask
from parallax.sharding.collectives import as_varying, bound_axis_sizes, varying_axes


def unchecked(function: Callable, *arrays: Any) -> Any:
    """`function(*arrays)` on one device, without replication types. Operands are arrays or trees; results vary over
    every axis over which an operand varies.

    For kernels, of which the check would refuse the results or the interpreted body, and for calls of cuDNN. The code
    around the call is checked: the results have the correct types.

    Do not differentiate it: a replicated operand's gradient would be that of one device.
    """
    if not bound_axis_sizes():
        return function(*arrays)
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))

    def run(*arrays: Any) -> Any:
        # A bitcast to the same type has no known replication.
        return function(*jax.tree.map(lambda x: lax.bitcast_convert_type(x, x.dtype), arrays))

    mesh = jax.sharding.get_abstract_mesh()
    local = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=set(), check_vma=False)
    return jax.tree.map(lambda x: as_varying(x, axes), local(*arrays))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Pull:
    """How to rebuild the backward pass: its tree structure, and the source of each of its arrays. JAX passes it on
    unchanged; it is equal only to itself."""

    structure: Any
    sources: tuple[int, ...]  # indices into the operands, arrays of the kernel, the output and the other residuals

    def rebuilt(self, *arrays: Any) -> Callable:
        """The backward pass, from arrays or trees in the order of `sources`."""
        leaves = jax.tree.leaves(arrays)
        return jax.tree.unflatten(self.structure, [leaves[index] for index in self.sources])


def vjp_in_parts(kernel: Callable, *operands: Array) -> tuple[Array, list[Array], Pull]:
    """`jax.vjp` of a kernel that is a tree of its arrays: the output, what the backward pass reads beside it, the
    operands and these arrays, and how to rebuild it."""
    out, pull = jax.vjp(kernel, *operands)
    leaves, structure = jax.tree.flatten(pull)
    arrays = [*operands, *jax.tree.leaves(kernel), out]
    others = [leaf for leaf in leaves if all(leaf is not x for x in arrays)]
    arrays += others
    sources = (next(index for index, x in enumerate(arrays) if x is leaf) for leaf in leaves)
    return out, others, Pull(structure, tuple(sources))


KernelOf = Callable[[Array, Array, Mask], Any]  # of queries and keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pallas_attention(
    kernel_of: KernelOf, q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None = None
) -> Array:
    """`kernel_of(q, k, mask)(q, k, v)`, also with `sinks` if there are any, with a gradient that saves what the
    kernel's own does, by name. Operands vary over the same axes."""
    operands = _operands(q, k, v, sinks)

    def run(mask: Mask) -> Array:
        return unchecked(lambda *operands: operands[-1](*operands[:-1]), *operands, kernel_of(q, k, mask))

    return mask.by_window(run)


def _operands(q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, ...]:
    return (q, k, v) if sinks is None else (q, k, v, sinks)


def _forward(kernel_of: KernelOf, q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None) -> tuple[Array, Any]:
    def run(*operands_and_kernel: Any) -> tuple[Array, list[Array], Pull]:
        *operands, kernel = operands_and_kernel
        return vjp_in_parts(kernel, *operands)

    operands = _operands(q, k, v, sinks)
    pulls = {}  # by window, since branches have arrays alone as results

    def in_window(mask: Mask) -> tuple[Array, list[Array]]:
        out, others, pulls[mask.window] = unchecked(run, *operands, kernel_of(q, k, mask))
        return out, others

    out, others = mask.by_window(in_window)
    out, others = jax.tree.map(functools.partial(checkpoint_name, name="core"), (out, others))
    return out, (operands, mask, out, others, pulls)


def _backward(kernel_of: KernelOf, saved: Any, dy: Array) -> tuple[Array | None, ...]:
    operands, mask, out, others, pulls = saved

    def in_window(mask: Mask) -> tuple[Array, ...]:
        pull = pulls[mask.window]

        def run(dy: Array, *arrays: Any) -> tuple[Array, ...]:
            return pull.rebuilt(*arrays)(dy)

        # The kernel's tables are recomputed, so that a layer saves none.
        gradients = unchecked(run, dy, *operands, kernel_of(*operands[:2], mask), out, others)
        # JAX's kernel has that of sinks in the dtype of queries.
        return tuple(gradient.astype(x.dtype) for gradient, x in zip(gradients, operands, strict=True))

    dq, dk, dv, *d_sinks = mask.by_window(in_window)
    return dq, dk, dv, None, *(d_sinks or [None])


pallas_attention.defvjp(_forward, _backward)
