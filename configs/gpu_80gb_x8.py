"""Llama-2-7B for one machine with eight GPUs of 80 GB, all of them along dp (FSDP); for more such machines, too.

For:      eight A100 or H100 on NVLink; what launch/slurm.sh runs.
Numbers:  those of configs/llama2_7b_64.py: the model and optimizer of Touvron et al. 2023, "Llama 2", section 2, with a
          global batch of 256 windows, a quarter of theirs.
Command:  python train.py --config=configs/gpu_80gb_x8.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: eight NVIDIA GPUs of 80 GB, as A100 or H100; or 16 or 32 of them, on two or four machines.
Memory:   37.1 GiB of 80 on each of eight, as planned (python -m parallax.plan --topology=H100:8), 38.3 as compiled; JAX
          reserves 60 by default. Half as many microbatches take 62.1 and, as compiled, 3 % more time.
Time:     planned, not yet run: 11.7 s a step on eight H100 (MFU 49 %), 32.9 on eight A100 (55 %); as compiled with
          kernels at 70 % of peak 7.2 on H100, with them at peak 22.1 on A100. One H100 took as long as planned
          (configs/gpu_80gb.py). On 32 H100 with --config.pipeline.microbatches=2 1.9 s as compiled, in 52.5 GiB.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.model.vocab = 32_000
    config.model.layers = 32
    config.model.d_model = 4096
    config.model.d_ff = 11_008
    config.model.attention = "gqa"
    config.model.heads = 32
    config.model.kv_heads = 32
    config.model.d_head = 128
    config.model.norm_eps = 1e-5
    config.model.tied = False
    config.model.dtype = "bfloat16"
    config.model.kernel = "cudnn"

    config.pipeline.microbatches = 16
    config.pipeline.remat = "elementwise"
    config.fsdp.reduce = "compute"

    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.optimizer.eps = 1e-5

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 4096
    config.data.global_batch = 256

    config.train.steps = 1_900_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
