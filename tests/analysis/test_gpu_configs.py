"""Configs compile, and are priced, for GPUs that are not here."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.analysis.planned.topology import CUDA_PLUGINS, GET_CUDA

ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(not any(map(importlib.util.find_spec, CUDA_PLUGINS)), reason=GET_CUDA)
SMALL = ["mesh.simulate=0", "pipeline.microbatches=1", "model.dtype=bfloat16"]


def run_beside(*arguments: str) -> str:
    """What a script prints in a process of its own, which asks for no device."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=WITHOUT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


WITHOUT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["xla", "cudnn", "triton"])
@pytest.mark.parametrize("where", ["H100:1x8", "B200:2x4"])
def test_a_small_step_compiles_for_gpus_that_are_not_here(where, kernel):
    printed = run_beside("tests/gpu_configs.py", "tiny_gqa", where, "mesh.dp=8", f"model.kernel={kernel}", *SMALL)
    assert f"| tiny_gqa | {where} | fits |" in printed


# The compiled step of a small model on one GPU, with changes to its config.
STEP = """
import sys

from configs.tiny_gqa import get_config
from parallax.analysis.compiled.hlo import parse_hlo
from parallax.analysis.planned.topology import devices_of, without_chips
from parallax.config.settings import read_settings
from parallax.sharding.mesh import make_mesh
from parallax.step.step import step_of

without_chips(["--topology"])
config = get_config()
config.mesh.update(simulate=0, pp=1, dp=1, tp=1)
config.model.update(vocab=256, dtype="bfloat16")
written = dict(change.split("=") for change in sys.argv[1:])
config.update_from_flattened_dict({key: int(v) if v.isdecimal() else v for key, v in written.items()})
settings = read_settings(config.to_dict())
step = step_of(settings, make_mesh(settings.mesh, devices_of("H100:1")))
module = parse_hlo(step.lower(settings.data.global_batch, settings.data.seq).compile().as_text())
found = [(one, home) for home in module.computations.values() for one in home.instructions]
"""
PRODUCTS = """
calls = [(one, home) for one, home in found if one.target == "__cublas$lt$matmul$f8"]
shapes = [{home.find(name).shape.split("[")[0] for name in one.operands[:2]} for one, home in calls]
print(shapes.count({"f8e4m3fn"}), shapes.count({"f8e4m3fn", "f8e5m2"}))
"""
CUDNN_KEYS = """
from parallax.analysis.compiled.hlo import arrays_of

calls = [(one, home) for one, home in found if one.target.startswith("cudnn_")]
print({one.target: [arrays_of(home.find(name).shape)[0][1] for name in one.operands[:2]] for one, home in calls})
"""
HOST_SLOTS = """
on_host = [one for one, _ in found if "S(5)" in one.shape]
print(sum(one.target == "AllocateBuffer" for one in on_host), sum(one.kind == "copy" for one in on_host))
"""
# Of whole arrays: what is in a fusion is no copy in memory.
COPIES = """
copies = [one for one, home in found if one.kind.startswith("copy") and not home.name.startswith("fused_")]
print(sum(one.shape.strip("(").startswith("f32") for one in copies))
"""
GROUPED = """
import re
from collections import Counter

calls = [one for one, _ in found if one.target.startswith("__gpu$xla.gpu.triton")]
print(*sorted(Counter(re.search(r"by_group/(\\w+)", one.op_name)[1] for one in calls).items()))
"""
IN_A_BRANCH = """
import parallax.step.step

parallax.step.step.copies_what_branches_return = lambda mesh: False
"""
ARGUMENTS = """
from parallax.analysis.planned.step_time import compile_and_read, predict
from parallax.analysis.planned.topology import read_topology
from parallax.step.resolve import resolve

topology = read_topology("H100:1")
settings = resolve(settings, topology.as_devices)
print(compile_and_read(settings, topology, devices_of("H100:1")).arguments, predict(settings, topology).host_bytes)
"""


# Of a layer's four projections and three matrices of the MLP. With scales of rows gradients are e4m3, too.
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scales", "gradients", "alike", "mixed"),
    [("delayed", "compute", 7, 7), ("current", "8bit", 7, 14), ("row", "compute", 14, 0), ("row", "8bit", 21, 0)],
)
def test_products_in_float8_are_compiled_as_such(scales, gradients, alike, mixed):
    changes = [f"model.matmul_scales={scales}", f"model.matmul_weight_gradients={gradients}"]
    found = run_beside("-c", STEP + PRODUCTS, "model.matmul=float8", *changes).split()
    assert int(found[0]) >= alike and int(found[1]) == mixed


