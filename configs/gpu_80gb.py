"""A dense model of 1.2 billion parameters for one GPU of 80 GB.

For:      a first run on one A100 or H100; with 20 tokens a parameter, 92,000 steps.
Numbers:  those of configs/llama_1b_16.py: 16 layers of d_model 2048, gated d_ff 8192, 16 heads of 128.
Command:  python train.py --config=configs/gpu_80gb.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: one NVIDIA GPU of 80 GB, as A100 or H100.
Memory:   48.7 GiB of 80, as planned (python -m parallax.plan --topology=H100:1), and 48.9 measured; JAX reserves
          60 by default. pipeline.microbatches=16 takes 33.5 and 2 % more time; 4 take 80.3, and
          remat="norm" 56.8 and 2 % more time, as compiled.
Time:     3.8 s a step on one H100 80GB (MFU 50 %), measured with jax 0.11.2 by python -m parallax.firstrun
          --config=configs/gpu_80gb.py --steps=12; planned 3.8 s (51 %). An A100 is planned at 10.9 s.
Loss:     not yet run; random tokens begin at 10.80.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 1

    config.model.vocab = 32_000
    config.model.layers = 16
    config.model.d_model = 2048
    config.model.d_ff = 8192
    config.model.attention = "gqa"
    config.model.heads = 16
    config.model.kv_heads = 16
    config.model.d_head = 128
    config.model.tied = False
    config.model.dtype = "bfloat16"
    config.model.kernel = "cudnn"

    config.pipeline.microbatches = 8
    config.pipeline.remat = "elementwise"

    config.loss.chunk_tokens = 4096

    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 2048
    config.data.global_batch = 128

    config.train.steps = 92_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
