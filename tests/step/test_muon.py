"""Muon's rounds on matrices that ranks share, held to NumPy: dealt over all, some or none of the axes that cut them."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiny_model import mesh_of

from parallax.sharding.layout import Layout
from parallax.sharding.parameter import ParameterSpec, Role
from parallax.step.optimizer import dealt_axes, muon_dims, newton_schulz

COEFFICIENTS = np.float32([3.4445, -4.7750, 2.0315])  # Jordan's

# Mesh (pp, dp, tp, replica, cp, ep), layout, inputs, shape, and the axes over which the matrices are dealt.
CASES = {
    "one device": ((1, 1, 1), "layers/pp d_model/dp d_ff/tp", "d_model", (3, 8, 16), "dp tp"),
    "as many as ranks": ((1, 2, 2), "layers/pp d_model/dp d_ff/tp", "d_model", (4, 8, 16), "dp tp"),
    "more than ranks, tall": ((1, 2, 2), "layers d_ff/tp d_model/dp", "d_ff", (5, 16, 8), "dp tp"),
    "fewer than ranks": ((1, 2, 2), "layers d_model/dp d_ff/tp", "d_model", (3, 8, 16), "dp"),
    "fewer than ranks of one axis": ((1, 8, 1), "layers d_model/dp d_ff", "d_model", (3, 8, 16), "dp"),
    "only one": ((1, 2, 2), "layers d_model/dp d_ff/tp", "d_model", (1, 8, 16), ""),
    "rows over two axes": ((1, 2, 2), "layers d_model/tp/dp d_ff", "d_model", (6, 8, 16), "dp tp"),
    "heads": ((1, 2, 2), "layers heads/tp d_head d_model/dp", "heads d_head", (4, 4, 2, 8), "dp tp"),
    "over pp": ((2, 2, 1), "layers d_model/dp d_ff/pp", "d_model", (4, 8, 16), "pp dp"),
    "stages with experts": (
        (2, 2, 1, 1, 1, 2), "layers/pp experts/ep d_model/dp d_expert", "d_model", (4, 6, 4, 8), "dp"
    ),
    "three data axes": ((1, 2, 1, 1, 2, 2), "layers d_model/dp/cp/ep d_ff", "d_model", (9, 8, 16), "dp cp ep"),
}  # fmt: skip


def orthogonalized(x):
    x = x / (np.linalg.norm(x) + 1e-8)
    a, b, c = COEFFICIENTS.astype(np.float64)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_is_orthogonalized_as_numpy_does(name):
    sizes, layout, inputs, shape, _ = CASES[name]
    mesh, layout = mesh_of(*sizes), Layout.parse(layout)
    dims = muon_dims(ParameterSpec(Role.WEIGHT, stack="blocks", inputs=tuple(inputs.split())), layout)
    rows, columns = (np.prod([shape[dim] for dim in group]) for group in dims)
    x, spec = np.random.default_rng(0).normal(size=shape).astype(np.float32), layout.spec(mesh)
    rounds = functools.partial(newton_schulz, layout=layout, dims=dims, tall=rows > columns)
    rounds = jax.shard_map(rounds, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=True)
    result = jax.jit(rounds)(jax.device_put(x, NamedSharding(mesh, spec)), COEFFICIENTS)
    expected = np.stack([orthogonalized(each) for each in x.astype(np.float64).reshape(-1, rows, columns)])
    # Five rounds multiply what float32 rounds by up to 3.4445^5 = 485, times 6e-8.
    np.testing.assert_allclose(result, expected.reshape(shape), rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_dealt_over_axes_on_which_each_rank_gets_one(name):
    sizes, layout, inputs, shape, dealt = CASES[name]
    mesh, layout = mesh_of(*sizes), Layout.parse(layout)
    stacked = layout.index(inputs.split()[0])
    local = layout.local_shape(dict(zip(layout.names, shape, strict=True)), mesh.shape)
    cut_by = [axis for axes in layout.axes[stacked:] for axis in axes]

    def check(x):
        assert dealt_axes(cut_by, int(np.prod(local[:stacked]))) == tuple(dealt.split())
        return x

    jax.eval_shape(jax.shard_map(check, mesh=mesh, in_specs=P(), out_specs=P()), jax.ShapeDtypeStruct((), "float32"))


def test_the_coefficients_are_those_of_optax():
    state = optax.contrib.scale_by_muon().init({"w": np.zeros((2, 2), np.float32)})
    np.testing.assert_array_equal(state.ns_coeffs, COEFFICIENTS)
