"""What tests, and the processes that they start, run with: set in the environment, before jax is imported."""

import os
import pathlib
import sys
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = pathlib.Path(__file__).parents[2] / ".cache" / f"jax-{version('jax')}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# What one process has compiled to bytecode the others read, whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Each operation of a program names the lines that led to it, up to a hundred with pytest's own: a tenth of the time of
# a step on 2·2·2, traced, lowered and compiled.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ["PARALLAX_PROGRESS"] = "off"  # what a command waits for depends on how fast the machine is
# Small arrays gain nothing from optimised code, and compiling is most of the time: a training step on 2·2·2 takes
# 11.5 CPU seconds to compile as it is, 6.2 at level 0, and 1.3 without MLIR's fusions too. Only jaxlib 0.10 can turn
# those off (to others the flag is unknown, and ends the process). Flags of the user's own come later and win.
# In one piece, code takes about a tenth less of the processor to make than in parallel pieces.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])
