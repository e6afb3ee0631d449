"""A dense model of 1.2 billion parameters on windows of 131,072 tokens, each sharded over 4 of 16 chips (mesh.cp).

For:      long context on a small pod: books, repositories, long conversations; best from a model that was trained on
          short windows (train.init_from), for some thousand steps.
Numbers:  the shape of configs/llama_1b_16.py; wavelengths of rotary positions as of Llama 3's 128k (Grattafiori et al.
          2024), rope_theta=500,000.
Command:  python train.py --config=configs/llama_1b_128k.py --config.data.path=FILES --config.data.tokenizer=FILE
          On 64 chips --config.mesh.dp=16 --config.data.global_batch=16 as well.
Hardware: 16 TPU v5e chips (16 GB each), or 64.
Memory:   11.7 GiB a chip as compiled for TPU (arguments and temporaries).
Time:     estimated from the compiled program with attention kernels at 70 % of peak, 11.7 s a step (MFU 46.3 %, waits
          1.3 %), 13 hours in all; mesh.dp=1, mesh.cp=16, pipeline.microbatches=4 and pipeline.remat="elementwise" take
          12.4 s and 10.0 GiB. In an earlier version, with which it took 12.2 s, it was 12.9 s on 64 chips (MFU 42.2 %,
          waits 4.9 %) and 11.6 GiB; pipeline.remat="elementwise qkv ffn" took as long there, and 14.1 GiB. Not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.llama_1b_16 import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 4
    config.mesh.cp = 4

    config.model.rope_theta = 500_000.0
    # Heads change places with seq: 4 of a chip's 16 meet all tokens. It sends least of the three.
    config.layout.context = "ulysses"

    config.pipeline.microbatches = 1
    # Attention is four fifths of the work: its results are kept, and all that is cheap beside it is recomputed.
    config.pipeline.remat = "elementwise qkv out ffn"
    # Memory is for what is saved of long rows.
    config.data_parallel.exceptions = ""
    config.loss.chunk_tokens = 1024

    config.optimizer.learning_rate = 1e-4
    config.optimizer.warmup_steps = 200

    config.data.seq = 131_072
    config.data.global_batch = 4

    config.train.steps = 4000
    config.train.eval_every_steps = 200
    config.train.eval_batches = 4

    config.checkpoint.every_steps = 200

    return config
