"""The work of benchmarks/step.py: small enough for a CPU, large enough that matmuls dominate.

For:      measuring speed, as a share of the machine's own matmul rate.
Numbers:  ours; d_model 256, 8 layers, 8 heads of 32, gated d_ff 704, vocab 8192, seq 256, global batch 32, float32.
          With mesh.pp above 1, measure with pipeline.microbatches=8.
Command:  python train.py --config=configs/bench_small.py --config.mesh.simulate=8 --config.mesh.pp=2 \\
              --config.mesh.tp=2 --config.pipeline.microbatches=8
Hardware: any CPU.
Time:     seconds a step.
Loss:     not yet run; random tokens teach nothing.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.model.vocab = 8192
    config.model.layers = 8
    config.model.d_model = 256
    config.model.d_ff = 704
    config.model.attention = "gqa"
    config.model.heads = 8
    config.model.kv_heads = 8
    config.model.d_head = 32

    config.optimizer.warmup_steps = 5

    config.data.source = "synthetic"
    config.data.seq = 256
    config.data.global_batch = 32

    config.train.steps = 20
    config.train.log_every_steps = 1
    config.train.eval_batches = 0

    config.checkpoint.every_steps = 0
    config.checkpoint.keep_best = 0

    return config
