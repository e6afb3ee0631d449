"""gpt-oss-20b for one machine with eight GPUs of 80 GB: experts sharded over all of them (mesh.ep), the rest as FSDP.

For:      fine-tuning gpt-oss-20b, or training a model like it: windows in every second layer, sinks, biases everywhere,
          clamped experts. `python -m parallax.convert from-hf` makes a run of the published weights.
Numbers:  the published configuration of gpt-oss-20b (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2):
          24 layers of d_model 2880, 32 experts of width 2880 of which a token goes to 4, 64 heads of 64 with 8
          key-value heads, windows of 128 in every other layer, theta 150,000 with yarn to 131,072 tokens, vocab
          201,088. How it was trained was not published: batch, rates and steps are ours.
Command:  python train.py --config=configs/gpt_oss_20b.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: eight NVIDIA H100 of 80 GB.
Memory:   53.8 GiB of 80 on each as compiled, 53.4 as planned (python -m parallax.plan --config=configs/gpt_oss_20b.py
          --topology=H100:1x8), of 60 that JAX reserves by default; XLA_CLIENT_MEM_FRACTION=0.92 leaves more room.
Time:     not yet run. As compiled 1.75 s a step (MFU 43 %), as planned 2.84 (27 %): experts are kernels for Triton
          (docs/measured/ep.md), and so is attention, since model.kernel="auto" is "triton" here, which has sinks as
          cuDNN's attention has not. No GPU has run these kernels.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 1
    config.mesh.ep = 8

    config.model.vocab = 201_088
    config.model.layers = 24
    config.model.layers_of = "(local moe)*12"
    config.model.kinds = "local=(base='moe', sliding_window=128)"
    config.model.d_model = 2880
    config.model.experts = 32
    config.model.experts_per_token = 4
    config.model.d_expert = 2880
    config.model.router_shift = True
    config.model.expert_bias = True
    config.model.expert_activation = "clamped"
    config.model.attention = "gqa"
    config.model.heads = 64
    config.model.kv_heads = 8
    config.model.d_head = 64
    config.model.qkv_bias = True
    config.model.out_bias = True
    config.model.sinks = True
    config.model.rope_theta = 150_000.0
    config.model.rope_scaling = "yarn"
    config.model.rope_factor = 32.0
    config.model.rope_original_seq = 4096
    config.model.rope_truncate = False
    config.model.norm_eps = 1e-5
    config.model.tied = False
    config.model.dtype = "bfloat16"

    config.loss.balance_coefficient = 0.01

    config.pipeline.microbatches = 8
    config.pipeline.remat = "elementwise"
    config.fsdp.reduce = "compute"

    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 100

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 4096
    config.data.global_batch = 64

    config.train.steps = 10_000
    config.train.eval_every_steps = 500
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 500

    return config
