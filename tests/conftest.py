"""Tests run on eight simulated CPU devices, with compiled programs kept between runs."""

import os
import pathlib
from importlib.metadata import version

# Before jax is imported, and in the environment, so that the processes which tests start share both.
os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = pathlib.Path(__file__).parents[1] / ".cache" / f"jax-{version('jax')}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
# [B, S] + [S] is a mistake more often than a wish.
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("parallax", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("parallax")
