"""Small programs in the form of compilers, for TPU on a mesh of pp=2 dp=4, each with what makes that form hard to read;
and one as XLA compiles it for eight H100 along dp."""

import re

HEADER = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[4,8]{1,0:T(8,128)(2,1)})->bf16[4,8]}

FileNames
1 "/src/parallax/sharding/collectives.py"
2 "/src/parallax/model/dense.py"
3 "/src/train.py"

FunctionNames
1 "all_gather"
2 "Dense.__call__"
3 "main"

FileLocations
1 {file_name_id=3 function_name_id=3 line=9 end_line=9 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=57 end_line=57 column=4 end_column=9}
3 {file_name_id=1 function_name_id=1 line=30 end_line=30 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

"""
GATHER = (
    "channel_id=14, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, use_global_device_ids=true, "
    'frontend_attributes={chain_id="7"}, metadata={op_name="jit(step)/while/body/Block/mlp/up/all_gather" '
    'stack_frame_id=3}, backend_config={"flag_configs":[]}'
)

# An all-gather in pieces: a fusion starts it, one computes beside it, one ends it; in a loop of 6 turns.
CHAIN = (
    HEADER
    + """%start (p.0: bf16[4,8]) -> (bf16[4,8], bf16[16,8], u32[]) {
  %p.0 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p.0), GATHER
  ROOT %custom-call.1 = (bf16[4,8]{1,0}, bf16[16,8]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/u32[]{:S(2)}) \
custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (p.1: bf16[4,8], p.2: bf16[16,8]) -> bf16[4,8] {
  %p.1 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.2 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p.1), GATHER
  ROOT %add.1 = bf16[4,8]{1,0:T(8,128)(2,1)} add(%p.1, %p.1)
}

%done (p.3: bf16[4,8], p.4: bf16[16,8]) -> bf16[16,8] {
  %p.3 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %p.4 = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.3 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p.3), GATHER
  ROOT %custom-call.2 = bf16[16,8]{1,0:T(8,128)(2,1)} custom-call(%p.3, %p.4, %all-gather.3), \
custom_call_target="AsyncCollectiveDone"
}

%condition (p.5: (s32[], bf16[4,8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(6)
  %p.5 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%p.5), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%get-tuple-element.1, %constant.1), direction=LT
}

%body (p.6: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p.6 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %get-tuple-element.2 = s32[]{:T(128)} get-tuple-element(%p.6), index=0
  %get-tuple-element.3 = bf16[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p.6), index=1
  %fusion.1 = bf16[4,8]{1,0} fusion(%get-tuple-element.3), kind=kLoop, calls=%x, CYCLES(1000)
  %async-collective-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}, u32[]{:S(2)}) fusion(%fusion.1), calls=%start
  %get-tuple-element.4 = bf16[16,8]{1,0} get-tuple-element(%async-collective-start), index=1
  %fusion.2 = bf16[4,8]{1,0} fusion(%fusion.1, %get-tuple-element.4), kind=kOutput, calls=%beside, CYCLES(3000)
  %copy.1 = bf16[4,8]{1,0} copy(%fusion.2), CYCLES(50)
  %async-collective-done = bf16[16,8]{1,0} fusion(%fusion.2, %get-tuple-element.4), kind=kCustom, calls=%done
  %fusion.3 = bf16[4,8]{1,0} fusion(%async-collective-done), kind=kLoop, calls=%x, CYCLES(700)
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[4,8]{1,0}) tuple(%get-tuple-element.2, %fusion.3)
}

%x (p.7: bf16[4,8]) -> bf16[4,8] {
  ROOT %p.7 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
}

ENTRY %main (p.8: bf16[4,8]) -> bf16[4,8] {
  %p.8 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %constant.2 = s32[]{:T(128)} constant(0)
  %tuple.2 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) tuple(%constant.2, %p.8)
  %while.1 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) while(%tuple.2), condition=%condition, body=%body
  ROOT %get-tuple-element.5 = bf16[4,8]{1,0} get-tuple-element(%while.1), index=1
}
"""
).replace("GATHER", GATHER)

# One turn of a pipeline: a pass that a rank runs or not, then its message; gradients summed and sliced in one fusion,
# and a sum of three arrays at once, which has lost its name. A kernel without cycles.
PASS = (
    HEADER
    + """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.9 = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (q.0: f32[40,4]) -> f32[10,4] {
  %q.0 = f32[40,4]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[40,4]{1,0:T(8,128)} all-reduce(%q.0), channel_id=1, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, to_apply=%sum
  %constant.3 = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[10,4]{1,0} dynamic-slice(%all-reduce.1, %constant.3, %constant.3), \
dynamic_slice_sizes={10,4}
}

