"""A dense model of 340 million parameters for one GPU of 24 GB.

For:      a first run on a card at home, or on the smallest GPU of a cloud; with 20 tokens a parameter, 26,000 steps.
Numbers:  the shape and the learning rate of GPT-3 Medium (Brown et al. 2020, table 2.1): 24 layers of d_model 1024, 16
          heads of 64, with a gated d_ff of 2816 in place of 4096; Llama's other optimizer settings.
Command:  python train.py --config=configs/gpu_24gb.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: one NVIDIA GPU of 24 GB that has bfloat16, as RTX 3090 and 4090, L4, A10.
Memory:   14.4 GiB of 24, as planned (python -m parallax.plan --topology=RTX4090:1), 14.5 as compiled; JAX reserves 18
          by default. pipeline.microbatches=8 takes 23.9 as compiled, and half as much time again.
Time:     planned, not yet run: 8.3 s a step on an RTX 4090 (MFU 45 %), 12.4 on an A10, 15.7 on an L4, 17.0 on a 3090.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 1

    config.model.vocab = 32_000
    config.model.layers = 24
    config.model.d_model = 1024
    config.model.d_ff = 2816
    config.model.attention = "gqa"
    config.model.heads = 16
    config.model.kv_heads = 16
    config.model.d_head = 64
    config.model.dtype = "bfloat16"
    config.model.kernel = "cudnn"

    config.pipeline.microbatches = 16
    config.pipeline.remat = "elementwise"

    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 1000

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 2048
    config.data.global_batch = 128

    config.train.steps = 26_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
