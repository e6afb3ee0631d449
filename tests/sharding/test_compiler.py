"""What XLA is told for each kind of chip, and where a gather takes two steps."""

import itertools

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import AbstractMesh
from support.stand_ins import AXES, Chip, ChipMesh
from support.step_collectives import step_collectives
from support.tiny_model import build, make_batch, mesh_of
from support.traced_equations import equations

from parallax.sharding import compiler, plan, slots
from parallax.sharding.compiler import (
    clears_what_is_overwritten,
    compiler_options,
    computes_gradients_again,
    first_group,
    keeps_stream_in_rows,
    reads_heads_last,
    rounds_in_products,
    saves_means_of_norms,
    scales_queries_first,
    sends_small_gradients_last,
    writes_slots_of_one_dtype,
)
from parallax.sharding.slots import unset


def mesh_on(shape, torus, kind="TPU v5p"):
    """A mesh of stand-ins for the chips of a torus, in the order of their places."""
    places = list(itertools.product(*map(range, torus)))
    chips = np.empty(len(places), object)
    chips[:] = [Chip("tpu", kind, list(place)) for place in places]
    return ChipMesh(chips.reshape(shape))


@pytest.fixture
def refusing(monkeypatch):
    """A function that has the compiler say this of options, "" where it takes them; it does not know these chips."""
    return lambda refusal: monkeypatch.setattr(compiler, "refusal", lambda mesh, options: refusal(options))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("TPU v5 lite", {"xla_tpu_enable_async_all_to_all"}),
        ("TPU v5p", {"xla_tpu_enable_async_all_to_all", "xla_tpu_enable_sparse_core_collective_offload_all_gather"}),
        ("TPU v6 lite", {"xla_tpu_enable_ragged_dot_kernel"}),
        ("TPU7x", {"xla_tpu_enable_async_all_to_all", "xla_tpu_enable_sparse_core_collective_offload_all_gather"}),
        ("TPU v99", set()),  # of which nothing was measured
    ],
)
def test_each_chip_is_told_what_was_measured_on_it(kind, said, refusing):
    refusing(lambda options: "")
    options = compiler_options(mesh_on((1, 16, 1), (4, 4, 1), kind))
    assert said <= {name for name, on in options.items() if on} and bool(said) == bool(options)


@pytest.mark.parametrize(("kind", "mib"), [("TPU v5 lite", 32), ("TPU v5p", 64), ("TPU7x", 64)])
def test_an_operation_may_fill_more_vmem_where_products_are_faster_with_it(kind, mib, refusing):
    refusing(lambda options: "")
    assert compiler_options(mesh_on((1, 16, 1), (4, 4, 1), kind))["xla_tpu_scoped_vmem_limit_kib"] == mib * 1024


def test_models_with_experts_are_told_more_where_other_options_are(refusing, monkeypatch):
    """On v5e: rows sent to experts are not waited for, and gathers are fused with passes over memory, too, since their
    products are kernels."""
    refusing(lambda options: "")
    meshes = {kind: mesh_on((1, 16, 1), (4, 4, 1), kind) for kind in ("TPU v5 lite", "TPU v5p", "TPU v6 lite")}
    more = {kind: compiler_options(mesh, has_mixtures=True).items() for kind, mesh in meshes.items()}
    added = {kind: dict(more[kind] - compiler_options(mesh).items()) for kind, mesh in meshes.items()}
    on_v5e = {"xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions", "xla_tpu_enable_async_ragged_all_to_all"}
    assert added == {"TPU v5 lite": dict.fromkeys(on_v5e, True), "TPU v5p": {}, "TPU v6 lite": {}}
    monkeypatch.setattr(compiler, "OPTIONS", {})
    assert not compiler_options(meshes["TPU v5 lite"], has_mixtures=True)


def test_exchanges_are_not_to_hide_on_slices_for_which_xla_refuses_it(refusing):
    refusing(lambda options: "" if "xla_tpu_enable_async_all_to_all" not in options else pytest.fail("it was tried"))
    for has_mixtures in (False, True):
        options = compiler_options(mesh_on((1, 16, 2), (4, 8, 1), "TPU v5 lite"), has_mixtures=has_mixtures)
        assert options["xla_tpu_scoped_vmem_limit_kib"] == 32 * 1024


def test_permutes_of_token_streams_begin_several_products_ahead_on_v5p(refusing):
    refusing(lambda options: "")
    meshes = {kind: mesh_on((1, 16, 1), (4, 4, 1), kind) for kind in ("TPU v5 lite", "TPU v5p")}
    more = {kind: compiler_options(mesh, has_streams=True).items() for kind, mesh in meshes.items()}
    added = {kind: dict(more[kind] - compiler_options(mesh).items()) for kind, mesh in meshes.items()}
    counted = ("xla_lhs_output_fusion_latency_multiplier", "xla_lhs_loop_fusion_latency_multiplier")
    assert added == {"TPU v5 lite": {}, "TPU v5p": dict.fromkeys(counted, 0.4)}