@needs_compiler
@pytest.mark.slow
def test_context_ranks_give_cudnn_the_keys_in_reach_of_a_window():
    """Of rows of 256 tokens a rank has two chunks of 64."""
    changes = ["model.kernel=cudnn", "model.sliding_window=40", "mesh.cp=2", "data.seq=256", "data.global_batch=4"]
    printed = run_beside("-c", STEP.replace("H100:1", "H100:1x2") + CUDNN_KEYS, *changes)
    shapes = [(8, 64, 4, 16), (8, 64 + 40, 2, 16)]  # of queries and keys: two chunks of four rows
    assert printed.strip() == str({"cudnn_fwd": shapes, "cudnn_bwd": shapes})


@needs_compiler
@pytest.mark.slow
def test_products_of_blocks_of_32_are_those_that_b200_has():
    changes = ["model.matmul=float8", "model.matmul_scales=mxfp8", "model.matmul_weight_gradients=8bit"]
    printed = 'print(sum(one.target == "__cudnn$blockScaledDot" for one, _ in found))'
    # Heads of 16 entries are narrower than a block.
    assert int(run_beside("-c", STEP.replace("H100:1", "B200:1") + printed, *changes)) >= 14


@needs_compiler
@pytest.mark.slow
def test_slots_in_host_memory_are_not_copied_there():
    changes = ["pipeline.residuals_on=host", "pipeline.remat=elementwise"]
    allocated, copied = map(int, run_beside("-c", STEP + HOST_SLOTS, *changes).split())
    assert allocated > 8 and copied == 0


@needs_compiler
@pytest.mark.slow
def test_what_rests_in_host_memory_is_not_counted_as_on_the_gpu():
    (here, nothing), (moved, on_host) = (
        map(int, run_beside("-c", STEP + ARGUMENTS, *changes).split()) for changes in ([], ["optimizer.states_on=host"])
    )
    assert nothing == 0 and here - moved == on_host > 2**19


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "config, where", {"gpu_24gb": "RTX4090:1", "gpu_80gb": "H100:1", "gpu_80gb_x8": "H200:1x8"}.items()
)
def test_the_planned_memory_is_that_of_the_compiler(config, where):
    printed = run_beside("tests/gpu_configs.py", config, where)
    assert abs(float(printed.split()[-1]) - 1) < 0.1


# With branches in place of loops it is 1.56 times the plan.
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_f_one_b", "dualpipe_v"])
def test_a_pipeline_copies_no_slots(schedule):
    changes = ["mesh.pp=4", "mesh.dp=2", f"pipeline.schedule={schedule}", "data_parallel.policy=zero1"]
    few = ["model.layers=8", "data.global_batch=32"]
    printed = run_beside("tests/gpu_configs.py", "gpu_80gb_x8", "H100:1x8", *changes, *few)
    assert abs(float(printed.split()[-1]) - 1) < 0.02


# Two layers, with the whole vocab, and the experts of one rank of eight.
@needs_compiler
@pytest.mark.slow
def test_a_mixture_is_planned_as_it_is_compiled():
    few = ["model.layers=2", "model.layers_of=local moe", "model.kernel=xla"]
    planned, memory = run_beside("tests/gpu_configs.py", "gpt_oss_20b", "H100:1x8", *few).splitlines()[-2:]
    assert abs(float(memory.split()[-1]) - 1) < 0.05
    assert abs(float(planned.split()[3]) - 1) < 0.2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "ragged"])
def test_experts_are_compiled_as_kernels_for_groups(exchange):
    """Forward gate and up as one, and down; backward the gradients of its rows and of theirs, and of three matrices.
    All twice, for a usual load and for more; then gate and up are computed anew for down, for rows and for matrices."""
    changes = ["model.layers_of=moe*2", "model.experts=8", "model.experts_per_token=2", "model.d_expert=128"]
    changes += ["mesh.ep=2", f"layout.exchange={exchange}", "pipeline.microbatches=1", "pipeline.remat=none"]
    printed = run_beside("-c", STEP.replace("H100:1", "H100:1x2") + GROUPED, *changes)
    assert printed.strip() == "('gmm_gated', 4) ('gmm_rows', 7) ('gmm_sums', 6)"


@needs_compiler
@pytest.mark.slow
def test_the_update_copies_no_parameter_and_no_state():
    """As it is made, and held to what copies all of them on GPUs: a branch."""
    in_a_loop, in_a_branch = (int(run_beside("-c", first + STEP + COPIES)) for first in ("", IN_A_BRANCH))
    assert in_a_loop == 0 and in_a_branch > 50


@needs_compiler
@pytest.mark.slow
def test_plan_and_report_say_what_was_compiled():
    small = ["--config=configs/tiny_gqa.py", "--config.mesh.dp=8", *(f"--config.{change}" for change in SMALL)]
    planned = run_beside("-m", "parallax.plan", *small, "--topology=H100:1x8")
    assert "(compiled)" in planned and "a GPU sends" in planned and "450 GB/s within a host" in planned
    reported = run_beside("-m", "parallax.report", *small, "--topology=H100:1x8")
    assert "for 8 x NVIDIA H100" in " ".join(reported.split()) and "by a roofline over its fusions" in reported
    assert re.search(r"async +hidden$", reported, re.M)
