"""What an instruction of a GPU's program takes: the longer of its products at peak and its bytes through memory."""

import re

import jax
import pytest
from support.hlo_examples import GPU_LAYERS

from parallax.analysis.compiled.hlo import parse_hlo
from parallax.analysis.compiled.program import instruction_flops, read_hlo_text
from parallax.analysis.compiled.roofline import moved_bytes, roofline_secs
from parallax.analysis.planned.step_time import overlaps, step_time
from parallax.config.sections import MeshConfig
from parallax.hardware.chips import CHIPS, chip
from parallax.sharding.mesh import make_mesh

H100, MIB = CHIPS["NVIDIA H100"], 2**20
PRODUCT = 2 * 1024 * 2048 * 2048  # FLOPs of a layer
SILU, SLICE, STORE = 8 * MIB, 2 * MIB, 8 * MIB  # bytes that are read and written


def program(line, inside=""):
    """One instruction, `line`, of x = bf16[8,16], w = bf16[16,4], f = f32[16,4], stack = bf16[6,8,16] and a number."""
    given = (
        "x = bf16[8,16]{1,0}",
        "w = bf16[16,4]{1,0}",
        "f = f32[16,4]{1,0}",
        "stack = bf16[6,8,16]{2,1,0}",
        "at = s32[]",
    )
    lines = [f"  %{one} parameter({at})" for at, one in enumerate(given)]
    text = "\n".join([inside, "ENTRY %main (x: bf16[8,16]) -> bf16[] {", *lines, f"  ROOT %it = {line}", "}", ""])
    module = parse_hlo(text)
    return module.computations["main"].root, module.computations["main"], module


def fused(*lines, kind="fusion"):
    """A fusion of x, stack and the number; `lines` are its body."""
    given = ("p.0 = bf16[8,16]{1,0}", "p.1 = bf16[6,8,16]{2,1,0}", "p.2 = s32[]")
    head = [f"  %{one} parameter({at})" for at, one in enumerate(given)]
    inside = "\n".join(["%body (p.0: bf16[8,16]) -> bf16[] {", *head, *(f"  {line}" for line in lines), "}", ""])
    return program(f"bf16[8,16]{{1,0}} {kind}(%x, %stack, %at), kind=kLoop, calls=%body", inside)


X, STACK = 8 * 16 * 2, 6 * 8 * 16 * 2


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("bf16[8,16]{1,0} copy(%x)", 2 * X),
        ("bf16[8,16]{1,0} add(%x, %x)", 2 * X),  # the same array is read once
        ("bf16[1,8,16]{2,1,0} dynamic-slice(%stack, %at, %at, %at), dynamic_slice_sizes={1,8,16}", 2 * X),
        ("bf16[6,8,16]{2,1,0} dynamic-update-slice(%stack, %x, %at, %at, %at)", 2 * X),
        ("bf16[128]{0} bitcast(%x)", 0),
        ("(bf16[8,4]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target=\"__cublas$gemm\"", X + 128 + 64),
    ],
)  # fmt: skip
def test_an_instruction_moves_what_it_reads_and_writes(line, moved):
    assert moved_bytes(*program(line)) == moved


def test_a_fusion_reads_the_slice_that_it_takes_and_the_whole_of_what_it_uses_otherwise():
    taken = "%s.1 = bf16[1,8,16]{2,1,0} dynamic-slice(%p.1, %p.2, %p.2, %p.2), dynamic_slice_sizes={1,8,16}"
    flat = "%b.1 = bf16[8,16]{1,0} bitcast(%s.1)"
    assert moved_bytes(*fused(taken, flat, "ROOT %a.1 = bf16[8,16]{1,0} add(%b.1, %p.0)")) == 3 * X + 4
    whole = "%n.1 = bf16[6,8,16]{2,1,0} negate(%p.1)"
    sliced = taken.replace("%p.1", "%n.1")
    assert moved_bytes(*fused(whole, sliced, flat, "ROOT %a.1 = bf16[8,16]{1,0} add(%b.1, %p.0)")) == 2 * X + STACK + 4


def test_a_fusion_that_updates_in_place_writes_the_update():
    new = "%b.1 = bf16[1,8,16]{2,1,0} bitcast(%p.0)"
    placed = "bf16[6,8,16]{2,1,0} dynamic-update-slice(%p.1, %b.1, %p.2, %p.2, %p.2)"
    assert moved_bytes(*fused(new, f"ROOT %u.1 = {placed}")) == 2 * X + 4
    twice = "ROOT %t.1 = (bf16[6,8,16]{2,1,0}, bf16[8,16]{1,0}) tuple(%u.1, %p.0)"
    assert moved_bytes(*fused(new, f"%u.1 = {placed}", twice)) == 3 * X + 4


def test_a_fusion_that_runs_beside_others_moves_the_same_bytes_once():
    taken = "%s.1 = bf16[1,8,16]{2,1,0} dynamic-slice(%p.1, %p.2, %p.2, %p.2), dynamic_slice_sizes={1,8,16}"
    body = (taken, "%b.1 = bf16[8,16]{1,0} bitcast(%s.1)", "ROOT %a.1 = bf16[8,16]{1,0} add(%b.1, %p.0)")
    assert moved_bytes(*fused(*body, kind="fusion-start")) == moved_bytes(*fused(*body)) == 3 * X + 4
    assert moved_bytes(*program("bf16[8,16]{1,0} fusion-done(%x)")) == 0