%idle (q.1: f32[40,4]) -> f32[10,4] {
  %q.1 = f32[40,4]{1,0:T(8,128)} parameter(0)
  ROOT %slice.1 = f32[10,4]{1,0:T(8,128)} slice(%q.1), slice={[0:10], [0:4]}, CYCLES(10)
}

%active (q.2: f32[40,4]) -> f32[10,4] {
  %q.2 = f32[40,4]{1,0:T(8,128)} parameter(0)
  %table.1 = s8[1,1,1]{2,1,0} constant({...})
  %heads.1 = bf16[2,128,64]{2,1,0} constant({...})
  %splash_mha_fwd_segmented = f32[40,4]{1,0} custom-call(%table.1, %table.1, %heads.1, %heads.1, %heads.1, %q.2), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(step)/while/body/F/cond/branch_1_fun/Block/attention/splash"}
  %fusion.8 = f32[40,4]{1,0} fusion(%splash_mha_fwd_segmented), kind=kOutput, calls=%y, CYCLES(900)
  ROOT %fusion.9 = f32[10,4]{1,0} fusion(%fusion.8), kind=kCustom, calls=%all-reduce-scatter.1
}

%y (q.4: f32[40,4]) -> f32[40,4] {
  ROOT %q.4 = f32[40,4]{1,0:T(8,128)} parameter(0)
}

ENTRY %main (q.5: f32[40,4], q.6: pred[]) -> f32[10,4] {
  %q.5 = f32[40,4]{1,0:T(8,128)} parameter(0)
  %q.6 = s32[]{:T(128)} parameter(1)
  %conditional.1 = f32[10,4]{1,0} conditional(%q.6, %q.5, %q.5), branch_computations={%idle, %active}, \
metadata={op_name="jit(step)/while/body/F/cond" stack_frame_id=2}
  %collective-permute-start.1 = (f32[10,4]{1,0}, f32[10,4]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%conditional.1), channel_id=2, source_target_pairs={{0,4},{1,5},{2,6},{3,7}}
  %fusion.7 = f32[40,4]{1,0} fusion(%q.5), kind=kLoop, calls=%y, CYCLES(40)
  %collective-permute-done.1 = f32[10,4]{1,0} collective-permute-done(%collective-permute-start.1)
  %scale.1 = f32[4]{0} slice(%q.5), slice={[0:1], [0:4]}, metadata={op_name="jit(step)/norm/mul" stack_frame_id=2}
  %all-reduce.2 = (f32[4]{0:T(128)}, f32[]{:T(128)}, bf16[2]{0}) all-reduce(%scale.1, %scalar.1, %pair.1), \
channel_id=3, replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0','axis_1'}, \
use_global_device_ids=true, to_apply=%sum
  %scalar.1 = f32[]{:T(128)} constant(1)
  %pair.1 = bf16[2]{0} constant({1, 2})
  ROOT %copy.2 = f32[10,4]{1,0} copy(%collective-permute-done.1)
}
"""
)

# What the SparseCores of a v5p do beside compute: an all-gather whose operand its start has (libtpu 0.0.42), one whose
# operand comes with an update, behind compute that does not hide it (0.0.50), and rows of a table that are gathered.
SPARSE = (
    HEADER
    + """%called.1 (s.0: bf16[4,8]) -> bf16[16,8] {
  %s.0 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%s.0), GATHER
}, execution_thread="sparsecore"

%rows (s.1: bf16[512,8], s.2: s32[16]) -> bf16[16,8] {
  %s.1 = bf16[512,8]{1,0:T(8,128)(2,1)} parameter(0)
  %s.2 = s32[16]{0:T(1024)} parameter(1)
  ROOT %gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)} gather(%s.1, %s.2), offset_dims={1}
}, execution_thread="sparsecore"

%called.2 (s.3: bf16[512,8], s.4: s32[16]) -> bf16[16,8] {
  %s.3 = bf16[512,8]{1,0:T(8,128)(2,1)} parameter(0)
  %s.4 = s32[16]{0:T(1024)} parameter(1)
  ROOT %fusion.1 = bf16[16,8]{1,0} fusion(%s.3, %s.4), kind=kCustom, calls=%rows, CYCLES(9223372036854775807)
}, execution_thread="sparsecore"

