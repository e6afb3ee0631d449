"""DeepSeek-V3 for 512 chips: experts sharded over 8 of them (mesh.ep), everything else over 512 as FSDP.

For:      the mixture of experts with the best-known report: 671 billion parameters, 37 of them active.
Numbers:  DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 4.2, and the published configuration: 61 layers of
          d_model 7168, three dense ones with d_ff 18432, then 256 experts of width 2048, of which a token goes to 8 in
          4 of 8 groups by sigmoid scores with a bias that balances the load (rate 1e-3), times 2.5, and one shared;
          128 heads of 128 (64 rotated), d_latent 512, d_latent_q 1536, vocab 129280, windows of 4096, balance loss
          1e-4, peak rate 2.2e-4, 2000 warm-up steps. Its second head, for the token after the next (MTP), is left
          out. Ours are the batch, 4096 windows of their 15360, and "wsd" in place of their steps.
Command:  python train.py --config=configs/deepseek_v3.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 512 TPU v5p chips (95 GB each).
Memory:   46.3 GiB a chip at the peak as compiled and 61.2 reserved, 42.0 as traced.
Time:     as compiled for 512 v5p 52.6 s a step, MFU 34.0 % with kernels at 70 % of their peak; planned 61.2 s
          (29.2 %). On v7x this model is planned 0.94 to 1.03 of its published time (docs/measured/published.md). Not
          yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 64
    config.mesh.ep = 8

    config.model.vocab = 129_280
    config.model.layers = 61
    config.model.layers_of = "dense*3 moe*58"
    config.model.d_model = 7168
    config.model.d_ff = 18_432
    config.model.experts = 256
    config.model.experts_per_token = 8
    config.model.d_expert = 2048
    config.model.shared_experts = 1
    config.model.router_score = "sigmoid"
    config.model.router_scale = 2.5
    config.model.router_groups = 8
    config.model.router_groups_chosen = 4
    config.model.attention = "mla"
    config.model.heads = 128
    config.model.kv_heads = 128
    config.model.d_head = 128
    config.model.d_latent = 512
    config.model.d_latent_q = 1536
    config.model.d_rope = 64
    config.model.rope_theta = 10_000.0
    config.model.tied = False
    config.model.dtype = "bfloat16"
    config.model.kernel = "splash"

    config.loss.balance_coefficient = 1e-4
    config.loss.chunk_tokens = 4096
    config.pipeline.microbatches = 4
    config.pipeline.remat = "layer"
    config.fsdp.reduce = "compute"

    config.optimizer.learning_rate = 2.2e-4
    config.optimizer.schedule = "wsd"
    config.optimizer.warmup_steps = 2000
    config.optimizer.balance_rate = 1e-3

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 4096
    config.data.global_batch = 4096

    config.train.steps = 1_000_000
    config.train.eval_every_steps = 1000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
