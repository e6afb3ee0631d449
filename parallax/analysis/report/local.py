"""What a function sends that runs on each device: forward, and for its gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from parallax.analysis.report.traced import Sent, collectives
from parallax.sharding.collectives import as_varying
from parallax.sharding.layout import Layout


def sent_by(local: Callable, layouts: Sequence[str], arrays: Sequence[Any], mesh: Any) -> list[Sent]:
    """What a device sends when it runs `local` on its pieces of arrays, and takes the gradients in those of floats.

    An array that is not cut over an axis is the same on its ranks, and its gradient is summed over it. Nothing runs:
    `arrays` may be shapes, the mesh abstract. Raises NotationError where a layout is none.

    >>> import jax.numpy as jnp
    >>> from parallax.sharding.collectives import all_gather
    >>> from parallax.sharding.mesh import mesh_of
    >>> gather = lambda w: all_gather("d_model/dp d_ff -> d_model d_ff", w)
    >>> sent = sent_by(gather, ["d_model/dp d_ff"], [jnp.ones((8, 4))], mesh_of(dp=1))
    >>> sorted((one.direction, one.kind) for one in sent)
    [('backward', 'reduce-scatter'), ('forward', 'all-gather')]
    """

    def passes(*pieces: Any) -> Any:
        y, pull = jax.vjp(local, *pieces)
        gradients = [leaf for leaf in jax.tree.leaves(pull(y)) if leaf.dtype != jax.dtypes.float0]
        return as_varying(sum(as_varying(leaf.sum()) for leaf in gradients)[None])

    specs = tuple(Layout.parse(layout).spec() for layout in layouts)
    mapped = jax.shard_map(passes, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=True)
    return collectives(mapped, *arrays, at=dict.fromkeys(mesh.axis_names, 0), sizes=dict(mesh.shape))
