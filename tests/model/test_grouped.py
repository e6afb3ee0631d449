"""Grouped products are those of each group alone, whatever the sizes of groups and the form."""

import functools
import itertools
import operator
import os
import pathlib
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from support.traced_equations import equations

from parallax.analysis.traced.trace import abstract_mesh
from parallax.hardware.chips import GPU_TARGETS
from parallax.model.experts import experts as experts_module
from parallax.model.experts import grouped_kernel, grouped_triton
from parallax.model.experts.experts import ExpertKernels, HeldExperts
from parallax.model.experts.grouped import FORMS, grouped_dot, grouped_sums, rows_of_block
from parallax.model.experts.grouped_kernel import block_that_fits, vmem_bytes, width_of_block
from parallax.model.mlp import ACTIVATIONS, Activation
from parallax.model.products import Operand

ROOT = pathlib.Path(__file__).parents[2]
ROWS, INTO, OUT = 300, 12, 20
# Sums over up to 300 float32 terms, in another order.
ERROR = 2e-6
SIZES = {
    "even": [75, 75, 75, 75],
    "uneven": [1, 130, 9, 160],
    "one gets all": [0, 0, 300, 0],
    "none": [0, 0, 0, 0],
    "rows left over": [20, 0, 7, 100],
    "the last gets none": [299, 1, 0, 0],
}


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (ROWS, INTO), (4, INTO, OUT), (ROWS, OUT)
    return [rng.normal(size=shape).astype(np.float32).astype(dtype) for shape in shapes]


