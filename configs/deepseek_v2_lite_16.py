"""DeepSeek-V2-Lite for 16 chips: multi-head latent attention and 64 experts a layer, all along dp (FSDP).

For:      fine-grained experts with latent attention at the size of a published model: 15.7 billion parameters, 2.4 of
          them active.
Numbers:  DeepSeek-AI 2024, "DeepSeek-V2", appendix B, and the published configuration: 27 layers of d_model 2048, the
          first one dense with d_ff 10944, the others with 64 experts of width 1408, of which a token goes to 6, and 2
          shared ones; 16 heads of 128 (64 rotated), d_latent 512, queries not compressed, theta 10000 with YaRN factor
          40 over 4096, vocab 102400, balance loss 1e-3, peak rate 4.2e-4, 2000 warm-up steps, AdamW 0.9, 0.95, decay
          0.1, clip 1.0. Ours are the batch of 512 windows (theirs: 4608), "wsd" in place of steps, and YaRN's
          temperature, that of its own paper.
Command:  python train.py --config=configs/deepseek_v2_lite_16.py --config.data.path=FILES \\
              --config.data.tokenizer=FILE
Hardware: 16 TPU v5p chips (95 GB each).
Memory:   89.7 GiB a chip as compiled for TPU (arguments and temporaries), of 95.7.
Time:     estimated from the compiled program with kernels at 70 % of peak, 8.57 s a step (MFU 54.6 %): grouped products
          3.3 s, attention kernels 1.2, other products 2.4, what passes over memory between them 1.5, waits 0.17. The
          three kinds of products alone would be 68 %. Not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 16

    config.model.vocab = 102_400
    config.model.layers = 27
    config.model.layers_of = "dense*1 moe*26"
    config.model.d_model = 2048
    config.model.d_ff = 10_944
    config.model.experts = 64
    config.model.experts_per_token = 6
    config.model.d_expert = 1408
    config.model.shared_experts = 2
    config.model.router_normalized = False
    config.model.attention = "mla"
    config.model.heads = 16
    config.model.kv_heads = 16
    config.model.d_head = 128
    config.model.d_latent = 512
    config.model.d_latent_q = 0
    config.model.d_rope = 64
    config.model.rope_theta = 10_000.0
    config.model.rope_scaling = "yarn"
    config.model.rope_factor = 40.0
    config.model.rope_original_seq = 4096
    config.model.tied = False
    config.model.dtype = "bfloat16"
    config.model.kernel = "splash"

    config.loss.balance_coefficient = 1e-3
    config.pipeline.microbatches = 4
    config.pipeline.remat = "norm swiglu dispatch kv"
    # Its matrices are small, and would wait for those of experts.
    config.data_parallel.exceptions = "blocks/dense/attention=zero1 blocks/moe/attention=zero1"
    config.fsdp.reduce = "compute"

    config.optimizer.learning_rate = 4.2e-4
    config.optimizer.schedule = "wsd"
    config.optimizer.warmup_steps = 2000

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 4096
    config.data.global_batch = 512

    config.train.steps = 25_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
