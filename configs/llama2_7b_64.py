"""Llama-2-7B for 64 chips, all of them along dp (FSDP).

For:      a model whose published loss curve can be compared with.
Numbers:  Touvron et al. 2023, "Llama 2", section 2: 32 layers of d_model 4096, gated d_ff 11008, 32 heads of 128,
          vocab 32000, seq 4096, AdamW 0.9, 0.95, 1e-5, 2000 warm-up steps, cosine to a tenth, decay 0.1, clip 1.0.
          The global batch of 256 windows is ours, a quarter of theirs; their 2 T tokens are 1.9 M such steps.
Command:  python train.py --config=configs/llama2_7b_64.py --config.data.path=FILES --config.data.tokenizer=FILE
Hardware: 64 TPU v5p chips (95 GB each), or 32 v7x chips (64 cores of 96 GB).
Memory:   51.7 GiB a chip as compiled for TPU (arguments and temporaries), most of them activations that are kept for
          the backward pass; 51.3 a core of v7x.
Time:     estimated from the compiled program with kernels at 70 % of peak, 1.90 s a step (MFU 80.7 %); 0.86 s on 32 v7x
          (--topology=v7x:4x4x2, MFU 70.7 %). Not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.dp = 64

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
    config.model.kernel = "splash"

    # Messages of few, large microbatches hide; reduce-scatters do on the SparseCores, and sum in float32.
    config.pipeline.microbatches = 1
    config.pipeline.remat = "elementwise"
    config.fsdp.reduce = "float32"

    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.optimizer.eps = 1e-5

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = 4096
    config.data.global_batch = 256

    config.train.steps = 1_900_000
    config.train.eval_every_steps = 2000
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 1000

    return config
