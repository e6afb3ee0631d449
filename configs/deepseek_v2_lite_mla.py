"""The attention of DeepSeek-V2-Lite in a dense model, for 16 chips.

For:      multi-head latent attention at the size of a published model: 2.6 billion parameters.
Numbers:  DeepSeek-AI 2024, "DeepSeek-V2", appendix B, and the published configuration: 27 layers of d_model 2048,
          16 heads of 128 (64 rotated), d_latent 512, queries not compressed, theta 10000 with YaRN factor 40 over
          4096, vocab 102400, peak rate 4.2e-4, 2000 warm-up steps, AdamW 0.9, 0.95, decay 0.1, clip 1.0.
          The experts are left out: every layer has the d_ff 10944 of their one dense layer. Ours are the batch of
          512 windows (theirs: 4608), "wsd" in place of steps, 20 tokens a parameter, and the mesh. YaRN's temperature
          is that of its own paper.
Command:  python train.py --config=configs/deepseek_v2_lite_mla.py --config.data.path=FILES \\
              --config.data.tokenizer=FILE
Hardware: 16 TPU v5p chips (95 GB each).
Memory:   79.7 GiB a chip as compiled for TPU (arguments and temporaries), most of it activations that are kept for the
          backward pass. 4 microbatches of 8 windows a chip.
Time:     estimated from the compiled program with kernels at 70 % of peak, 7.5 s a step (MFU 61 %); not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 16

    config.model.vocab = 102_400
    config.model.layers = 27
    config.model.d_model = 2048
    config.model.d_ff = 10_944
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

    config.pipeline.microbatches = 4
    config.pipeline.remat = "elementwise"

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
