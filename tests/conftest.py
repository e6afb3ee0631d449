"""Tests run on eight simulated CPU devices, with compiled programs kept between runs."""

import os
import pathlib
from importlib.metadata import version

# Before jax is imported, and in the environment, so that the processes which tests start share both.
os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = pathlib.Path(__file__).parents[1] / ".cache" / f"jax-{version('jax')}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# LLVM's optimisations are half of the compile time or more, and small arrays gain nothing from them. Flags of the
# user's own come later and win.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
# [B, S] + [S] is a mistake more often than a wish.
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("parallax", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("parallax")