%x (s.5: bf16[4,8]) -> bf16[4,8] {
  ROOT %s.5 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
}

ENTRY %main (s.6: bf16[4,8], s.7: bf16[512,8], s.8: s32[16]) -> bf16[4,8] {
  %s.6 = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %s.7 = bf16[512,8]{1,0:T(8,128)(2,1)} parameter(1)
  %s.8 = s32[16]{0:T(1024)} parameter(2)
  %old.call-start = ((bf16[4,8]{1,0}, token[]), bf16[16,8]{1,0}) call-start(%s.6), \
async_execution_thread="sparsecore", to_apply=%called.1
  %fusion.2 = bf16[4,8]{1,0} fusion(%s.6), kind=kLoop, calls=%x, CYCLES(1000)
  %old.call-done = bf16[16,8]{1,0} call-done(%old.call-start)
  %new.call-start = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", \
to_apply=%called.1
  %fusion.3 = bf16[4,8]{1,0} fusion(%fusion.2), kind=kLoop, calls=%x, CYCLES(200)
  %new.call-update = ((bf16[4,8]{1,0}), bf16[16,8]{1,0}) call-update(%new.call-start, %fusion.3)
  %fusion.4 = bf16[4,8]{1,0} fusion(%fusion.3), kind=kLoop, calls=%x, CYCLES(30)
  %new.call-done = bf16[16,8]{1,0} call-done(%new.call-update)
  %rows.call-start = ((bf16[512,8]{1,0}, s32[16]{0}), bf16[16,8]{1,0}) call-start(%s.7, %s.8), \
async_execution_thread="sparsecore", to_apply=%called.2, metadata={op_name="jit(step)/Embedding/gather"}
  %rows.call-done = bf16[16,8]{1,0} call-done(%rows.call-start)
  ROOT %fusion.5 = bf16[4,8]{1,0} fusion(%fusion.4), kind=kLoop, calls=%x, CYCLES(4)
}
"""
).replace("GATHER", GATHER)


def with_cycles(text: str) -> str:
    """CYCLES(n), as the compiler writes it."""
    return re.sub(r"CYCLES\((\d+)\)", r'backend_config={"flag_configs":[],"estimated_cycles":"\1"}', text)


# Six layers of a product and silu, compiled for H100:1x8: each slices its weights, gathers them and stores its input,
# which is updated in place, while they travel.
GPU_LAYERS = """HloModule jit_layers, is_scheduled=true, num_partitions=8

%gemm_fusion_dot_general.3_computation (parameter_0: bf16[1024,2048], parameter_1: bf16[2048,2048]) -> \
bf16[1024,2048] {
  %parameter_0 = bf16[1024,2048]{1,0} parameter(0)
  %parameter_1 = bf16[2048,2048]{1,0} parameter(1)
  ROOT %dot_general.4 = bf16[1024,2048]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(step)/while/body/closed_call/dot_general"}
}

%fused_dynamic_update_slice (param_0.6: bf16[6,1024,2048], param_1.30: bf16[1024,2048], param_2.16: s32[6], \
param_3.10: s32[]) -> bf16[6,1024,2048] {
  %param_0.6 = bf16[6,1024,2048]{2,1,0} parameter(0)
  %param_1.30 = bf16[1024,2048]{1,0} parameter(1)
  %bitcast.1.1 = bf16[1,1024,2048]{2,1,0} bitcast(%param_1.30)
  %param_2.16 = s32[6]{0} parameter(2)
  %param_3.10 = s32[] parameter(3)
  %dynamic_slice.7.1 = s32[1]{0} dynamic-slice(%param_2.16, %param_3.10), dynamic_slice_sizes={1}
  %bitcast.2.9 = s32[] bitcast(%dynamic_slice.7.1)
  %constant_15_clone_3 = s32[] constant(0)
  %lt.6.3 = pred[] compare(%bitcast.2.9, %constant_15_clone_3), direction=LT
  %constant_17_clone_2 = s32[] constant(6)
  %add.12.3 = s32[] add(%bitcast.2.9, %constant_17_clone_2)
  %select_n.4.3 = s32[] select(%lt.6.3, %add.12.3, %bitcast.2.9)
  ROOT %dynamic_update_slice.4.1 = bf16[6,1024,2048]{2,1,0} dynamic-update-slice(%param_0.6, %bitcast.1.1, \
%select_n.4.3, %constant_15_clone_3, %constant_15_clone_3)
}