@pytest.mark.parametrize(
    ("operand", "rest", "rate"),
    [("x", "", 989e12), ("f", "", 494.5e12), ("f", ", operand_precision={highest,highest}", 132 * 128 * 2 * 1.98e9)],
)
def test_a_product_takes_its_flops_at_the_peak_of_its_dtype(operand, rest, rate):
    line = f"f32[8,4]{{1,0}} dot(%{operand}, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{rest}"
    one, home, _ = program(line)
    assert roofline_secs([(one, home, 10**12)], 0, H100) == pytest.approx(1e12 / rate)
    assert roofline_secs([(one, home, 1000)], 10**9, H100) == pytest.approx(1e9 / 3.35e12)


def test_a_product_by_cublas_has_its_flops():
    dims = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    said = f'custom_call_target="__cublas$lt$matmul", backend_config={dims}'
    one, home, _ = program(f"(bf16[8,4]{{1,0}}, s8[4194304]{{0}}) custom-call(%x, %w), {said}")
    assert instruction_flops(one, home) == 2 * 8 * 16 * 4


# ---- a whole program


@pytest.fixture(scope="module")
def layers():
    mesh = make_mesh(MeshConfig(pp=1, dp=8, tp=1, simulate=0), jax.devices()[:8])
    return read_hlo_text(GPU_LAYERS, mesh, gpu=H100)


def test_a_compiled_program_takes_its_products_at_peak_and_the_rest_at_memory_bandwidth(layers):
    secs = 6 * (PRODUCT / 989e12 + (SILU + SLICE + STORE) / 3.35e12)
    copied = 8 * MIB / 3.35e12  # of the input, once
    assert layers.cycles / H100.clock_hz == pytest.approx(secs + copied, rel=1e-3)
    assert layers.flops.passes == 6 * PRODUCT


def test_a_gather_hides_what_it_travels_beside(layers):
    (gather,) = layers.collectives
    assert gather[:6] == ("all-gather", ("dp",), 7 * MIB, 6, 6, True)
    beside, alone = STORE / 3.35e12, 7 * MIB / 450e9
    assert gather.cycles_between / H100.clock_hz == pytest.approx(beside, rel=1e-3)
    # Stand-ins for GPUs, without places or processes of their own, are joined by a switch.
    time = step_time(layers, H100, 6 * PRODUCT)
    assert time.exposed_secs["dp"] == pytest.approx(6 * (alone - beside), rel=1e-3)
    (row,) = overlaps(layers, H100)
    assert row[:5] == ("dp", "all-gather", 6, 42 * MIB, 1.0) and row.hidden == pytest.approx(beside / alone, rel=1e-3)


def test_a_loop_whose_limit_stands_in_the_fusion_that_compares_turns_as_often():
    module = parse_hlo(GPU_LAYERS.replace('{"known_trip_count":{"n":"6"}}', "{}"))
    (loop,) = (one for one in module.computations[module.entry].instructions if one.kind == "while")
    assert "known" not in loop.rest and module.trips(loop, module.computations[module.entry]) == 6


def test_a_collective_that_runs_in_turn_hides_nothing():
    mesh = make_mesh(MeshConfig(pp=1, dp=8, tp=1, simulate=0), jax.devices()[:8])
    read = read_hlo_text(GPU_LAYERS.replace('"is_sync":false', '"is_sync":true'), mesh, gpu=H100)
    (row,) = overlaps(read, H100)
    assert (row.asynchronous, row.hidden) == (0, 0)
    time = step_time(read, H100, 6 * PRODUCT)
    assert time.exposed_secs["dp"] == pytest.approx(6 * 7 * MIB / 450e9)


def test_cudnn_s_attention_is_a_kernel_of_its_flops_here_or_not():
    heads = "bf16[2,64,4,32]{3,2,1,0}"
    line = f'({heads}, f32[2,4,64]{{2,1,0}}) custom-call(%q, %q, %q), custom_call_target="TARGET"'
    text = f"ENTRY %main (q: {heads[:-9]}) -> {heads[:-9]} {{\n  %q = {heads} parameter(0)\n  ROOT %it = {line}\n}}\n"
    mesh = make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), jax.devices()[:1])
    found = [
        read_hlo_text(text.replace("TARGET", target), mesh, gpu=chip("H100")).pallas_calls[0].flops
        for target in ("cudnn_fwd", "__cudnn$fmhaScaleBiasSoftmax", "cudnn_bwd", "__cudnn$fmhaScaleBiasSoftmaxBackward")
    ]
    assert found[0] == found[1] == 2 * 2 * 4 * 64 * 64 * (32 + 32) and found[2] == found[3] == found[0] * 5 // 2


@pytest.mark.parametrize("name", ["attention)/mha_fwd", "transpose(attention))/mha_dq", "mha_dkv)"])
def test_attention_for_triton_is_known_by_the_name_of_its_operation(name):
    """XLA calls all kernels of Pallas alike."""
    heads, keys = "f32[1,128,4,64]", "f32[1,128,2,64]"
    line = f'{heads} custom-call(%q, %k, %k), custom_call_target="__gpu$xla.gpu.triton"'
    text = (
        f"ENTRY %main (q: {heads}, k: {keys}) -> {heads} {{\n  %q = {heads} parameter(0)\n  %k = {keys} parameter(1)\n"
        f'  ROOT %it = {line}, metadata={{op_name="jit(step)/jvp({name}/pallas_call"}}\n}}\n'
    )
    mesh = make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), jax.devices()[:1])
    (kernel,) = read_hlo_text(text, mesh, gpu=chip("H100")).pallas_calls
    part = re.search(r"mha_(\w+)", name)[1]
    scores = {"fwd": 2 * 128**2, "dq": 3 * 3 * 64**2, "dkv": 4 * 3 * 64**2}[part]  # of all products
    assert kernel.flops == 2 * 4 * scores * 64  # of four heads
