"""Llama-3.1-405B for 512 chips: two to a row (mesh.cp), weights sharded over all of them (FSDP).

For:      the largest dense model with published weights, on TPUs.
Numbers:  Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3: 126 layers of d_model 16384, gated d_ff 53248,
          128 heads of 128 with 8 key-value heads, peak rate 8e-5, 8000 warm-up steps; the rest as
          configs/llama3_70b.py. The batch is MaxText's for 512 v5p, 1024 windows, half of the published 16 M tokens.
Command:  python train.py --config=configs/llama3_405b.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 512 TPU v5p chips (95 GB each), or 256 v7x chips (512 cores of 96 GB).
Memory:   49.9 GiB a chip as traced, 55.2 as compiled, 44.5 at the peak; 88.0 with mesh.dp=512, mesh.cp=1 and 2
          microbatches, which is 2.7 % faster (docs/measured/large.md).
Time:     as compiled for 512 v5p 124.4 s a step, MFU 72.4 % with kernels at 70 % of their peak; in closed form 137.6 s
          (65.5 %), where MaxText's takes 131.5. On 256 v7x (--topology=v7x:4x8x8) 52.0 s as compiled, MFU 68.9 %, in
          58.4 GiB, and 72.2 s in closed form. Not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.llama3_70b import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 256
    config.mesh.cp = 2

    config.model.layers = 126
    config.model.d_model = 16_384
    config.model.d_ff = 53_248
    config.model.heads = 128
    config.model.vocab_multiple = 512  # 128,256 rows do not divide over the ranks

    config.pipeline.microbatches = 4
    config.pipeline.remat = "layer"

    config.optimizer.learning_rate = 8e-5
    config.optimizer.warmup_steps = 8000

    config.data.global_batch = 1024

    return config
