"""Kernels of a GPU's command buffers: which instructions ran them.

The kernels are a layer's forward pass and a chunk of the head from a trace of one H100 (configs/gpu_80gb.py, jax
0.11.2); Memset and most of what is alike are left out.
"""

import json

import pytest
from jax.profiler import ProfileData

from parallax.analysis.command_buffers import CommandBuffers
from parallax.analysis.hlo import parse_hlo
from parallax.analysis.profile import profile_steps, read_traces
from parallax.storage.run_files import PROGRAM, TRACED

# Of each computation: instruction, kind or target, where the program asked for it, whose kernel it shares.
LAYER = """
fusion-start.9 fusion-start dynamic_update_slice
loop_convert_fusion.12 fusion attention/k/convert_element_type loop_convert_fusion.11
loop_convert_fusion.13 fusion attention/q/convert_element_type loop_convert_fusion.11
fusion.433 fusion jvp(Block)/attention_norm/convert_element_type
loop_convert_fusion.11 fusion attention/v/convert_element_type loop_convert_fusion.11
custom-call.9 __cublas$lt$matmul jvp(Block)/attention/attention._project/k/BSD,DGK->BSGK/dot_general
custom-call.8 __cublas$lt$matmul jvp(Block)/attention/attention._project/q/BSD,DHK->BSHK/dot_general
dot_product_attention_fwd.28 __cudnn$fmhaScaleBiasSoftmax jvp(Block)/attention/_attend/dot_product_attention_fwd
cublas-lt-matmul.2 __cublas$lt$matmul jvp(Block)/attention/out/BSHK,HKD->BSD/dot_general
fusion.435 fusion jvp(Block)/mlp_norm/convert_element_type
custom-call.5 __cublas$lt$matmul jvp(Block)/mlp/gate/BSD,DF->BSF/dot_general
fusion-start.12 fusion-start dynamic_update_slice
loop_multiply_fusion.1 fusion jvp(Block)/mlp/mul
custom-call.1 __cublas$lt$matmul jvp(Block)/mlp/down/BSF,FD->BSD/dot_general
loop_add_fusion.15 fusion jvp(Block)/add
loop_add_fusion.16 fusion add loop_add_fusion.12
"""
HEAD = """
fusion-start.14 fusion-start jit(dynamic_index_in_dim)/dynamic_slice
custom-call.13 __cublas$lt$matmul logits/CD,VD->CV/dot_general
input_reduce_fusion.1 fusion jvp()/reduce_max
custom-call.12 __cublas$lt$matmul logits/CV,VD->CD/dot_general
wrapped_convert.1 fusion convert_element_type
cublas-lt-matmul.0 __cublas$lt$matmul logits/CV,CD->VD/dot_general
loop_add_fusion.12 fusion add loop_add_fusion.12
"""
# Kernel, nanoseconds, and the instruction that ran it.
KERNELS = """
memcpy128 44161
loop_convert_fusion_12 11552 loop_convert_fusion.12
loop_convert_fusion_12 10688 loop_convert_fusion.13
fusion_433 50529 fusion.433
loop_convert_fusion_12 11392 loop_convert_fusion.11
nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT 163683 custom-call.9
nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT 160323 custom-call.8
cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7 475850 dot_product_attention_fwd.28
nvjet_sm90_tst_256x128_64x4_1x2_h_bx_coopA_NNT 180579 cublas-lt-matmul.2
fusion_435 48449 fusion.435
nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT 610509 custom-call.5
memcpy128 40929
loop_multiply_fusion_1 259142 loop_multiply_fusion.1
nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT 614989 custom-call.1
loop_add_fusion_15 62625 loop_add_fusion.15
loop_add_fusion_16 1536 loop_add_fusion.16
memcpy128 5088
nvjet_sm90_tss_144x128_64x6_1x2_h_bz_TNN 179877 custom-call.13
input_reduce_fusion_1 48672 input_reduce_fusion.1
nvjet_sm90_tss_128x128_64x6_2x1_v_bz_NNT 156451 custom-call.12
wrapped_convert_1 3425 wrapped_convert.1
nvjet_sm90_tss_128x128_64x6_2x1_v_badd_NTT 265925 cublas-lt-matmul.0
loop_add_fusion_16 1537 loop_add_fusion.12
"""


def rows(table):
    return [line.split() for line in table.strip().splitlines()]


