"""Small programs in the TPU compiler's form, each with what makes that form hard to read. The mesh is pp=2 dp=4."""

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