def test_products_in_float8_of_fixed_ranges_may_round_their_inputs_on_v7x(refusing):
    refusing(lambda options: "")
    rounds = {"xla_tpu_allow_conv_input_fusion_with_downcast_convert": True}
    for kind, more in (("TPU v5p", {}), ("TPU7x", rounds)):
        mesh = mesh_on((1, 16, 1), (4, 4, 1), kind)
        assert compiler_options(mesh, "float8", has_fixed_ranges=True) == compiler_options(mesh) | more
        assert compiler_options(mesh, "float8") == compiler_options(mesh)
        assert compiler_options(mesh, "int8", has_fixed_ranges=True) == compiler_options(mesh)


def test_slots_are_carried_from_tick_to_tick_where_each_tick_would_clear_them():
    assert clears_what_is_overwritten(ChipMesh(np.array([Chip("gpu", "NVIDIA H100")], object)))
    assert clears_what_is_overwritten(mesh_of(1, 1, 1))  # of simulated devices
    assert not clears_what_is_overwritten(mesh_on((1, 1, 1), (1,)))
    assert not clears_what_is_overwritten(AbstractMesh((1,), ("dp",)))  # of no devices, as a plan's


@pytest.mark.parametrize(
    ("kind", "heads", "fewer_passes", "again"),
    [
        ("TPU v4", False, False, False),
        ("TPU v5 lite", False, True, False),
        ("TPU v5p", False, True, True),
        ("TPU v6 lite", True, True, True),
        ("TPU7x", True, True, True),
    ],
)
def test_what_a_compiler_is_spared_is_for_chips_on_which_it_was_compiled(kind, heads, fewer_passes, again):
    device = jax.sharding.AbstractDevice(kind, None, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("dp",), abstract_device=device)):
        assert (reads_heads_last(), scales_queries_first(), computes_gradients_again()) == (heads, fewer_passes, again)
        assert rounds_in_products() == sends_small_gradients_last() == (kind == "TPU7x")
    mesh = mesh_on((1, 1, 1), (1, 1, 1), kind)
    assert keeps_stream_in_rows(mesh) == saves_means_of_norms(mesh) == fewer_passes
    assert writes_slots_of_one_dtype(mesh) == (kind == "TPU7x")
    assert not reads_heads_last() and not scales_queries_first() and not computes_gradients_again()
    assert not keeps_stream_in_rows(mesh_of(1, 1, 1)) and not saves_means_of_norms(mesh_of(1, 1, 1))


def test_a_kernel_of_heads_has_their_dims_last_in_memory(monkeypatch):
    """Attention's output projection; the others have the dim of their sum first in any case."""
    model = build((1, 1, 1), microbatches=1, remat="layer", attention="gqa")
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), model.shapes["blocks"])
    use = lambda: jax.jit(lambda layer: model.plan.use(layer, "blocks")).lower(layer).as_text()  # noqa: E731
    assert "LayoutConstraint" not in use()
    monkeypatch.setattr(plan, "reads_heads_last", lambda: True)
    (pinned,) = [line for line in use().splitlines() if "@LayoutConstraint" in line]
    out = layer["attention"]["out"]["kernel"].shape
    assert "result_layouts = [dense<[1, 2, 0]>" in pinned and f"tensor<{'x'.join(map(str, out))}xf32>" in pinned


@pytest.mark.parametrize(("policy", "pinned"), [("zero1", True), ("zero3", False)])
def test_a_kernel_of_heads_that_no_layer_gathers_has_the_memory_layout_of_its_stack(policy, pinned, monkeypatch):
    """So that XLA copies a layer of it, not the stack."""
    monkeypatch.setattr(plan, "copies_whole_stacks", lambda: True)
    model = build((1, 2, 1), microbatches=1, remat="layer", attention="gqa", policy=policy)
    found = equations(model.loss_and_grad, model.shapes, make_batch())
    layouts = [(e.outvars[0].aval.shape, e.params["layout"]) for e in found if e.primitive.name == "layout_constraint"]
    out = model.shapes["blocks"]["attention"]["out"]["kernel"].shape[1:]
    assert bool(layouts) == pinned
    assert {shape for shape, _ in layouts} <= {out} and {layout for _, layout in layouts} <= {Layout((0, 1, 2))}