def computation(name, table, where):
    def line(instruction, kind, op_name, shares=""):
        target = f', custom_call_target="{kind}"' if kind.startswith("__") else ""
        shares = f' deduplicated_name="{shares}"' if shares else ""
        kind = "custom-call" if target else kind
        metadata = f'metadata={{op_name="jit(train_step)/while/body/{where}/{op_name}"{shares}}}'
        return f"  %{instruction} = bf16[8,8]{{1,0}} {kind}(%p.{name}){target}, {metadata}\n"

    return f"%{name} (p.{name}: bf16[8,8]) -> bf16[8,8] {{\n{''.join(line(*row) for row in rows(table))}}}\n\n"


PROGRAM_TEXT = "HloModule jit_train_step, is_scheduled=true\n\n" + computation("region_5", LAYER, "F/while/body")
PROGRAM_TEXT += computation("region_16", HEAD, "while/body")


@pytest.mark.parametrize("turns", [1, 3])
def test_each_kernel_of_a_real_trace_finds_its_instruction(turns):
    """A loop's last kernels and its first ones, of the next turn, stand between the same two instructions."""
    layer, head = (kernels_of(table) for table in (LAYER, HEAD))
    ran = turns * layer + turns * head
    found = CommandBuffers(parse_hlo(PROGRAM_TEXT)).instructions([kernel for kernel, *_ in ran])
    assert [one.name if one else None for one in found] == [row[2] if len(row) > 2 else None for row in ran]


def kernels_of(table):
    """The kernels of one computation, copies with it: the layer's come first."""
    every = rows(KERNELS)
    first_of_head = next(at for at, row in enumerate(every) if "custom-call.13" in row) - 1
    return every[first_of_head:] if table is HEAD else every[:first_of_head]


def test_what_has_no_instruction_is_left_open():
    found = CommandBuffers(parse_hlo(PROGRAM_TEXT)).instructions(["nvjet_sm90", "loop_add_fusion_99", "Memset 0"])
    assert found == [None, None, None]


def xspace(kernels):
    """The profiler's file of these kernels, one after the other in a command buffer."""
    names = list(dict.fromkeys(kernel for kernel, *_ in kernels))
    metadata = [f'event_metadata {{ key: {at} value {{ id: {at} name: "{n}" }} }}' for at, n in enumerate(names, 1)]
    stats = (
        'stats { metadata_id: 1 str_value: "command_buffer_26" } stats { metadata_id: 2 str_value: "jit_train_step" }'
    )
    events, now = [], 0
    for kernel, nanoseconds, *_ in kernels:
        place = f"metadata_id: {names.index(kernel) + 1} offset_ps: {1000 * now} duration_ps: {1000 * int(nanoseconds)}"
        events.append(f"events {{ {place} {stats} }}")
        now += int(nanoseconds)
    known = [
        f'stat_metadata {{ key: {at} value {{ id: {at} name: "hlo_{n}" }} }}' for at, n in ((1, "op"), (2, "module"))
    ]
    line = f'lines {{ name: "Stream #14(Compute)" timestamp_ns: 1000 {" ".join(events)} }}'
    text = f'planes {{ name: "/device:GPU:0" {" ".join([*metadata, *known, line])} }}'
    return ProfileData.text_proto_to_serialized_xspace(text)


def parts(folder, *, program):
    """Microseconds by part of the model, and those in products, of the kernels above."""
    folder.mkdir()
    (folder / "host.xplane.pb").write_bytes(xspace(rows(KERNELS)))
    if program:
        (folder / PROGRAM).write_text(PROGRAM_TEXT)
        (folder / TRACED).write_text(json.dumps({"run": "mine", "mesh": {"pp": 1, "dp": 1, "tp": 1}, "devices": [0]}))
    found = profile_steps(read_traces(folder))
    return {part.name: (round(part.secs * 1e6, 3), round(part.products * 1e6, 3)) for part in found.modules}


def test_a_profile_gives_kernels_of_command_buffers_to_the_parts_of_the_model(tmp_path):
    found = parts(tmp_path / "run", program=True)
    assert found["mlp"] == (610.509 + 259.142 + 614.989, 610.509 + 614.989)
    assert found["attention"][1] == pytest.approx(163.683 + 160.323 + 180.579)
    assert found["attention"][0] == pytest.approx(found["attention"][1] + 475.850 + 11.552 + 10.688 + 11.392)
    assert found["logits"] == pytest.approx((179.877 + 156.451 + 265.925,) * 2)
    assert found["copies"] == pytest.approx((44.161 + 40.929 + 5.088, 0))
    assert {"attention_norm", "mlp_norm", "slots and sums"} < set(found)


def test_without_the_program_kernels_are_told_by_library(tmp_path):
    found = parts(tmp_path / "run", program=False)
    assert {"cuBLAS", "cuDNN", "copies", "loop_convert_fusion", "loop_add_fusion"} < set(found)
    assert found["cuBLAS"][0] == found["cuBLAS"][1] and found["cuDNN"][1] == 0
