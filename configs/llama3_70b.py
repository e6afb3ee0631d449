"""Llama-3.1-70B for 256 chips, all of them along dp (FSDP).

For:      a dense model of 70.6 billion parameters on TPUs, from its first token.
Numbers:  Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3: 80 layers of d_model 8192, gated d_ff 28672,
          64 heads of 128 with 8 key-value heads, theta 500000, vocab 128256, peak rate 1.5e-4, windows of 8192; they
          are longer only in the last stage, with rope_scaling="llama3". The batch of 512 windows, 4.2 M tokens, is
          ours: a quarter of what is published for 405B.
Command:  python train.py --config=configs/llama3_70b.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 256 TPU v5p chips (95 GB each), or 128 v7x chips (256 cores of 96 GB).
Memory:   59.1 GiB a chip as compiled, 57.7 as traced.
Time:     as compiled for 256 v5p 21.9 s a step, MFU 73.1 % with kernels at 70 % of their peak, and 25.1 s in closed
          form (63.9 %). On 128 v7x (--topology=v7x:4x4x8) 9.3 s as compiled, MFU 68.6 %, in 55.9 GiB, and 12.5 s in
          closed form. Not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 256

    config.model.vocab = 128_256
    config.model.layers = 80
    config.model.d_model = 8192
    config.model.d_ff = 28_672
    config.model.attention = "gqa"
    config.model.heads = 64
    config.model.kv_heads = 8
    config.model.d_head = 128
    config.model.rope_theta = 500_000.0
    config.model.norm_eps = 1e-5
    config.model.tied = False
    config.model.dtype = "bfloat16"
    config.model.kernel = "splash"

    config.pipeline.microbatches = 1
    config.pipeline.remat = "elementwise qkv out ffn"
    config.fsdp.reduce = "float32"
    config.loss.chunk_tokens = 4096

    config.optimizer.learning_rate = 1.5e-4
    config.optimizer.warmup_steps = 2000
    config.optimizer.eps = 1e-5

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 8192
    config.data.global_batch = 512

    config.train.steps = 1_000_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