def plain(x, w, dy, sizes):
    """(y, dx, dw) in float64, group by group."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw, first = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape), 0
    for group, size in enumerate(sizes):
        own = slice(first, first + size)
        y[own], dx[own], dw[group] = x[own] @ w[group], dy[own] @ w[group].T, x[own].T @ dy[own]
        first += size
    return y, dx, dw


def alone_on(kind="NVIDIA H100 80GB HBM3"):
    """A mesh of one device of this kind, which is not here."""
    device = jax.sharding.AbstractDevice(kind, None, "tpu" if "TPU" in kind else "gpu")
    return jax.sharding.AbstractMesh((1,), ("dp",), axis_types=(AxisType.Auto,), abstract_device=device)


@functools.partial(jax.jit, static_argnums=4)
def products(x, w, dy, sizes, form):
    dx = grouped_dot(dy, w, sizes, transposed=True, form=form)
    return grouped_dot(x, w, sizes, form=form), dx, grouped_sums(x, dy, sizes, form=form)


def with_gradients(x, w, dy, sizes, form):
    return jax.tree.map(np.asarray, products(x, w, dy, jnp.array(sizes), form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_is_multiplied_by_its_own_matrix(sizes, form):
    found = with_gradients(*arrays(), sizes, form)
    for a, e in zip(found, plain(*arrays(), sizes), strict=True):
        assert np.abs(a - e).max() <= ERROR * max(np.abs(e).max(), 1e-30)


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_added_to_others(form):
    x, w, dy = arrays()
    sizes = jnp.array(SIZES["uneven"])
    found = jax.jit(lambda w: grouped_sums(x, dy, sizes, w, form=form))(w)
    expected = plain(x, w, dy, SIZES["uneven"])[2] + w
    assert np.abs(found - expected).max() <= ERROR * np.abs(expected).max()


@pytest.mark.parametrize("form", ["blocks", "triton"])
def test_bfloat16_is_summed_in_float32(form):
    """Results are rounded to 8 bits, 2^-9; sums are not."""
    sizes = SIZES["uneven"]
    found = with_gradients(*arrays(jnp.bfloat16), sizes, form)
    assert {a.dtype for a in found} == {jnp.dtype(jnp.bfloat16)}
    for a, e in zip(found, plain(*arrays(jnp.bfloat16), sizes), strict=True):
        assert np.abs(np.float64(a) - e).max() <= 2**-8 * np.abs(e).max()


@pytest.mark.parametrize("form", ["blocks", "ragged_dot"])
@pytest.mark.parametrize(("operand", "gradient"), [("int8", "int8"), ("float8_e4m3fn", "float8_e5m2")])
def test_operands_in_8_bits_are_multiplied_as_they_are(operand, gradient, form):
    """Numbers that all of these dtypes have: sums are exact."""
    rng, sizes = np.random.default_rng(0), SIZES["rows left over"]
    shapes = (ROWS, INTO), (4, INTO, OUT), (ROWS, OUT)
    x, w, dy = (rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes)
    units = jnp.float32([0.5, 0.25, 4])
    of = lambda at, array, dtype: Operand(jnp.asarray(array, dtype), units[at])  # noqa: E731

    def run(sizes):
        weight = of(1, w, operand)
        y = grouped_dot(of(0, x, operand), weight, sizes, form=form, dtype=jnp.bfloat16)
        return y, grouped_dot(of(2, dy, gradient), weight, sizes, form=form, dtype=jnp.float32, transposed=True)

    y, dx = jax.jit(run)(jnp.array(sizes))
    expected = plain(x * 0.5, w * 0.25, dy * 4, sizes)
    np.testing.assert_array_equal(y, jnp.asarray(expected[0], jnp.bfloat16))
    np.testing.assert_array_equal(dx, expected[1])
    assert y.dtype == jnp.bfloat16 and dx.dtype == jnp.float32


@pytest.mark.parametrize(("form", "spare"), {"blocks": rows_of_block(ROWS, 4), "triton": 0}.items())
def test_rows_that_are_not_in_use_reach_nothing(form, spare):
    """Even where they are no numbers."""
    sizes, (x, w, dy) = SIZES["rows left over"], arrays()
    x[sum(sizes) + spare :] = np.nan
    for a, e in zip(with_gradients(x, w, dy, sizes, form), with_gradients(*arrays(), sizes, form)):
        np.testing.assert_array_equal(a, e)


def test_kernels_for_triton_refuse_8_bits():
    x, w = Operand(jnp.ones((8, 16), jnp.int8), jnp.float32(1)), jnp.ones((2, 16, 16), jnp.int8)
    with pytest.raises(ValueError, match="form='triton' does not multiply int8 times int8: .*; use 'blocks'"):
        grouped_dot(x, Operand(w, jnp.float32(1)), jnp.array([4, 4]), form="triton")


def test_kernels_for_triton_refuse_factors_of_two_dtypes_which_gpus_multiply_in_blocks():
    x, w, dy = (jnp.zeros(array.shape) for array in arrays())
    with pytest.raises(ValueError, match="does not multiply bfloat16 times float32: both must be of one dtype"):
        grouped_dot(x.astype(jnp.bfloat16), w, jnp.array(SIZES["even"]), form="triton")
    rows = Operand(jnp.zeros((32, 16), jnp.bfloat16), None)
    wide = [jnp.zeros((4, 16, 16), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    with jax.sharding.use_abstract_mesh(alone_on()):
        assert [grouped_triton.fits_triton(rows, matrices) for matrices in wide] == [True, False]


@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("name", [*ACTIVATIONS, "clamped"])
def test_experts_and_their_gradients_are_lowered_for_gpus_with_every_activation(name, with_biases):
    """Interpreted on CPUs a kernel may compute what Pallas does not lower to Triton."""
    count, d_model, d_expert, tokens, chosen = 4, 64, 128, 256, 2

    def kernels(*widths):
        bias = jnp.zeros((count, widths[1]), jnp.bfloat16) if with_biases else None
        return ExpertKernels(jnp.zeros((count, *widths), jnp.bfloat16), bias=bias, activation=Activation(name, 7.0))

    def total(x, weights, held, ids):
        return held(x, weights, ids).astype(jnp.float32).sum()

    held = HeldExperts(*(kernels(*widths) for widths in 2 * [(d_model, d_expert)] + [(d_expert, d_model)]))
    ids, x = jnp.zeros((tokens, chosen), jnp.int32), jnp.zeros((1, tokens, d_model), jnp.bfloat16)
    weights = jnp.zeros(ids.shape)
    with jax.sharding.use_abstract_mesh(alone_on()):
        traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(x, weights, held, ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("gmm_gated" in text) == (name in grouped_triton.IN_TILES) and "gmm_rows" in text and "gmm_sums" in text


def test_an_unknown_form_is_refused():
    (x, w, dy), sizes = arrays(), jnp.array(SIZES["even"])
    for product, other in ((grouped_dot, w), (grouped_sums, dy)):
        with pytest.raises(ValueError, match="form='tiles' is none of blocks, ragged_dot, triton"):
            product(x, other, sizes, form="tiles")


@pytest.mark.parametrize(
    ("dtype", "width", "kind", "form"),
    [
        ("bfloat16", 48, "NVIDIA H100 80GB HBM3", "pallas_call"),
        ("bfloat16", 48, "NVIDIA GeForce RTX 5090", "pallas_call"),  # of which no data sheet is here
        ("bfloat16", 40, "NVIDIA H100 80GB HBM3", "scan"),  # no multiple of 16
        ("float32", 48, "NVIDIA H100 80GB HBM3", "scan"),
        ("bfloat16", 48, "Tesla T4", "scan"),  # has no bfloat16
        ("bfloat16", 48, "TPU v5", "ragged_dot_general"),
    ],
)
def test_gpus_have_kernels_for_rows_that_they_read_in_whole(dtype, width, kind, form):
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((256, 64), (4, 64, width)))
    with jax.sharding.use_abstract_mesh(alone_on(kind)):
        assert form in str(jax.make_jaxpr(grouped_dot)(x, w, jax.ShapeDtypeStruct((4,), "int32")))


@pytest.mark.parametrize("chip", GPU_TARGETS)
def test_tiles_fit_the_shared_memory_of_the_chip(chip):
    """Of each of the reads that are under way, one of rows, and of matrices one, or those of gate and up."""
    with jax.sharding.use_abstract_mesh(abstract_mesh({"dp": 1}, gpu=chip)):
        for matrices in (1, 2):
            tile = grouped_triton.tile_of(16384, 8, 4096, 2048, products=matrices)
            read_bytes = 2 * tile.inner * (tile.rows + matrices * tile.columns)
            assert grouped_triton.STAGES * read_bytes < 1024 * (GPU_TARGETS[chip].shared_kib - 1)


@pytest.mark.parametrize("rows", [1, 16, 1000, 4096])
def test_what_is_computed_grows_with_rows_not_with_groups(rows):
    groups = 64
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows, INTO), (groups, INTO, OUT))]
    sizes = jax.ShapeDtypeStruct((groups,), "int32")
    loops = [
        e for e in equations(lambda *a: grouped_dot(*a, form="blocks"), *shapes, sizes) if e.primitive.name == "scan"
    ]
    (count,) = (loop.params["length"] for loop in loops)
    assert count * rows_of_block(rows, groups) <= 1.25 * rows + 8 * groups


@pytest.mark.fast(2)
@pytest.mark.parametrize("with_biases", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("by", ["products", "has_kernel", "fits_triton"], ids=["apart", "for TPUs", "for GPUs"])
def test_gated_experts_and_their_gradients_are_those_of_each_expert(by, with_biases, monkeypatch):
    """On rows that divide into blocks; Pallas interprets the kernels. Those after the last group are undefined."""
    if by != "products":
        monkeypatch.setattr(experts_module, by, lambda *_: True)
    monkeypatch.setattr(grouped_kernel, "WIDEST_BLOCK", 128)
    rng, sizes, (into, wide) = np.random.default_rng(0), [41, 0, 128, 130], (160, 200)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, dy, weights = array(384, into), array(384, into), array(384, 1)
    kernels = [array(4, *dims) / 10 for dims in ((into, wide), (into, wide), (wide, into))]
    biases, used = [array(4, wide) for _ in range(2)], sum(sizes)
    held = [{"bias": bias} for bias in biases] if with_biases else [{}, {}]
    experts = HeldExperts(*(ExpertKernels(kernel, **more) for kernel, more in zip(kernels, [*held, {}])))

    @jax.jit
    def found(x, dy, weights, sizes):
        gate, up, hidden = experts.gated(Operand(x, None), weights, sizes)
        d_gate, d_up, d_weights, again = experts.gated_gradients(Operand(dy, None), gate, up, weights, sizes)
        return gate, up, hidden, d_gate, d_up, d_weights, again, sum(experts.input_gradients(d_gate, d_up, sizes))

    @jax.jit
    def plain(x, dy, weights, gate, up, down, of_gate, of_up):
        products, pull_x = jax.vjp(lambda x: (x @ gate + of_gate[None], x @ up + of_up[None]), x)
        hidden, pull = jax.vjp(lambda gate, up, weights: jax.nn.silu(gate) * up * weights, *products, weights)
        grads = pull(dy @ down.T)
        return *products, hidden, *grads, hidden, *pull_x(grads[:2])

    ends, added = np.cumsum([0, *sizes]), [bias * with_biases for bias in biases]
    groups = [
        plain(*(one[a:b] for one in (x, dy, weights)), *(each[at] for each in (*kernels, *added)))
        for at, (a, b) in enumerate(itertools.pairwise(ends))
    ]
    for a, *parts in zip(found(x, dy, weights, jnp.asarray(sizes, jnp.int32)), *groups, strict=True):
        e = np.concatenate(parts)
        assert np.abs(a[:used] - e).max() <= ERROR * np.abs(e).max()


COMPILE = r"""
import re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from parallax.model.experts.grouped import grouped_dot
from parallax.model.products import Operand

