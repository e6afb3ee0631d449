"""What a plan for GPUs counts beside products: the passes over memory that XLA makes of a program there."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.stand_ins import Chip, ChipMesh

from parallax.analysis.planned.gpu_passes import GpuPasses
from parallax.analysis.traced.trace import abstract_mesh, as_traced, walk
from parallax.hardware.chips import chip, name_of_kind
from parallax.model.experts.grouped import MOST_ROWS, grouped_dot, grouped_sums
from parallax.sharding.mesh import is_for_gpus
from parallax.sharding.platform import platform_planned, platform_traced

ROWS, WIDE, GROUPS, HALF = 4096, 64, 2, jnp.bfloat16


def array(*shape, dtype=HALF):
    return jax.ShapeDtypeStruct(shape, dtype)


def passes_of(function, *arrays, gpu="NVIDIA H100"):
    """Bytes that each kind of operation moves in a program for these chips."""
    with jax.sharding.use_abstract_mesh(abstract_mesh({"dp": 1}, gpu=gpu)):
        program = jax.make_jaxpr(function)(*arrays)
    passes = GpuPasses(program)
    return +walk(program, rank={}, count=lambda one, _: Counter({one.primitive.name: passes.bytes(one) or 0}))


def test_a_plan_for_gpus_has_their_platform():
    assert platform_traced() == platform_planned() == "cpu"
    for name, platform in {"H100": "gpu", "L4": "gpu", "v5p": ""}.items():
        with jax.sharding.use_abstract_mesh(abstract_mesh({"dp": 1}, gpu=chip(name).gpu)):
            assert platform_traced() == "" and platform_planned() == platform


class ModelOnGpu:
    """As much of a model on a GPU of this kind as says which program is read."""

    changes_in_loops, axis_sizes = True, {"dp": 1}

    def __init__(self, kind="", mesh=None):
        self.mesh = mesh or ChipMesh(np.array([Chip("gpu", kind)]), ("dp",))

    def replace(self, mesh):
        return ModelOnGpu(mesh=mesh)


@pytest.mark.parametrize(("kind", "form"), [("NVIDIA L40S", "gmm_rows"), ("Tesla T4", "scan")])
def test_the_program_for_a_gpu_that_is_not_in_the_table_is_read_with_the_kernels_that_it_runs(kind, form):
    """So that the predicted memory and times of its experts are those of the same program."""
    assert not name_of_kind(kind)
    mesh = as_traced(ModelOnGpu(kind)).mesh
    assert is_for_gpus(mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        arrays = array(ROWS, WIDE), array(GROUPS, WIDE, WIDE), array(GROUPS, dtype=jnp.int32)
        assert form in str(jax.make_jaxpr(grouped_dot)(*arrays))


def test_kernels_for_groups_make_no_passes():
    """But that of the tables of tiles, a few numbers each."""
    arrays = array(ROWS, WIDE), array(GROUPS, WIDE, WIDE), array(GROUPS, dtype=jnp.int32)
    assert sum(passes_of(grouped_dot, *arrays).values()) < 0.02 * 2 * ROWS * WIDE


def test_each_block_copies_its_rows_and_its_group_s_matrix():
    arrays = array(ROWS, WIDE), array(GROUPS, WIDE, WIDE), array(GROUPS, dtype=jnp.int32)
    size, blocks = MOST_ROWS["gpu"], ROWS // MOST_ROWS["gpu"] + 1
    moved = passes_of(functools.partial(grouped_dot, form="blocks"), *arrays)
    assert moved["dynamic_slice"] == 2 * 2 * blocks * (size + WIDE) * WIDE
    assert moved["pad"] == 2 * 2 * (ROWS + size) * WIDE


def test_the_sums_of_a_group_are_read_and_written_for_each_block():
    arrays = array(ROWS, WIDE), array(ROWS, WIDE), array(GROUPS, dtype=jnp.int32)
    blocks = ROWS // MOST_ROWS["gpu"] + 1
    assert (
        passes_of(functools.partial(grouped_sums, form="blocks"), *arrays)["scatter-add"]
        == 3 * 4 * blocks * WIDE * WIDE
    )


def test_what_is_rounded_is_written_unless_a_product_writes_it():
    wide, half = array(8, 8, dtype=jnp.float32), array(8, 8)
    assert passes_of(lambda x: jnp.exp(x).astype(HALF), wide) == {"convert_element_type": 6 * 64}

    def product(x, w):
        return jnp.einsum("ab,bc->ca", x, w, preferred_element_type=jnp.float32).astype(HALF)

    assert passes_of(product, half, half) == {}
    assert passes_of(lambda x: x.astype(jnp.float32), half) == {}  # wider: its reader converts it
    assert passes_of(lambda x: x.astype(HALF), array(dtype=jnp.float32)) == {}  # one number is no array


def test_a_reduction_reads_its_operand_once():
    assert passes_of(lambda x: jnp.exp(x).sum(axis=1), array(8, 16, dtype=jnp.float32)) == {"reduce_sum": 4 * (128 + 8)}


def test_rows_that_are_gathered_are_copied():
    def rows_of(x, rows):
        return x.at[rows].get(mode="clip")

    assert passes_of(rows_of, array(16, 8), array(4, dtype=jnp.int32))["gather"] == 2 * 2 * 4 * 8
    assert "gather" not in passes_of(rows_of, array(16, 8), array(1, dtype=jnp.int32))


def test_a_slice_is_copied_for_a_product_and_read_in_place_by_others():
    def sliced(x, start):
        return lax.dynamic_slice_in_dim(x, start, 4)

    x, start = array(16, 8), array(dtype=jnp.int32)
    assert passes_of(lambda x, start: jnp.exp(sliced(x, start)), x, start) == {}
    assert passes_of(lambda x, start: sliced(x, start) @ x.T, x, start) == {"dynamic_slice": 2 * 2 * 4 * 8}


FLOAT8 = jnp.float8_e4m3fn


def rounded(x, unit):
    return (x.astype(jnp.float32) * (1 / unit)).astype(FLOAT8)


def own_units(x, axis):
    size = jnp.abs(x.astype(jnp.float32))
    return jnp.max(jnp.where(jnp.isnan(size), jnp.inf, size), axis=axis, keepdims=True)


def float8_product(x, w, units):
    return (jnp.einsum("ab,bc->ac", x, w, preferred_element_type=jnp.float32) * units).astype(HALF)


def test_readers_of_a_float8_product_apply_scales_of_rows():
    x, w, units = array(8, 16, dtype=FLOAT8), array(16, 32, dtype=FLOAT8), array(8, 1, dtype=jnp.float32)
    assert passes_of(lambda *of: jnp.exp(float8_product(*of)), x, w, units) == {}
    # A product reads whole arrays: it is copied, in 16 bits.
    copied = passes_of(lambda *of: float8_product(*of).T @ jnp.ones((8, 4), HALF), x, w, units)
    assert copied == {"convert_element_type": 2 * 2 * 8 * 32}
    wide = passes_of(float8_product, array(8, 16), array(16, 32), units)  # products in 16 bits write float32
    assert wide == {"convert_element_type": 6 * 8 * 32}


def test_what_is_rounded_to_8_bits_is_read_in_the_bits_that_it_has_in_memory_and_once():
    def twice(x, rows, columns):
        return rounded(x, rows), rounded(x, columns)

    rows, columns = array(8, 1, dtype=jnp.float32), array(1, 16, dtype=jnp.float32)
    assert passes_of(rounded, array(8, 16), rows)["convert_element_type"] == (2 + 1) * 8 * 16
    assert passes_of(twice, array(8, 16), rows, columns)["convert_element_type"] == (2 + 1 + 1) * 8 * 16


def test_a_maximum_by_which_an_array_is_rounded_is_a_pass_unless_another_writes_the_array():
    x, w, rows = array(8, 16), array(16, 4), 4 * 8

    def alone(x, gate):
        return rounded(x * gate, own_units(x * gate, 1))

    def read_by_a_product(x, gate, w):
        hidden = x * gate
        return rounded(hidden, own_units(hidden, 1)), hidden @ w

    def by_rows_and_columns(x, gate, w):
        hidden = x * gate
        return rounded(hidden, own_units(hidden, 1)), rounded(hidden, own_units(hidden, 0)), hidden @ w

    assert passes_of(lambda x: own_units(x, 1), x)["reduce_max"] == 2 * 8 * 16 + rows
    assert passes_of(alone, x, x)["reduce_max"] == 4 * 8 * 16 + rows  # from two arrays, or written and read
    assert "reduce_max" not in passes_of(read_by_a_product, x, x, w)
    assert passes_of(by_rows_and_columns, x, x, w)["reduce_max"] == 2 * 8 * 16 + 4 * 16
