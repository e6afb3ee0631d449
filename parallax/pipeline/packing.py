"""Several arrays exchanged as one: an all-to-all of many leaves, without a message and a program for each."""

import math
from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from parallax.sharding.collectives import all_to_all, varying_axes


def alike(leaves: Sequence[Array], numbers: Sequence[int]) -> list[list[int]]:
    """Those leaves in groups that one array can hold: of one dtype, varying over the same axes."""
    groups = defaultdict(list)
    for number in numbers:
        groups[leaves[number].dtype, varying_axes(leaves[number])].append(number)
    return list(groups.values())


def layers_to_ranks(leaves: Sequence[Array], cut_dims: Sequence[int], rows: Array) -> list[Array]:
    """From arrays [layers, ...] whose dim `cut_dims[i]` is cut over pp to arrays [rows / pp, ...] in which it is whole.

    `rows` are the layers in the order of the ranks, -1 for a row of zeros.

    Communication, a step:
        forward   all_to_all of all leaves over pp
        backward  nothing
    """
    flat = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
    there = (rows >= 0)[:, None]
    moved = all_to_all("layers entries/pp -> layers/pp entries", jnp.where(there, flat[jnp.maximum(rows, 0)], 0))
    pieces = jnp.split(moved.reshape(len(moved), -1, flat.shape[1]), _stops(leaves), axis=2)
    return [_joined(piece, leaf.shape[1:], dim) for piece, leaf, dim in zip(pieces, leaves, cut_dims, strict=True)]


def layers_from_ranks(leaves: Sequence[Array], cut_dims: Sequence[int], rows: Array) -> list[Array]:
    """The way back: from arrays [rows / pp, ...] to arrays [layers, ...] cut over pp; `rows` says where each layer is.

    Communication, a step:
        forward   nothing
        backward  all_to_all of all leaves over pp
    """
    parts = [_parted(leaf, dim) for leaf, dim in zip(leaves, cut_dims, strict=True)]
    flat = jnp.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=2)
    moved = all_to_all("layers/pp entries -> layers entries/pp", flat.reshape(len(flat), -1))[rows]
    shapes = [(part.shape[0], *part.shape[2:]) for part in parts]
    pieces = jnp.split(moved, _stops([part[:, 0] for part in parts]), axis=1)
    return [piece.reshape(len(rows), *shape[1:]) for piece, shape in zip(pieces, shapes, strict=True)]


def _stops(leaves: Sequence[Array]) -> list[int]:
    sizes = [math.prod(leaf.shape[1:]) for leaf in leaves]
    return [sum(sizes[:at]) for at in range(1, len(sizes))]


def _joined(piece: Array, shape: Sequence[int], dim: int) -> Array:
    """[layers, ranks, entries] as an array in which dim `dim` holds all ranks' parts of it, in order."""
    apart = jnp.moveaxis(piece.reshape(*piece.shape[:2], *shape), 1, dim)
    return apart.reshape(*apart.shape[:dim], -1, *apart.shape[dim + 2 :])


def _parted(leaf: Array, dim: int) -> Array:
    """An array with dim `dim` divided among ranks, as [layers, ranks, ...]."""
    ranks = lax.axis_size("pp")
    apart = leaf.reshape(*leaf.shape[:dim], ranks, -1, *leaf.shape[dim + 1 :])
    return jnp.moveaxis(apart, dim, 1)
