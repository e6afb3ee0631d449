"""Pieces of all ranks of a mesh in one array [pp, dp, tp, ...]: run a collective on them, and say what it must do.

A collective is linear in the pieces, so NumPy's forward, taken of every unit vector, gives the matrix whose transpose
the gradient must be.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from parallax.config.sections import AXES
from parallax.sharding.collectives import as_varying
from support.tiny_model import mesh_of

SIZES = (2, 2, 2)


def on_mesh(function, pieces, sizes=SIZES):
    """`function` of every rank's piece, and the gradient of its output's product with fixed weights."""

    def local(x, weights):
        y, pull = jax.vjp(lambda x: as_varying(function(x)), x[0, 0, 0])
        (dx,) = pull(as_varying(weights[0, 0, 0]))
        return y[None, None, None], dx[None, None, None]

    shape = jax.eval_shape(lambda x: forward_of(function, x, sizes), pieces).shape
    weights = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    run = jax.shard_map(local, mesh=mesh_of(*sizes), in_specs=P(*AXES), out_specs=P(*AXES), check_vma=True)
    y, dx = jax.jit(run)(pieces, weights)
    return np.asarray(y), np.asarray(dx), weights


def forward_of(function, pieces, sizes):
    local = lambda x: as_varying(function(x[0, 0, 0]))[None, None, None]  # noqa: E731
    return jax.shard_map(local, mesh=mesh_of(*sizes), in_specs=P(*AXES), out_specs=P(*AXES))(pieces)


def transpose(oracle, shape, weights):
    """The gradient of sum(oracle(x) * weights), one unit vector at a time."""
    units = np.eye(int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)
    return np.array([np.sum(oracle(unit) * weights) for unit in units]).reshape(shape)


def along(axis, function):
    """An oracle on all ranks from one on the list of pieces along `axis`; dims of a piece start at 2."""
    at = AXES.index(axis)

    def oracle(pieces):
        return np.moveaxis(np.stack(function(list(np.moveaxis(pieces, at, 0)))), 0, at)

    return oracle


def gathered(dim):
    return lambda pieces: [np.concatenate(pieces, dim + 2)] * len(pieces)


def scattered(dim):
    return lambda pieces: np.split(sum(pieces), len(pieces), dim + 2)


def exchanged(source, target):
    def function(pieces):
        parts = [np.split(piece, len(pieces), target + 2) for piece in pieces]
        return [np.concatenate(column, source + 2) for column in zip(*parts)]

    return function


def kept(dim):
    return lambda pieces: [np.split(piece, len(pieces), dim + 2)[rank] for rank, piece in enumerate(pieces)]


def pieces_of(shape):
    return np.random.default_rng(0).normal(size=(*SIZES, *shape)).astype(np.float32)
