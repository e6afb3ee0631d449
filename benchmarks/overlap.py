"""The share of FSDP's, TP's, CP's and EP's communication that compute hides, in a step compiled without chips.

    python benchmarks/overlap.py --config llama_1b_16 --topology v5e:4x4 [--rows 0 3] [--kernels 1]
    python benchmarks/overlap.py --config gpu_80gb_x8 --topology H100:1x8
    python benchmarks/overlap.py --topology v6e:4x4 --rows 2 --options xla_tpu_scoped_vmem_limit_kib=32768

Needs the TPU compiler, pip install -e '.[tpu]', or that for GPUs, pip install -e '.[gpu-compiler]'. One row for each
way to send: as the config has it, without what hides it, and layouts of other meshes; on more chips than the config is
for, dp and the batch are larger. *GiB* are arguments and temporaries of a chip. *compute*, *kernels*, *waits* and
*step* are in milliseconds as parallax.analysis estimates them, and *share* is that of waits in the step. *dp*, *cp*,
*ep* and *tp* are the shares of bytes over these axes, *dp* with those over dp and cp together, that go on while
something is computed: asynchronous, with compute between start and done. The compiler gives kernels no cycles; they are
priced at the longer of their bytes and of their FLOPs at the share of peak that --kernels says, by default that of
plans. *MFU* is with them, *MFU-* leaves them out. *sent* are the GiB that a chip sends in a step, and *hidden* those
that compute between start and done covers. --options are further ones of the compiler, in each row.
"""

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

# Before JAX is imported, so that it neither initialises devices nor queries the network for a TPU.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, config_of, run_benchmark, setting, share

from parallax.hardware.chips import KERNEL_EFFICIENCY


class Row(NamedTuple):
    changes: Mapping[str, Any]  # of the config, by "section.key"
    options: bool = True  # whether the compiler gets the options of parallax/sharding/compiler.py
    told: Mapping[str, Any] = {}  # further compiler options


