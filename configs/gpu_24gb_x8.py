"""A dense model of 1.2 billion parameters for one machine with eight GPUs of 24 GB, all of them along dp (FSDP).

For:      a machine whose GPUs talk over PCIe; with 20 tokens a parameter, 92,000 steps.
Numbers:  those of configs/llama_1b_16.py: 16 layers of d_model 2048, gated d_ff 8192, 16 heads of 128.
Command:  python train.py --config=configs/gpu_24gb_x8.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: eight NVIDIA GPUs of 24 GB, as RTX 4090 or L4; or 16 or 32 of them, on more machines.
Memory:   15.7 GiB of 24 on each of eight, as planned (python -m parallax.plan --topology=RTX4090:8); JAX reserves 18
          by default. remat="elementwise" takes 17.7.
Time:     planned, not yet run: 2.7 s a step on eight RTX 4090 (MFU 53 %), 4.5 on eight L4. The plan has a GPU send at
          the rate that its slot reaches; cards without direct access to each other, as RTX 4090, are slower by what
          that costs.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

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

    config.pipeline.microbatches = 2
    config.pipeline.remat = "elementwise core out"
    config.fsdp.reduce = "compute"

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
