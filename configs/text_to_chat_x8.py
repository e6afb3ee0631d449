"""From text to a model to chat with, on one machine with eight GPUs; --config.model.depth=N sizes all of it.

For:      a model of one's own from nothing: 0.6 billion parameters with the depth of 20 that is written here.
Numbers:  heads of 128 and a width of 64 for each layer, near the aspect ratio at which loss is least in Kaplan et al.
          2020, section 3.1; d_ff 8/3 of the width (Shazeer 2020, section 3); 20 tokens for each parameter of layers
          (Hoffmann et al. 2022, table 3); tokens of a step and peak rate from the operations C = 6 N D of the run:
          0.2920 C^0.3271 and 0.3118 C^-0.1250 (Bi et al. 2024, "DeepSeek LLM", section 3.1).
Command:  python train.py --config=configs/text_to_chat_x8.py --config.data.path=FILES --config.model.depth=26
Hardware: eight NVIDIA GPUs of 80 GB, as H100.
Memory:   20.3 GiB of 80 on each, as planned (python -m parallax.plan --topology=H100:8); 33.8 with a depth of 26, 50.9
          of 32.
Time:     planned, not yet run: 0.90 s a step on eight H100 (MFU 36 %), 2.5 hours in all; 2.15 s (39 %) and 9.9 hours
          with a depth of 26, 5.29 s (43 %) and 30 hours of 32.
Loss:     not yet run.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference

from configs.base import get_config as get_base

D_HEAD = 128
SEQ = 2048
TOKENS_A_PARAMETER = 20
WINDOWS_AT_ONCE = 8 * 16  # of a microbatch: 16 on each GPU


def follow(config: ConfigDict, depth: FieldReference) -> None:
    """Sizes, rate, batch and steps as rules from `depth`, also where that is changed on the command line."""
    width = 64 * depth
    d_ff = (8 * width // 3 + 127) // 128 * 128
    parameters = depth * (4 * width**2 + 3 * width * d_ff)
    tokens = TOKENS_A_PARAMETER * parameters
    operations = 6 * parameters.to_float() * tokens
    microbatches = 1 + (0.2920 * operations**0.3271 / (SEQ * WINDOWS_AT_ONCE)).to_int()

    config.model.depth = depth
    config.model.layers = depth
    config.model.d_model = width
    config.model.d_ff = d_ff
    config.model.heads = width // D_HEAD
    config.model.kv_heads = width // D_HEAD
    config.optimizer.learning_rate = (0.3118 * operations**-0.1250).to_float()
    config.pipeline.microbatches = microbatches
    config.data.global_batch = WINDOWS_AT_ONCE * microbatches
    config.train.steps = tokens // (SEQ * WINDOWS_AT_ONCE * microbatches)


def get_config() -> ConfigDict:
    config = get_base()

    config.model.attention = "gqa"
    config.model.d_head = D_HEAD
    config.model.qk_norm = True
    config.model.tied = False
    config.model.vocab = 65_536
    config.model.dtype = "bfloat16"
    config.model.kernel = "cudnn"
    follow(config, FieldReference(20))

    config.pipeline.remat = "elementwise"
    config.fsdp.reduce = "compute"

    config.optimizer.name = "muon"
    config.optimizer.warmup_steps = 200

    config.data.source = "parquet"
    config.data.path = "corpus/*.parquet"
    config.data.tokenizer = "corpus/tokenizer.json"
    config.data.seq = SEQ

    config.train.eval_every_steps = 1000

    config.checkpoint.every_steps = 1000

    return config
