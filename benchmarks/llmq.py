"""Qwen2.5-7B on H100 and RTX 4090, as llm.q has published it, and as Parallax plans and compiles it.

    python benchmarks/llmq.py [--rows 0 3] [--analytic]

A step has 512 windows of 1024 tokens; weights and moments are in bfloat16. *planned* is the analytic plan; *compiled* needs
XLA's compiler for GPUs, pip install -e '.[gpu-compiler]', and has the time of the compiled program by
parallax.analysis (docs/gpus.md says what that rests on). Tokens a second are those of all GPUs together.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX is imported: no device is asked for.
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, config_of, run_benchmark

SOURCE = "https://github.com/IST-DASLab/llmq/blob/b77d969/benchmarks"
MODEL = dict(vocab=152_064, layers=28, d_model=3584, d_ff=18_944, attention="gqa", heads=28, kv_heads=4, d_head=128)
MODEL |= dict(qkv_bias=True, tied=False, rope_theta=1e6, dtype="bfloat16", kernel="cudnn")
QWEN = {f"model.{key}": value for key, value in MODEL.items()}
QWEN |= {"data.seq": 1024, "data.global_batch": 512, "fsdp.reduce": "compute"}
QWEN |= {f"optimizer.{key}_dtype": "bfloat16" for key in ("m", "v", "weights")}
FLOAT8 = {"model.matmul": "float8"}
STATES_ON_HOST = {"optimizer.states_on": "host"}