%fused_multiply (param_0.18: bf16[1024,2048]) -> bf16[1024,2048] {
  %param_0.18 = bf16[1024,2048]{1,0} parameter(0)
  %constant_16_clone_3 = bf16[] constant(1)
  %convert.3.1 = f32[] convert(%constant_16_clone_3)
  %broadcast.4.5 = f32[1024,2048]{1,0} broadcast(%convert.3.1), dimensions={}
  %neg.4.1 = bf16[1024,2048]{1,0} negate(%param_0.18)
  %exp.4.1 = bf16[1024,2048]{1,0} exponential(%neg.4.1)
  %jit_silu_.2.6 = bf16[1024,2048]{1,0} broadcast(%constant_16_clone_3), dimensions={}
  %add.11.5 = bf16[1024,2048]{1,0} add(%exp.4.1, %jit_silu_.2.6)
  %convert.1.3 = f32[1024,2048]{1,0} convert(%add.11.5)
  %div.4.5 = f32[1024,2048]{1,0} divide(%broadcast.4.5, %convert.1.3)
  %convert.2.3 = bf16[1024,2048]{1,0} convert(%div.4.5)
  ROOT %mul.4.1 = bf16[1024,2048]{1,0} multiply(%param_0.18, %convert.2.3)
}

%fused_add (param_0.23: s32[]) -> s32[] {
  %param_0.23 = s32[] parameter(0)
  %constant_14_clone_2 = s32[] constant(1)
  ROOT %add.10.1 = s32[] add(%param_0.23, %constant_14_clone_2)
}

%fused_dynamic_slice (param_0.24: bf16[6,256,2048], param_1.29: s32[]) -> bf16[1,256,2048] {
  %param_0.24 = bf16[6,256,2048]{2,1,0} parameter(0)
  %param_1.29 = s32[] parameter(1)
  %constant_15_clone_2 = s32[] constant(0)
  %dynamic_slice.6.1 = bf16[1,256,2048]{2,1,0} dynamic-slice(%param_0.24, %param_1.29, %constant_15_clone_2, \
%constant_15_clone_2), dynamic_slice_sizes={1,256,2048}
  ROOT %copy.21 = bf16[1,256,2048]{2,1,0} copy(%dynamic_slice.6.1)
}

%region_0.1_spmd (param: (s32[], bf16[1024,2048], bf16[6,1024,2048], bf16[6,256,2048], s32[6])) -> (s32[], \
bf16[1024,2048], bf16[6,1024,2048], bf16[6,256,2048], s32[6]) {
  %param = (s32[], bf16[1024,2048]{1,0}, bf16[6,1024,2048]{2,1,0}, bf16[6,256,2048]{2,1,0}, s32[6]{0}) parameter(0)
  %get-tuple-element.37 = s32[] get-tuple-element(%param), index=0
  %copy.9 = s32[] copy(%get-tuple-element.37)
  %get-tuple-element.45 = bf16[6,256,2048]{2,1,0} get-tuple-element(%param), index=3
  %loop_dynamic_slice_fusion = bf16[1,256,2048]{2,1,0} fusion(%get-tuple-element.45, %copy.9), kind=kCustom, \
calls=%fused_dynamic_slice, metadata={op_name="jit(step)/while/body/jit(dynamic_index_in_dim)/dynamic_slice"}
  %bitcast.3 = bf16[256,2048]{1,0} bitcast(%loop_dynamic_slice_fusion)
  %all-gather-start = (bf16[256,2048]{1,0}, bf16[2048,2048]{1,0}) all-gather-start(%bitcast.3), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(step)/while/body/closed_call/all_gather"}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %loop_add_fusion = s32[] fusion(%copy.9), kind=kLoop, calls=%fused_add, \
metadata={op_name="jit(step)/while/body/add"}
  %get-tuple-element.38 = bf16[1024,2048]{1,0} get-tuple-element(%param), index=1
  %get-tuple-element.46 = s32[6]{0} get-tuple-element(%param), index=4
  %get-tuple-element.39 = bf16[6,1024,2048]{2,1,0} get-tuple-element(%param), index=2
  %loop_dynamic_update_slice_fusion = bf16[6,1024,2048]{2,1,0} fusion(%get-tuple-element.39, %get-tuple-element.38, \
%get-tuple-element.46, %copy.9), kind=kLoop, calls=%fused_dynamic_update_slice, \
metadata={op_name="jit(step)/while/body/closed_call/jit(dynamic_update_index_in_dim)/dynamic_update_slice"}
  %all-gather-done = bf16[2048,2048]{1,0} all-gather-done(%all-gather-start)
  %gemm_fusion_dot_general.3 = bf16[1024,2048]{1,0} fusion(%get-tuple-element.38, %all-gather-done), kind=kCustom, \
calls=%gemm_fusion_dot_general.3_computation, metadata={op_name="jit(step)/while/body/closed_call/dot_general"}
  %loop_multiply_fusion = bf16[1024,2048]{1,0} fusion(%gemm_fusion_dot_general.3), kind=kLoop, \
calls=%fused_multiply, metadata={op_name="jit(step)/while/body/closed_call/jit(silu)/mul"}
  ROOT %tuple.16 = (s32[], bf16[1024,2048]{1,0}, bf16[6,1024,2048]{2,1,0}, bf16[6,256,2048]{2,1,0}, s32[6]{0}) \
tuple(%loop_add_fusion, %loop_multiply_fusion, %loop_dynamic_update_slice_fusion, %get-tuple-element.45, \
%get-tuple-element.46)
}

