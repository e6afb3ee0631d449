"""OLMo 3 7B on windows of 65,536 tokens, each sharded over 4 of 16 chips (mesh.cp); three of four layers see 4,096.

For:      the last stage of its training, on long documents: the import of a checkpoint from before that stage is
          train.init_from.
Numbers:  the config.json of allenai/Olmo-3-1025-7B (Team Olmo 2025, "Olmo 3"): 32 layers of d_model 4096, norms after
          attention and the MLP, windows of 4,096 tokens in three of four layers, YaRN by 8 in the fourth. Batch, steps
          and learning rate are ours.
Command:  python train.py --config=configs/olmo3_7b_64k.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 16 TPU v5p chips (95 GB each).
Memory:   64.3 GiB a chip as compiled, 61.3 as planned, 49.6 of them activations that are kept for the backward pass.
Time:     as compiled with kernels at 70 % of peak 16.3 s a step of 1 million tokens (MFU 51.5 %), 9 days in all;
          planned without the compiler 18.8 s (44.8 %), 2.3 of them messages over cp. Not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.llama2_7b_64 import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 4
    config.mesh.cp = 4

    config.model.vocab = 100_278
    config.model.vocab_multiple = 128
    config.model.norm_eps = 1e-6
    config.model.norm_place = "after"
    config.model.qk_norm = True
    config.model.qk_norm_over = "projection"
    config.model.layers_of = "(local*3 dense)*8"
    config.model.kinds = "local=(rope_factor=1.0, rope_scaling='none', rope_temperature=0.0, sliding_window=4096)"
    config.model.rope_theta = 500_000.0
    config.model.rope_scaling = "yarn"
    config.model.rope_factor = 8.0
    config.model.rope_original_seq = 8192
    config.layout.context = "ulysses"

    config.pipeline.microbatches = 4

    config.optimizer.learning_rate = 2e-4
    config.optimizer.warmup_steps = 200
    config.optimizer.eps = 1e-8

    config.data.seq = 65_536
    config.data.global_batch = 16

    config.train.steps = 48_000
    config.train.eval_every_steps = 500
    config.train.eval_batches = 4

    config.checkpoint.every_steps = 500

    return config
