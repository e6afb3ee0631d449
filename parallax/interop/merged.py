"""The parameters of a run with adapters, as those of a model without."""

import collections
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from parallax.checkpoint.arrays import beside
from parallax.config.sections import ModelConfig
from parallax.interop.export import SavedParams
from parallax.model.lora import RANK
from parallax.sharding.plan import ParameterPlan


class Adapter(NamedTuple):
    """Names of an adapter's two arrays."""

    a: str
    b: str


def adapters_of(rows: Mapping[str, ParameterPlan]) -> dict[str, Adapter]:
    """The adapters among parameters, by the names of their kernels."""
    pairs: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for name, row in rows.items():
        if row.spec.adapts:
            pairs[beside(name, row.spec.adapts)]["b" if row.spec.inputs == (RANK,) else "a"] = name
    return {kernel: Adapter(**pair) for kernel, pair in pairs.items()}


class MergedParams:
    """The parameters of a step with adapters added to their kernels, and kernels in 8 bits as the numbers that they
    stand for: read as SavedParams."""

    def __init__(self, params: SavedParams, rows: Mapping[str, ParameterPlan], model: ModelConfig):
        self._params, self._adapters = params, adapters_of(rows)
        self._factor = model.lora_alpha / model.lora_rank
        self._units = {name: beside(name, row.spec.unit) for name, row in rows.items() if row.spec.unit}
        self._stacked = {name: row.spec.stacked(row.at_rest) for name, row in rows.items()}
        left_out = {name for adapter in self._adapters.values() for name in adapter} | {*self._units.values()}
        self.stored = {name: about for name, about in params.stored.items() if name not in left_out}

    def pieces(self, name: str, index: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Consecutive pieces of rows of an array's matrix, or of the matrices of all experts, as float32 if anything is
        merged into it."""
        adapter, unit = (entries.get(name) for entries in (self._adapters, self._units))
        a, b, units = (
            np.concatenate([*self._params.pieces(each, index)]).astype(np.float32) if each else None
            for each in (*(adapter or (None, None)), unit)
        )
        row, are_several = 0, self._stacked[name] > len(index)
        for piece in self._params.pieces(name, index):
            here = slice(row, row + len(piece))
            if adapter or unit:
                piece = piece.astype(np.float32)
            if unit:
                piece *= units[here, None] if are_several else units
            if adapter:
                piece += self._factor * (a[here] @ b[here] if are_several else np.tensordot(a[here], b, 1))
            yield piece
            row += len(piece)

    def check(self) -> None:
        """Raise DamagedError unless all arrays were read and are as saved."""
        self._params.check()
