"""Gemma 3 12B for 16 chips, or for one machine with eight GPUs of 80 GB: five layers with a window, then one without.

For:      local and global layers with rotary embeddings of their own, norms before and after branches and of heads, a
          vocab of 262 thousand: 11.8 billion parameters, the text model alone.
Numbers:  Gemma Team 2025, "Gemma 3 Technical Report", section 2, and the published configuration: 48 layers of d_model
          3840, gated d_ff 15360 with GELU, 16 heads of 256, 8 of keys, a window of 1024 in five of six layers, theta
          1e4 in these and 1e6 in the others, a tied vocab of 262208. Rows of 8192, the batch and the optimizer are
          ours: theirs are rows of 32768, and a distillation. For 128k they divide the other layers' positions by 8.
Command:  python train.py --config=configs/gemma3_12b.py --config.data.path=FILES --config.data.tokenizer=FILE
          on eight GPUs with --config.mesh.dp=8 --config.pipeline.microbatches=16 --config.pipeline.remat=attention
          --config.loss.chunk_tokens=2048, and XLA_CLIENT_MEM_FRACTION=0.92, since JAX reserves 60 GB by default
Hardware: 16 TPU v5p chips (95 GB each), or eight NVIDIA GPUs of 80 GB, as H100.
Memory:   62.1 GiB of 95.7 a chip as compiled, 64.9 as planned. On each of eight H100 61.3 of 80, planned 61.8.
Time:     not yet run: as compiled, with kernels at 70 % of peak, 15.2 s a step on 16 v5p (MFU 70 %), and 13.6 s on
          eight H100 (MFU 72 %). On v5p planned 15.2 s, 70 % (parallax.plan --topology=v5p:2x2x4 --analytic).
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 16

    config.model.vocab = 262_208
    config.model.layers = 48
    config.model.layers_of = "(local*5 dense)*8"
    config.model.kinds = "local=(sliding_window=1024, rope_theta=1e4)"
    config.model.d_model = 3840
    config.model.d_ff = 15_360
    config.model.activation = "gelu_tanh"
    config.model.norm_scale = "one_plus"
    config.model.norm_place = "both"
    config.model.attention = "gqa"
    config.model.heads = 16
    config.model.kv_heads = 8
    config.model.d_head = 256
    config.model.qk_norm = True
    config.model.qk_norm_scale = "one_plus"
    config.model.rope_theta = 1e6
    config.model.embedding_scale = 3840**0.5
    config.model.dtype = "bfloat16"

    config.pipeline.microbatches = 8
    config.pipeline.remat = "elementwise"
    config.fsdp.reduce = "float32"
    config.loss.chunk_tokens = 4096

    config.optimizer.learning_rate = 2e-4
    config.optimizer.warmup_steps = 2000

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 8192
    config.data.global_batch = 128

    config.train.steps = 100_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
