"""Every config compiles, and is priced, for every kind of TPU, by the compiler that the installed jax pins."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallax.hardware.chips import CHIPS

ROOT = Path(__file__).parents[2]
NAMES = {path.stem for path in (ROOT / "configs").glob("*.py")} - {"saved", "__init__"}
# The others are for GPUs, or for 256 chips and more, which take many minutes each.
CONFIGS = sorted(name for name in NAMES if not name.startswith(("gpu_", "gpt_", "llama3_", "deepseek_v3", "qwen3_")))
TPUS = [name.split()[1] for name, chip in CHIPS.items() if chip.torus_dims]

# What docs/plan.md and docs/measured/plan.md show.
PLANNED = [("llama_1b_16", "v5e"), ("llama2_7b_64", "v5p"), ("deepseek_v2_lite_mla", "v5p")]
# Those for v5p and v7x, whose chips have three to six times the memory of these.
LARGE = "deepseek_v2_lite_16", "deepseek_v2_lite_mla", "gemma3_12b", "llama2_7b_64", "mixtral_8x7b_128"
TOO_LARGE = {(name, chip) for name in LARGE for chip in TPUS if CHIPS[f"TPU {chip}"].usable_bytes < 40 * 2**30}

needs_compiler = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the TPU compiler; make test-all has it")


def run_beside(script: str, *arguments: str) -> str:
    """What a script of the tests prints, in a process of its own: libtpu says which chips a process is for. JAX's cache
    of programs cannot read those for chips that are not there, and says so."""
    nobody_asked = dict(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", PYTHONPATH=str(ROOT))
    nobody_asked |= dict(JAX_ENABLE_COMPILATION_CACHE="false")
    command = [sys.executable, ROOT / "tests" / script, *arguments]
    done = subprocess.run(command, env={**os.environ, **nobody_asked}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_compiles_and_is_priced_for_every_chip(config, chip):
    printed = run_beside("tpu_configs.py", config, chip)
    if (config, chip) in TOO_LARGE:
        assert "too large" in printed
        return
    assert "ms a step, MFU" in printed
    if (config, chip) in PLANNED:
        assert abs(float(printed.split()[-1]) - 1) < 0.1  # the aim of the prediction, as the docs state it


@needs_compiler
@pytest.mark.slow
def test_what_is_said_to_a_compiler_is_taken_by_the_one_that_is_installed():
    assert run_beside("tpu_options.py").count("taken") == len(TPUS)
