"""The layers of the model that each rank runs, and the move there from the ranks that store them: one all-to-all for
many leaves, instead of one message for each."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from einops import pack, unpack
from jax import Array, lax

from parallax.config.sections import BLOCKS
from parallax.sharding.collectives import all_to_all, as_varying, varying_axes
from parallax.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Layers in stages, stages on ranks: `placement[s]` is the rank of stage s.

    Stages are consecutive in the model; if they do not divide it evenly, the first ones have one more layer. Parameters
    are always stored in model order. If each rank has the same number of consecutive layers, pp shards the `layers`
    dim, and nothing is sent. Otherwise pp shards another dim; an all-to-all of the weights before the ticks, and of
    their gradients after them, converts between that and sharded layers in the order of the ranks.

    If a model has several kinds of layers, each kind has an Arrangement: `kinds` are those of all layers, and `kind` is
    the one whose layers are counted, numbered and moved; without it, all layers are.
    """

    placement: tuple[int, ...]
    kinds: tuple[str, ...]
    kind: str = ""

    @cached_property
    def members(self) -> np.ndarray:
        """The model's layers that are stacked here."""
        return np.flatnonzero([self.kind in ("", kind) for kind in self.kinds])

    @property
    def layers(self) -> int:
        return self.members.size

    @property
    def ranks(self) -> int:
        return 1 + max(self.placement)

    @property
    def virtual(self) -> int:
        """Stages on each rank."""
        return len(self.placement) // self.ranks

    @property
    def stage_layers(self) -> int:
        """Layers of the largest stage, which is the number of places of every stage."""
        return max(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Layers of each stage."""
        stages = np.array_split(np.arange(len(self.kinds)), len(self.placement))
        return [int(np.isin(stage, self.members).sum()) for stage in stages]

    @cached_property
    def numbers(self) -> np.ndarray:
        """int32 `[rank, place]`: index of the stacked layer in a place, -1 if a stage has fewer layers; the stages of a
        rank are in order.

        >>> Arrangement((0, 1, 0, 1), ("dense",) * 6).numbers.tolist()
        [[0, 1, 4, -1], [2, 3, 5, -1]]
        """
        numbers = np.full((self.ranks, self.virtual, self.stage_layers), -1, np.int32)
        filled = [0] * self.ranks
        for rank, start, size in zip(self.placement, np.cumsum([0, *self.sizes]), self.sizes):
            numbers[rank, filled[rank], :size] = np.arange(start, start + size)
            filled[rank] += 1
        return numbers.reshape(self.ranks, -1)

    @property
    def uneven(self) -> bool:
        """Whether stages have different numbers of layers."""
        return len(set(self.sizes)) > 1

    @property
    def in_order(self) -> bool:
        """Whether each rank runs the layers that it has if pp shards the `layers` dim."""
        return bool((self.numbers.reshape(-1) == np.arange(self.numbers.size)).all())

    def own_numbers(self) -> Array:
        """This rank's row of `numbers`."""
        return jnp.asarray(self.numbers)[lax.axis_index("pp")]

    @cached_property
    def kinds_in_places(self) -> np.ndarray:
        """int32 `[2, rank, place]`: the kind of the layer, as an index into `sorted(set(kinds))` (their number if there
        is no layer), and the number of layers of its kind before it in its stage."""
        names = sorted(set(self.kinds))
        kinds = np.append([names.index(kind) for kind in self.kinds], len(names))[self.numbers]
        by_stage = kinds.reshape(-1, self.stage_layers)
        earlier = [[int((stage[:place] == kind).sum()) for place, kind in enumerate(stage)] for stage in by_stage]
        return np.stack([kinds, np.reshape(earlier, kinds.shape)]).astype(np.int32)

    def own_kinds(self) -> Array:
        """This rank's part of `kinds_in_places`, `[2, place]`."""
        return jnp.asarray(self.kinds_in_places)[:, lax.axis_index("pp")]

    def own_layers(self) -> Array:
        """The model's layer in each place of this rank, -1 for none."""
        of_model = np.where(self.numbers < 0, -1, self.members[self.numbers])
        return jnp.asarray(of_model, jnp.int32)[lax.axis_index("pp")]

    def moved(self, stored: Sequence[Layout], leaves: Sequence[Array], *, back: bool = False) -> list[Array]:
        """This rank's layers `[place, ...]` of stored parameters; zeros in places without a layer.

        `back` is the inverse for gradients: this device's pieces of stored parameters; if pp shards no dim, its summand
        of a sum over pp.

        Communication: an all_to_all over pp of all those together in which another dim than `layers` is cut over it.
        """
        moved, together, rows = [*leaves], defaultdict(list), self.numbers.reshape(-1)
        if back:
            rows = np.argsort(rows, stable=True)[rows.size - self.layers :]
        for member, (layout, x) in enumerate(zip(stored, leaves, strict=True)):
            if "pp" not in layout.used_axes():
                moved[member] = self._given_back(x) if back else _take(x, self.own_numbers())
            elif "pp" not in layout.cut_of("layers"):
                together[x.dtype, varying_axes(x)].append(member)  # what an array can hold
        for members in together.values():
            dims = [next(dim for dim, axes in enumerate(stored[member].axes) if "pp" in axes) for member in members]
            given = [leaves[member] for member in members], dims, jnp.asarray(rows)
            for member, x in zip(members, layers_from_ranks(*given) if back else layers_to_ranks(*given), strict=True):
                moved[member] = x
        return moved

    def _given_back(self, x: Array) -> Array:
        whole = as_varying(jnp.zeros((self.layers, *x.shape[1:]), x.dtype))
        numbers = self.own_numbers()
        # The zeros of a place without a layer are not added to any layer of the model.
        return whole.at[jnp.where(numbers < 0, self.layers, numbers)].add(x, mode="drop")


def stacks_of(kinds: Sequence[str]) -> dict[str, str]:
    """The name of the stack of each kind of layers in the tree of parameters, in order.

    >>> stacks_of(("moe", "dense", "moe")), stacks_of(("moe",))
    ({'dense': 'blocks/dense', 'moe': 'blocks/moe'}, {'moe': 'blocks'})
    """
    names = sorted(set(kinds))
    return {kind: f"{BLOCKS}/{kind}" if len(names) > 1 else BLOCKS for kind in names}


def arrangements(placement: tuple[int, ...], kinds: tuple[str, ...]) -> dict[str, Arrangement]:
    """The arrangement of each kind of layers, by the name of its stack in the tree of parameters.

    >>> list(arrangements((0, 1), ("dense", "moe", "moe")))
    ['blocks/dense', 'blocks/moe']
    """
    return {stack: Arrangement(placement, kinds, kind) for kind, stack in stacks_of(kinds).items()}


def _take(x: Array, numbers: Array) -> Array:
    there = (numbers >= 0).reshape(-1, *(1 for _ in x.shape[1:]))
    return jnp.where(there, x[jnp.maximum(numbers, 0)], 0)


def layers_to_ranks(leaves: Sequence[Array], cut_dims: Sequence[int], rows: Array) -> list[Array]:
    """From arrays [layers, ...] whose dim `cut_dims[i]` pp shards to arrays [rows / pp, ...] in which it is whole.

    `rows` are the layers in the order of the ranks, -1 for a row of zeros.

    Communication, a step:
        forward   all_to_all of all leaves over pp
        backward  nothing
    """
    flat, shapes = pack(leaves, "layers *")
    there = (rows >= 0)[:, None]
    moved = all_to_all("layers entries/pp -> layers/pp entries", jnp.where(there, flat[jnp.maximum(rows, 0)], 0))
    pieces = unpack(moved.reshape(len(moved), -1, flat.shape[1]), shapes, "layers ranks *")
    return [_joined(piece, dim) for piece, dim in zip(pieces, cut_dims, strict=True)]


def layers_from_ranks(leaves: Sequence[Array], cut_dims: Sequence[int], rows: Array) -> list[Array]:
    """The inverse: from arrays [rows / pp, ...] to arrays [layers, ...] sharded over pp; `rows` locates each layer.

    Communication, a step:
        forward   nothing
        backward  all_to_all of all leaves over pp
    """
    parts = [_parted(leaf, dim) for leaf, dim in zip(leaves, cut_dims, strict=True)]
    flat, shapes = pack(parts, "layers ranks *")
    moved = all_to_all("layers/pp entries -> layers entries/pp", flat.reshape(len(flat), -1))[rows]
    return unpack(moved, shapes, "layers *")


def _joined(piece: Array, dim: int) -> Array:
    """[layers, ranks, ...] as an array in which dim `dim` holds all ranks' parts of it, in order."""
    apart = jnp.moveaxis(piece, 1, dim)
    return apart.reshape(*apart.shape[:dim], -1, *apart.shape[dim + 2 :])


def _parted(leaf: Array, dim: int) -> Array:
    """An array with dim `dim` divided among ranks, as [layers, ranks, ...]."""
    ranks = lax.axis_size("pp")
    apart = leaf.reshape(*leaf.shape[:dim], ranks, -1, *leaf.shape[dim + 1 :])
    return jnp.moveaxis(apart, dim, 1)
