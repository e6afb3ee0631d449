"""Llama-3-70B for 16 machines with eight GPUs of 80 GB each, all of them along dp (FSDP).

For:      the step that MaxText publishes for 128 H100, and the largest dense model that machines of this kind train so.
Numbers:  the shape of Llama 3 70B (Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3), windows of 8192 and
          their learning rate; a global batch of 256 windows as in NVIDIA's recipe for MaxText.
Command:  python train.py --config=configs/gpu_80gb_16x8.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 128 NVIDIA GPUs of 80 GB on 16 machines, as H100.
Memory:   41.5 GiB of 80 on each, as planned (python -m parallax.plan --topology=H100:16x8), 43.7 as compiled; JAX
          reserves 60 by default. With remat="elementwise qkv out ffn" it is 62.8 GiB and 12.0 s.
Time:     as compiled with kernels at 70 % of peak, not yet run: 11.0 s a step on 128 H100 (MFU 68 %), planned 17.6 s
          (42 %); MaxText's took 15.6 s (docs/measured/gpus.md).
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

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
    config.model.kernel = "cudnn"

    config.pipeline.microbatches = 1
    config.pipeline.remat = "layer"
    config.fsdp.reduce = "compute"
    config.loss.chunk_tokens = 4096

    config.optimizer.learning_rate = 1.5e-4
    config.optimizer.warmup_steps = 2000
    config.optimizer.eps = 1e-5

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 8192
    config.data.global_batch = 256

    config.train.steps = 1_000_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