%fused_compare (param_0: s32[]) -> pred[] {
  %param_0 = s32[] parameter(0)
  %constant_18_clone_2 = s32[] constant(6)
  ROOT %lt.7.1 = pred[] compare(%param_0, %constant_18_clone_2), direction=LT
}

%region_1.2_spmd (param.1: (s32[], bf16[1024,2048], bf16[6,1024,2048], bf16[6,256,2048], s32[6])) -> pred[] {
  %param.1 = (s32[], bf16[1024,2048]{1,0}, bf16[6,1024,2048]{2,1,0}, bf16[6,256,2048]{2,1,0}, s32[6]{0}) parameter(0)
  %get-tuple-element.25.0 = s32[] get-tuple-element(%param.1), index=0
  ROOT %loop_compare_fusion = pred[] fusion(%get-tuple-element.25.0), kind=kLoop, calls=%fused_compare, \
metadata={op_name="jit(step)/while/cond/lt"}
}

%wrapped_iota_computation () -> s32[6] {
  ROOT %iota.3.1 = s32[6]{0} iota(), iota_dimension=0
}

ENTRY %main.4_spmd (param.5: bf16[1024,2048], param.6: bf16[6,256,2048], param.7: bf16[6,1024,2048]) -> \
(bf16[1024,2048], bf16[6,1024,2048]) {
  %constant_19_clone_1_0 = s32[] constant(0)
  %copy.20 = s32[] copy(%constant_19_clone_1_0)
  %param.7 = bf16[6,1024,2048]{2,1,0} parameter(2)
  %param.6 = bf16[6,256,2048]{2,1,0} parameter(1)
  %param.5 = bf16[1024,2048]{1,0} parameter(0)
  %copy.19 = bf16[1024,2048]{1,0} copy(%param.5)
  %wrapped_iota = s32[6]{0} fusion(), kind=kLoop, calls=%wrapped_iota_computation, metadata={op_name="jit(step)/iota"}
  %tuple.14 = (s32[], bf16[1024,2048]{1,0}, bf16[6,1024,2048]{2,1,0}, bf16[6,256,2048]{2,1,0}, s32[6]{0}) \
tuple(%copy.20, %copy.19, %param.7, %param.6, %wrapped_iota)
  %while.11 = (s32[], bf16[1024,2048]{1,0}, bf16[6,1024,2048]{2,1,0}, bf16[6,256,2048]{2,1,0}, s32[6]{0}) \
while(%tuple.14), condition=%region_1.2_spmd, body=%region_0.1_spmd, metadata={op_name="jit(step)/while"}, \
backend_config={"known_trip_count":{"n":"6"}}
  %get-tuple-element.48 = bf16[6,1024,2048]{2,1,0} get-tuple-element(%while.11), index=2
  %get-tuple-element.47 = bf16[1024,2048]{1,0} get-tuple-element(%while.11), index=1
  ROOT %tuple.17 = (bf16[1024,2048]{1,0}, bf16[6,1024,2048]{2,1,0}) tuple(%get-tuple-element.47, \
%get-tuple-element.48)
}
"""