def test_unset_slots_are_allocated_and_not_cleared_on_tpu_alone(monkeypatch):
    make = jax.jit(lambda x: unset(x, 3)).trace(jax.ShapeDtypeStruct((2, 4), "float32"))
    assert "AllocateBuffer" not in make.lower(lowering_platforms=("tpu",)).as_text()
    monkeypatch.setattr(slots, "platform_traced", lambda: "tpu")
    make = jax.jit(lambda x: unset(x, 3)).trace(jax.ShapeDtypeStruct((2, 4), "float32"))
    assert "AllocateBuffer" in make.lower(lowering_platforms=("tpu",)).as_text()


def test_other_devices_are_told_nothing():
    assert compiler_options(mesh_of(2, 2, 2)) == compiler_options(mesh_of(2, 2, 2), "float8") == {}


@pytest.mark.parametrize("absent", [True, False])
def test_products_in_float8_on_gpus_are_neither_for_triton_nor_merged(absent, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu" if absent else "gpu")
    mesh = ChipMesh(np.array([Chip("gpu", "NVIDIA H100")], object))
    others = {"xla_gpu_mock_custom_calls": True} if absent else {}
    assert compiler_options(mesh) == compiler_options(mesh, "int8") == others
    apart = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    assert compiler_options(mesh, "float8") == others | apart


def test_gathers_are_fused_into_compute_on_v5e_alone():
    """The compiler's own words: elsewhere it "might lead to … incorrect results, hang, SDC"."""
    for chip, options in itertools.chain(compiler.OPTIONS.items(), compiler.OF_MIXTURES.items()):
        fused = {name for name, value in options.items() if "async_collective_fusion" in name and value}
        assert chip == "TPU v5e" or not fused, (chip, fused)


def test_what_the_installed_compiler_does_not_take_is_left_out_with_a_line(refusing, capsys):
    new = "xla_tpu_enable_sparse_core_reduce_scatter_v2"
    refusing(lambda options: f"No such compile option: {new!r}" if new in options else "")
    mesh = mesh_on((1, 16, 1), (4, 4, 1))
    taken = {name: value for name, value in compiler.OPTIONS["TPU v5p"].items() if name != new}
    assert compiler_options(mesh) == compiler_options(mesh) == taken and len(taken) > 10
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"{new}=True for TPU v5p, left out: No such compile option: {new!r}" in lines[0]


def test_a_compiler_that_takes_nothing_at_all_is_not_told_less(refusing, capsys):
    refusing(lambda options: "UNAVAILABLE: the TPU is in use")
    assert compiler_options(mesh_on((1, 16, 1), (4, 4, 1))) == compiler.OPTIONS["TPU v5p"]
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "torus", "group"),
    [
        ((1, 64, 1), (4, 4, 4), 4),  # a whole cube: along its last dim, then along the others
        ((1, 32, 1), (2, 4, 4), 4),
        ((1, 16, 4), (4, 4, 4), 1),  # tp takes the last dim, dp fills two
        ((4, 16, 1), (4, 4, 4), 1),
        ((1, 16, 1), (4, 4, 1), 1),
        ((1, 1, 8), (2, 2, 2), 1),
    ],
)
def test_a_gather_takes_two_steps_where_its_ranks_fill_three_dims(shape, torus, group):
    assert first_group(mesh_on(shape, torus), ("dp",)) == group


def test_a_gather_over_two_axes_counts_the_ranks_of_both():
    mesh = mesh_on((4, 16, 1), (4, 4, 4))  # pp takes the first dim, dp the others
    assert first_group(mesh, ("dp",)) == 1
    assert first_group(mesh, ("dp", "pp")) == first_group(mesh, ("pp", "dp")) == 4


def test_devices_that_are_nowhere_gather_at_once():
    assert first_group(mesh_of(1, 8, 1), ("dp",)) == 1
    assert first_group(jax.sharding.AbstractMesh((1, 8, 1), AXES), ("dp",)) == 1


def test_two_steps_send_what_one_sends(monkeypatch):
    """Of `whole` bytes over 8 = 2 x 4 ranks: an eighth of them to one other, then a quarter to three."""
    at_once = gathers_of(build((1, 8, 1), microbatches=1, remat="layer"))
    monkeypatch.setattr("parallax.pipeline.model_on_mesh.first_group", lambda mesh, axes: 2)
    in_steps = gathers_of(build((1, 8, 1), microbatches=1, remat="layer"))
    assert sum(one.total_bytes for one in at_once) == sum(one.total_bytes for one in in_steps) > 0
    assert sum(one.count for one in in_steps) == 2 * sum(one.count for one in at_once)


def gathers_of(model):
    sent = step_collectives(model, 16, 32)
    return [one for one in sent if one.kind == "all-gather" and one.axes == ("dp",)]