PLAIN = {"fsdp.reduce": "float32"}
AHEAD = {"fsdp.prefetch": 1}
# Compared with rows that recompute every layer.
LAYER = {"pipeline.remat": "layer"}
INTERLEAVED = {"mesh.pp": 4, "pipeline.schedule": "interleaved", "data_parallel.policy": "zero1"}
PIPELINE = LAYER | INTERLEAVED
# More and smaller microbatches, and more that is recomputed, than the config has.
FOUR = {"pipeline.microbatches": 4, "pipeline.remat": "attention", "fsdp.reduce": "compute"}
# The MLP's product of gate and up is saved, as on chips with memory for it. And all products of layers in float8.
SWIGLU_SAVED = {"pipeline.remat": "norm"}
FLOAT8 = {f"model.matmul{what}": "8bit" for what in ("_weight_gradients", "_residuals")} | {"model.matmul": "float8"}
# The same with ranges that are given, so that nothing finds a maximum.
FIXED = FLOAT8 | {"model.matmul_scales": "fixed", "model.matmul_ranges": "64 1 0.03125"}
TABLES_OF_EACH = {"data_parallel.exceptions": "embedding=zero3 head=zero3"}  # gathered for each microbatch
EIGHT = {"mesh.dp": 2, "mesh.ep": 8, "pipeline.microbatches": 8}  # expert ranks
# What comes to experts is sent again, and experts are gathered once a step: gathers would wait behind it.
SENT_AGAIN = {
    "pipeline.remat": "norm swiglu dispatch",
    "data_parallel.exceptions": "blocks/dense/attention=zero1 blocks/moe/attention=zero1 blocks/moe/mlp/shared=zero1 "
    "blocks/moe/mlp/experts=zero2",
}
RING = {"layout.context": "ring", "model.kernel": "xla"}
# One product for q, k and v, and one for gate and up: of kernels that are joined when they are used, and of one kernel.
JOINED = {"model.attention": "joined:JoinedGQA", "model.mlp": "joined:JoinedMLP"}
ONE_KERNEL = {"model.attention": "joined:GQAOfOneKernel", "model.mlp": "joined:MLPOfOneKernel"}
# Tokens over tp, and their collectives as they are or as permutes beside the products.
TOKENS_OVER_TP = {"layout.residual": "batch/dp seq/tp d_model"}
STREAMS = TOKENS_OVER_TP | {"layout.tensor_parallel": "streams"}
TABLES_ONCE = {"data_parallel.exceptions": "embedding=lean head=lean"}  # their gradients are exchanged once a step
TABLE_FIRST = {"loss.table_first": True}  # the head's gradient is exchanged before layers run backward
# Options of XLA for GPUs, each in addition to the first.
HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}
COMBINED = ("all_gather", "reduce_scatter", "all_reduce")
PIPELINED = [{f"xla_gpu_enable_pipelined_{kind}": True} for kind in COMBINED]
# Named, since by default not all of a step's kernels are launched together.
LAUNCHED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
GPU_OPTIONS = [
    HIDING,
    *(HIDING | one for one in PIPELINED),
    HIDING | {name: True for one in PIPELINED for name in one},
    HIDING | {"xla_gpu_enable_while_loop_double_buffering": True},
    HIDING | {f"xla_gpu_{kind}_combine_threshold_bytes": 2**30 for kind in COMBINED},
    HIDING | {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in COMBINED},
    HIDING | {"xla_gpu_enable_command_buffer": ""},
    HIDING | {"xla_gpu_enable_command_buffer": LAUNCHED},
]
GPU_ROWS = [
    Row({}),
    *(Row({}, told=told) for told in GPU_OPTIONS),
    Row(PLAIN),  # reduce-scatters, which can be pipelined, in place of all-to-alls
    Row(PLAIN, told=HIDING | PIPELINED[1]),
    Row(AHEAD),
    Row(PLAIN | AHEAD),
    Row(JOINED),
    Row(ONE_KERNEL),
    Row(TABLES_ONCE),
    Row(TABLE_FIRST),
]
# By number. Pages name rows by it, so a row that goes takes its number along.
ROWS: dict[str, dict[int, Row]] = {
    "llama_1b_16": {
        0: Row({}),
        1: Row({}, options=False),
        2: Row(PLAIN),
        4: Row(AHEAD),
        5: Row({"pipeline.remat": "attention"}),
        6: Row({"pipeline.remat": "none", "pipeline.microbatches": 8}),
        7: Row(LAYER),
        8: Row(LAYER | {"mesh.dp": 8, "mesh.tp": 2}),
        9: Row(PIPELINE | {"mesh.dp": 4, "pipeline.virtual": 2, "pipeline.microbatches": 32}),
        11: Row(PIPELINE | {"mesh.dp": 4, "pipeline.virtual": 4, "pipeline.microbatches": 8} | TABLES_OF_EACH),
        13: Row(JOINED),
        14: Row(ONE_KERNEL),
        15: Row(TABLE_FIRST),
        16: Row({"mesh.dp": 8, "mesh.tp": 2} | TOKENS_OVER_TP),
        17: Row({"mesh.dp": 8, "mesh.tp": 2} | STREAMS),
        19: Row(INTERLEAVED | {"mesh.dp": 4, "pipeline.virtual": 4, "pipeline.microbatches": 16}),
        21: Row(PLAIN | SWIGLU_SAVED | {"pipeline.microbatches": 1}),
        22: Row(PLAIN | {"pipeline.microbatches": 1}),
        23: Row(PLAIN | {"pipeline.microbatches": 4}),
    },
    "llama2_7b_64": {
        0: Row({}),
        1: Row(FOUR),
        2: Row(FOUR, options=False),
        3: Row(FOUR | PLAIN),
        4: Row(FOUR | {"pipeline.remat": "elementwise"}),
        5: Row(FOUR | LAYER),
        6: Row(FOUR | LAYER | {"mesh.dp": 16, "mesh.tp": 4}),
        7: Row(FOUR | PIPELINE | {"mesh.dp": 16, "pipeline.virtual": 2, "pipeline.microbatches": 16}),
        8: Row({"mesh.dp": 16, "mesh.tp": 4}),
        9: Row(INTERLEAVED | {"mesh.dp": 16, "pipeline.virtual": 2, "pipeline.microbatches": 16}),
        10: Row({"mesh.dp": 16, "mesh.tp": 4} | TOKENS_OVER_TP),
        11: Row({"mesh.dp": 16, "mesh.tp": 4} | STREAMS),
        12: Row(INTERLEAVED | {"mesh.dp": 16, "pipeline.virtual": 4, "pipeline.microbatches": 8}),
        13: Row(SWIGLU_SAVED),
        14: Row(SWIGLU_SAVED | FLOAT8),
        15: Row(LAYER),
        16: Row(INTERLEAVED | {"mesh.dp": 16, "pipeline.virtual": 8, "pipeline.microbatches": 8}),
        17: Row({"pipeline.microbatches": 2}),
        18: Row(FOUR | {"pipeline.remat": "elementwise", "loss.chunk_tokens": 4096}),
        19: Row({"mesh.dp": 16, "mesh.tp": 4, "pipeline.remat": "swiglu"} | STREAMS),
        20: Row(INTERLEAVED | {"mesh.dp": 16, "pipeline.virtual": 4, "pipeline.microbatches": 16}),
        21: Row(SWIGLU_SAVED | FIXED),
        22: Row({"pipeline.microbatches": 4}),
        23: Row({"pipeline.microbatches": 4, "data_parallel.policy": "zero1"}),
    },
    "llama_1b_128k": {
        0: Row({}),
        1: Row(LAYER),
        2: Row(LAYER | {"layout.context": "all_gather"}),
        3: Row(LAYER | RING),
        5: Row({"mesh.dp": 1, "mesh.cp": 16, "pipeline.remat": "elementwise", "pipeline.microbatches": 4}),
    },
    "mixtral_8x7b_128": {0: Row({}), 1: Row({"data_parallel.exceptions": ""}), 2: Row({"layout.exchange": "gather"})},
    "deepseek_v2_lite_16": {0: Row({}), 1: Row(EIGHT | {"layout.exchange": "gather"}), 2: Row(EIGHT | SENT_AGAIN)},
    "deepseek_v2_lite_mla": {
        0: Row({}),
        1: Row(LAYER | {"mesh.dp": 8, "mesh.tp": 2, "pipeline.microbatches": 16, "fsdp.reduce": "compute"}),
    },
    "gpu_80gb": {0: Row({}), 1: Row(JOINED), 2: Row(ONE_KERNEL)},
    "gpu_80gb_x8": dict(enumerate(GPU_ROWS)),
    "gpu_24gb_x8": dict(enumerate(GPU_ROWS)),
    "tiny_gqa": {0: Row({})},
}
SMALLEST = {"config": "tiny_gqa", "topology": "v5e:2x4"}
SPENT = ("compute", "kernels", "waits", "step")  # milliseconds
COLUMNS = ("GiB", *SPENT, "share", "dp", "cp", "ep", "tp", "MFU", "MFU-", "sent", "hidden")


