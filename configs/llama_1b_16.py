"""A dense model of 1.2 billion parameters for 16 chips, all of them along dp (FSDP).

For:      a first run on a small pod; with 20 tokens a parameter, 92,000 steps.
Numbers:  the shape of Llama (Touvron et al. 2023) at 16 layers of d_model 2048, gated d_ff 8192, 16 heads of 128;
          its optimizer settings, and the learning rate of its 7B model.
Command:  python train.py --config=configs/llama_1b_16.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 16 TPU v5e chips (16 GB each).
Memory:   10.9 GiB a chip as compiled for TPU (python -m parallax.plan), 7 of them products that are kept for the
          backward pass; remat="layer" keeps layers' inputs instead: 6 GiB less, and a seventh more time.
Time:     estimated from the compiled program with kernels at 70 % of peak, 0.83 s a step (MFU 72.2 %), 21 hours in all;
          not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 16

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
    config.model.kernel = "splash"

    config.pipeline.microbatches = 2
    config.pipeline.remat = "elementwise"
    config.fsdp.reduce = "compute"
    # Nothing is left to hide the messages of both tables behind, so they are sent once a step.
    config.data_parallel.exceptions = "embedding=zero1 head=zero1"
    # Each chunk adds to the gradient of the head's table, 250 MiB in float32.
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
