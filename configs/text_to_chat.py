"""From text to a model to chat with, on a CPU: 2.4 million parameters that read Python's standard library.

For:      a whole recipe on a laptop, from text to answers (docs/text-to-chat.md); text_to_chat_x8 is the same for GPUs.
Numbers:  ours, chosen so that two CPU cores suffice.
Command:  python train.py --config=configs/text_to_chat.py --workdir=runs/text
Hardware: any CPU, 2 cores or more.
Time:     59 CPU minutes, half of that on two cores with nothing else to do (docs/text-to-chat.md).
Loss:     3.65 on all held-out text after 2400 steps, with the standard library of Python 3.11; a random model has 8.3.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.model.attention = "gqa"
    config.model.layers = 4
    config.model.d_model = 192
    config.model.d_ff = 512
    config.model.heads = 6
    config.model.kv_heads = 2
    config.model.d_head = 32
    config.model.qk_norm = True
    config.model.vocab = 4096

    config.pipeline.remat = "none"  # memory is no concern at this size, time is

    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 6e-3
    config.optimizer.warmup_steps = 40

    config.data.source = "prepared"
    config.data.path = "runs/stdlib"
    config.data.seq = 256
    config.data.global_batch = 8

    config.train.steps = 2400
    config.train.eval_every_steps = 400

    config.checkpoint.every_steps = 400

    return config