def main() -> None:
    parser = Arguments(description=__doc__, smallest=SMALLEST)
    parser.add_argument("--config", default="llama_1b_16", choices=ROWS)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--rows", nargs="*", type=int, help="numbers of rows; all without it")
    parser.add_argument("--kernels", type=share, default=KERNEL_EFFICIENCY, help="share of peak that kernels reach")
    parser.add_argument("--options", nargs="+", default=[], type=setting, metavar="NAME=VALUE", help="of the compiler")
    args = parser.parse_args()
    if wrong := no_row(args.config, args.rows or ()):
        parser.error(wrong)
    devices = absent_devices(args.topology)
    print(f"{args.config} on {args.topology}")
    print(f"| changed | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for number in ROWS[args.config] if args.rows is None else args.rows:
        started, row = time.perf_counter(), ROWS[args.config][number]
        row = row._replace(told={**row.told, **dict(args.options)})
        print(f"| {title(row)} | " + " | ".join(figures(args, devices, row)) + " |", flush=True)
        print(f"row {number}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def no_row(config: str, numbers: Collection[int]) -> str:
    """What is wrong with the first of these numbers that is no row's; empty if each is one's."""
    wrong = [number for number in numbers if number not in ROWS[config]]
    return f"--rows {wrong[0]}: {config} has rows {', '.join(map(str, ROWS[config]))}" if wrong else ""


def title(row: Row) -> str:
    changes = [f"{name}={value}" for name, value in row.changes.items()]
    told = [f"{re.sub('^xla_(gpu|tpu)_(enable_)?', '', name)}={value}" for name, value in row.told.items()]
    return ", ".join(changes + ["no options"] * (not row.options) + told) or "nothing"


class CompiledRow(NamedTuple):
    """A step as compiled, a device's share of the model's FLOPs, and in which dtype products are, as model.matmul."""

    read: Any
    flops: float
    matmul: str


def compiled_row(config: str, devices: Any, row: Row) -> CompiledRow:
    import dataclasses
    import math

    import parallax as px
    from parallax.analysis.compiled.program import read_step
    from parallax.analysis.traced.flops import flops_per_token
    from parallax.sharding import compiler
    from parallax.step.step import step_of

    changed = config_of(config)
    changed.update_from_flattened_dict(row.changes)
    times = max(1, len(devices) // math.prod(px.read_settings(changed.to_dict()).mesh.sizes.values()))
    changed.mesh.dp, changed.data.global_batch = times * changed.mesh.dp, times * changed.data.global_batch
    settings = px.read_settings(changed.to_dict())
    mesh = px.make_mesh(dataclasses.replace(settings.mesh, simulate=0), devices)
    shape = settings.data.global_batch, settings.data.seq
    with contextlib.nullcontext() if row.options else patch.dict(compiler.OPTIONS, clear=True):
        step = step_of(settings, mesh)
        program = step.lower(*shape).compile(compiler_options=dict(row.told))
    model = step.model
    flops = flops_per_token(settings.model, model.plan.declared, seq=shape[1]) * math.prod(shape) / mesh.size
    return CompiledRow(read_step(program, model, seq=shape[1]), flops, settings.model.matmul)


def figures(args: argparse.Namespace, devices: Any, row: Row) -> list[str]:
    from parallax.analysis.planned.step_time import overlaps, step_time
    from parallax.hardware.chips import chip

    read, flops, matmul = compiled_row(args.config, devices, row)
    found = step_time(read, chip(args.topology), flops, matmul=matmul, kernel_efficiency=args.kernels)
    sent = overlaps(read, chip(args.topology))
    without = found.mfu * found.total_secs / (found.total_secs - found.pallas_secs)
    millis = (found.compute_secs, found.pallas_secs, sum(found.exposed_secs.values()), found.total_secs)
    return [
        f"{(read.arguments + read.temporaries) / 2**30:.2f}",
        *(f"{1e3 * secs:.0f}" for secs in millis),
        f"{100 * sum(found.exposed_secs.values()) / found.total_secs:.1f} %",
        *(hidden(read.collectives, axes) for axes in (("dp",), ("cp",), ("ep",), ("tp",))),
        *(f"{100 * share:.1f} %" for share in (found.mfu, without)),
        f"{sum(row.bytes for row in sent) / 2**30:.1f}",
        f"{sum(row.bytes * row.hidden for row in sent) / 2**30:.1f}",
    ]


def hidden(collectives: Any, axes: tuple[str, ...]) -> str:
    """The share of bytes over these axes that are sent while something is computed; of dp, over dp and cp, too."""
    known = [axes, ("dp", "cp")] if axes == ("dp",) else [axes]
    sent = [(made.bytes * made.count, made.asynchronous and made.cycles_between > 0) for made in collectives
            if made.axes in known]  # fmt: skip
    total = sum(size for size, _ in sent)
    return f"{100 * sum(size for size, beside in sent if beside) / total:.0f} %" if total else "-"


if __name__ == "__main__":
    run_benchmark(main)
