"""Inputs that all layers of a stage share for one microbatch: positions, masks and row numbers of its tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from parallax.config.sections import ModelConfig
from parallax.model.mask import Mask
from parallax.model.rope import Rope
from parallax.sharding.collectives import as_varying
from parallax.sharding.zigzag import ZIGZAG


class Context(NamedTuple):
    """Shared inputs of one microbatch; every tensor-parallel rank holds all positions of its context rank.

    If layers differ in their settings, it is that of all layers, with a leading dim of settings where these count,
    until `of_layer` makes it that of one.
    """

    # `Rope.tables` of its tokens' positions: cosines and sines, [B, S, rotated / 2]; as wide as the widest until
    # `of_kind` makes them those of a kind of layers.
    rope: tuple[Array, Array]
    rows_B: Array  # index of each row in the global batch
    key: Array | None  # of dropout; None disables it
    mask: Mask
    row_weight: Array | None = None  # weight of a row in the auxiliary losses of mixtures: 1 / rows of the batch
    temperature: Array | None = None  # factor on queries; None if it is the same in all layers

    @staticmethod
    def of_model(
        model: ModelConfig,
        rope: tuple[Array, Array],
        rows_B: Array,
        key: Array | None,
        segments_BN: Array,
        *,
        cursor: Array | int | None = None,
        row_weight: Array | None = None,
        order: str = ZIGZAG,
    ) -> "Context":
        """The context of tokens for all layers of a model; `rope` are their `tables_of_layers`, `order` is that of the
        tokens on context ranks."""
        windows = [settings.sliding_window for settings in model.settings_of_layers.settings]
        mask = Mask(segments_BN, cursor, windows[0], order=order)
        if len(set(windows)) > 1:
            mask = mask.replace(window=0, windows=tuple(windows))
        return Context(rope, rows_B, key, mask, row_weight)

    def of_layer(self, model: ModelConfig, layer: Array) -> "Context":
        """The context of one of the model's layers, by its number."""
        if not model.settings_of_layers.differ:
            return self
        number = as_varying(jnp.asarray(np.array(model.settings_of_layers.numbers, np.int32))[layer])
        context = self
        if self.rope[0].ndim > 3:
            context = context._replace(rope=jax.tree.map(lambda tables: tables[number], self.rope))
        if self.mask.windows:
            context = context._replace(mask=self.mask.replace(which=number))
        if temperatures := temperatures_of(model):
            context = context._replace(temperature=jnp.asarray(temperatures, jnp.float32)[number])
        return context

    def of_kind(self, model: ModelConfig, kind: str) -> "Context":
        """The context of a layer with a block of this kind, from that of the layer. Only windows that layers of this
        kind have are left, so that a program has no branches for others."""
        width, context = model.of_block(kind).rotated // 2, self
        if width < self.rope[0].shape[-1]:
            context = context._replace(rope=jax.tree.map(lambda table: table[..., :width], self.rope))
        if self.mask.windows:
            pairs = zip(model.settings_of_layers.numbers, model.layer_kinds, strict=True)
            numbers = sorted({number for number, each in pairs if each == kind})
            context = context._replace(mask=self.mask.of_numbers(numbers))
        return context

    def tempered(self, q: Array) -> Array:
        """Queries times the layer's temperature, if that is not the same in all layers."""
        return q if self.temperature is None else (q * self.temperature).astype(q.dtype)


def tables_of_layers(
    model: ModelConfig, positions_BS: Array, tokens: int, empty_B: Array | int = 0
) -> tuple[Array, Array]:
    """`Rope.tables` of all layers of a model, with a leading dim of settings if they rotate by different angles; zeros
    are behind those that are narrower than the widest."""
    ropes = [Rope(settings) for settings in model.settings_of_layers.settings]
    if all(rope.rotation == ropes[0].rotation for rope in ropes):
        return ropes[0].tables(positions_BS, tokens, empty_B)
    widest = max(rope.width for rope in ropes) // 2

    def stacked(*of_each: Array) -> Array:
        return jnp.stack([_as_wide(table, widest) for table in of_each])

    return jax.tree.map(stacked, *(rope.tables(positions_BS, tokens, empty_B) for rope in ropes))


def _as_wide(table_BSp: Array, width: int) -> Array:
    more = width - table_BSp.shape[-1]
    return jnp.pad(table_BSp, [(0, 0), (0, 0), (0, more)]) if more else table_BSp


def temperatures_of(model: ModelConfig) -> list[float]:
    """The factor on attention's logits for each of the settings of a model's layers; empty if all are the same."""
    temperatures = [Rope(settings).temperature() for settings in model.settings_of_layers.settings]
    return temperatures if len(set(temperatures)) > 1 else []
