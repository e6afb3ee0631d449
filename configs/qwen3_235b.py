"""Qwen3-235B-A22B for 256 chips: experts sharded over 8 of them (mesh.ep), everything else over 256 as FSDP.

For:      a mixture of experts in every layer with grouped-query attention: 235 billion parameters, 22 of them active.
Numbers:  the published configuration (Qwen Team 2025, "Qwen3 Technical Report", table 2): 94 layers of d_model 4096,
          128 experts of width 1536, of which a token goes to 8; 64 heads of 128 with 4 key-value heads, normed queries
          and keys, theta 1e6, vocab 151936, windows of 4096, balance loss 1e-3. How it was trained was not published
          in full: batch, rates and steps are ours.
Command:  python train.py --config=configs/qwen3_235b.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 256 TPU v5p chips (95 GB each).
Memory:   36.5 GiB a chip, in closed form; as compiled 48.6 are reserved, with gaps between arrays.
Time:     as compiled 25.4 s a step, MFU 41.7 % with kernels at 70 % of their peak; planned 29.6 s (35.8 %). On
          v7x this model is planned 0.81 to 0.91 of its published time (docs/measured/published.md). Not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 32
    config.mesh.ep = 8

    config.model.vocab = 151_936
    config.model.layers = 94
    config.model.layers_of = "moe*94"
    config.model.d_model = 4096
    config.model.experts = 128
    config.model.experts_per_token = 8
    config.model.d_expert = 1536
    config.model.attention = "gqa"
    config.model.heads = 64
    config.model.kv_heads = 4
    config.model.d_head = 128
    config.model.qk_norm = True
    config.model.rope_theta = 1e6
    config.model.norm_eps = 1e-6
    config.model.tied = False
    config.model.dtype = "bfloat16"
    config.model.kernel = "splash"

    config.loss.balance_coefficient = 1e-3
    config.loss.chunk_tokens = 4096
    config.pipeline.microbatches = 2
    config.pipeline.remat = "layer"
    config.fsdp.reduce = "compute"

    config.optimizer.learning_rate = 4e-4
    config.optimizer.warmup_steps = 2000

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 4096
    config.data.global_batch = 2048

    config.train.steps = 1_000_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