topology, operand, gradient = sys.argv[1:]
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
device = jax.sharding.SingleDeviceSharding(devices[0])
array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=device)

def product(x, w, sizes, units, transposed):
    x, w = Operand(x, units[0]), Operand(w, units[1])
    return grouped_dot(x, w, sizes, form="ragged_dot", dtype=jnp.bfloat16, transposed=transposed)

for dtype, width, transposed in ((operand, 2048, False), (gradient, 1024, True)):
    args = array(dtype, 4096, width), array(operand, 8, 2048, 1024), array("int32", 8), array("float32", 2)
    compiled = jax.jit(lambda *args: product(*args, transposed)).lower(*args).compile()
    kernels = re.findall(r'%(ragged-dot-none[\w.-]*) = .*custom-call', compiled.as_text())
    print(len(kernels), compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize(
    ("topology", "operand", "gradient"),
    [("v5e:2x2", "int8", "int8"), ("v5p:2x2x1", "int8", "int8"), ("tpu7x:2x2x1", "float8_e4m3fn", "float8_e5m2")],
)
def test_operands_in_8_bits_are_one_kernel_on_tpu(topology, operand, gradient):
    """Not the products of all rows with all matrices."""
    tpu = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | tpu
    command = [sys.executable, "-c", COMPILE, topology, operand, gradient]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows_by_all = 8 * 4096 * 1024 * 2  # bytes of the products of all rows with all matrices
    for line in done.stdout.splitlines():
        kernels, temporaries = map(int, line.split())
        assert kernels == 1 and temporaries < rows_by_all


# (sums rows, adds, bytes of an entry, block): MiB on a core, in the compiler's own words (libtpu 0.0.42.1, for v5e).
TAKEN = {
    (True, False, 2, (512, 1024, 1024)): 13.02,
    (True, True, 2, (512, 1024, 1024)): 17.02,
    (True, True, 2, (512, 1024, 512)): 9.97,
    (True, True, 2, (512, 512, 1024)): 9.54,
    (True, True, 2, (512, 768, 640)): 9.16,
    (True, True, 2, (128, 1024, 1024)): 13.14,
    (True, False, 4, (512, 1024, 1024)): 21.12,
    (True, True, 4, (512, 1024, 1024)): 29.12,
    (True, True, 4, (512, 1024, 512)): 17.12,
    (True, True, 4, (128, 512, 1024)): 11.51,
    (False, False, 2, (512, 1024, 1024)): 11.09,
    (False, False, 2, (512, 512, 1024)): 7.34,
    (False, False, 2, (512, 768, 640)): 6.79,
    (False, False, 2, (128, 1024, 1024)): 5.65,
    (False, False, 4, (512, 1024, 1024)): 18.07,
    (False, False, 4, (512, 768, 640)): 10.82,
}


@pytest.mark.parametrize("of", TAKEN, ids=str)
def test_a_block_takes_no_more_memory_than_is_counted_for_it(of):
    """And not much less: what is counted beside the block's arrays is part of a factor."""
    sums_rows, is_added, entry_bytes, block = of
    counted = vmem_bytes(*block, entry_bytes, sums_rows=sums_rows, is_added=is_added) / 2**20
    assert TAKEN[of] <= counted <= 1.25 * TAKEN[of]


@pytest.mark.parametrize("entry_bytes", [2, 4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("sums_rows", "is_added"), [(False, False), (True, False), (True, True)])
def test_blocks_of_the_kernels_of_jax_fit_16_mib(sums_rows, is_added, entry_bytes):
    """The VMEM of one operation on v5e, unless an option says otherwise, at half the widest block or more."""
    widths = (2048, 4096), (4096, 2048), (2048, 1408), (7168, 2048), (2880, 2880), (2048, 704), (64, 48)
    for rows, sides in itertools.product((128, 10240, 16384), widths):
        size, *block = block_that_fits(rows, sides, entry_bytes, sums_rows=sums_rows, is_added=is_added)
        left, right = block
        arrays = [(size, left), (size, right) if sums_rows else (left, right)]
        arrays += (1 + is_added) * [(left, right) if sums_rows else (size, right)]
        twice = 2 * entry_bytes * sum(itertools.starmap(operator.mul, arrays))
        sums = 4 * operator.mul(*arrays[-1])
        assert twice + sums + size * left * 4 <= 16 * 2**20, (rows, sides, size, block)
        widest = [width_of_block(side, 1024) for side in sides]
        assert rows % size == 0 and 2 * left * right >= operator.mul(*widest), (rows, sides, block)


SUMS = r"""
import sys
import jax
from jax.experimental import topologies
from parallax.model.experts.grouped_kernel import transposed_by_group, weights_by_group

devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
device = jax.sharding.SingleDeviceSharding(devices[0])
array = lambda *shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=device)
sizes = array(4, dtype="int32")
for dtype in ("bfloat16", "float32"):
    x, y = array(2048, 2048, dtype=dtype), array(2048, 4096, dtype=dtype)
    w = array(4, 2048, 4096, dtype=dtype)
    for function, args in ((weights_by_group, (x, y, sizes, w)), (transposed_by_group, (y, w, sizes))):
        print("tpu_custom_call" in jax.jit(function).lower(*args).compile().as_text())
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_sums_are_added_to_others_in_the_memory_of_a_v5e():
    """Experts of 2048 x 4096, in both dtypes: 17.02 MiB in blocks of 512 rows and 1024 entries of bfloat16, of 16."""
    tpu = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | tpu
    done = subprocess.run([sys.executable, "-c", SUMS, "v5e:2x2"], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == 4 * ["True"]


GATED = r"""
import re, sys
import jax
from jax.experimental import topologies
from parallax.model.experts import grouped_kernel
from parallax.model.experts.grouped_kernel import gated_by_group, input_gradient_by_group
from parallax.model.mlp import Activation

grouped_kernel.platform_traced = lambda: "tpu"  # on CPUs they are interpreted
devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
device = jax.sharding.SingleDeviceSharding(devices[0])
array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype, sharding=device)
sizes, weights = array(8, dtype="int32"), array(4096, 1, dtype="float32")

def biased(x, gate, up, weights, sizes, *biases):
    return gated_by_group(x, gate, up, weights, sizes, Activation("clamped", 7.0), biases)

for x, wide in ((2048, 1408), (4096, 14336), (2880, 2880)):
    rows, into = array(4096, wide), array(8, x, wide)
    for kernel, args in (
        (gated_by_group, (array(4096, x), into, into, weights, sizes)),
        (biased, (array(4096, x), into, into, weights, sizes, array(8, wide), array(8, wide))),
        (input_gradient_by_group, (rows, rows, into, into, sizes)),
    ):
        print(len(re.findall(r"%gmm_[\w.-]* = .*custom-call", jax.jit(kernel).lower(*args).compile().as_text())))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_kernels_for_gated_experts_compile_for_tpu(topology):
    """With the widths of DeepSeek-V2-Lite, Mixtral and gpt-oss, in the memory of a core."""
    tpu = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | tpu
    done = subprocess.run([sys.executable, "-c", GATED, topology], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == 3 * ["2", "2", "1"]
