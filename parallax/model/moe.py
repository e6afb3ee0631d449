"""Mixtures of experts (stand-in until merged)."""

import flax.linen as nn

from parallax.config.sections import ModelConfig
from parallax.model.families import Family
from parallax.model.mlp import GatedMLP


class MoE(nn.Module):
    model: ModelConfig
    residual: str
    family: Family
    out_scale: float
    balance_coefficient: float = 0.0
    router_z_coefficient: float = 0.0

    @nn.compact
    def __call__(self, x, row_weight):
        return GatedMLP(self.residual, self.family, dict(self.model.sizes) | {"d_ff": self.model.d_expert}, self.model.dtype, self.out_scale, name="experts")(x)
