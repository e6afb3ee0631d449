"""The gated MLP, SwiGLU (Shazeer 2020)."""

from collections.abc import Callable, Mapping
from functools import partial

import flax.linen as nn
import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import MLP
from parallax.model.dense import Dense
from parallax.model.families import Family
from parallax.sharding.activations import activation
from parallax.sharding.collectives import reshard


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, and times `weight` [B, S, 1] if it is given; input and output have the residual's
    layout.

    Communication, column_row:
        forward   all_gather of x over tp; reduce_scatter of the result over tp
        backward  the transposes
    Communication, scatter:
        forward   all_to_all of x over tp if it is cut over seq; reduce_scatter of gate, up and the result over tp
        backward  the transposes
    """

    residual: str
    family: Family
    sizes: Mapping[str, int]
    dtype: str
    out_scale: float
    width: str = "d_ff"
    matmul: str = "compute"
    matmul_residuals: str = "compute"
    part: str = MLP  # of the layer: see ParameterSpec
    dense: Callable[..., Dense] | None = None  # makes its projections, if they are not Dense

    @nn.compact
    def __call__(self, x: Array, weight: Array | None = None) -> Array:
        whole, wide = self.family.input("d_model"), activation(f"{self.width}/tp")
        x = reshard(f"{self.residual} -> {whole}", x)
        kernel = self.family.into("d_model", f"{self.width}/tp")
        dense = partial(
            self.dense or Dense,
            sizes=self.sizes,
            dtype=self.dtype,
            matmul=self.matmul,
            matmul_residuals=self.matmul_residuals,
            part=self.part,
        )
        gate, up = (dense(kernel, whole, wide, name=name) for name in ("gate", "up"))
        down = dense(self.family.back(f"{self.width}/tp"), wide, self.residual, scale=self.out_scale, name="down")
        x = gate.input(x, part="norm", before=self.residual)
        wide_gate, wide_up = gate(x), up(x)
        hidden = _gated(checkpoint_name(wide_gate, "ffn"), checkpoint_name(wide_up, "ffn"))
        # Here, so that the result of the last product need not be saved for the weight's gradient.
        hidden = hidden if weight is None else hidden * weight
        return down(down.input(checkpoint_name(hidden, "swiglu"), part="swiglu"))


# Its backward pass saves only gate and up. `prevent_cse` would put a barrier before it: XLA would copy what it reads
# from slots, and fuse it with nothing.
@partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: Array, up: Array) -> Array:
    return nn.silu(gate) * up
