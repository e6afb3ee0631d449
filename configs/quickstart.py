"""A small code model, trained on the Python standard library, on eight simulated devices.

For:      seeing everything work on a laptop: latent attention, a pipeline of two stages, two-way data and tensor cuts.
Numbers:  ours, chosen so that two CPU cores suffice.
Command:  python train.py --config=configs/quickstart.py
Hardware: any CPU, 2 cores or more.
Time:     4.5 minutes on 2 cores, after the set-up.
Loss:     eval 3.97 nats a token, 1.46 a byte, after 240 steps; unigram entropy 5.97 a token, 3.15 a byte; all of the
          library of Python 3.11, each version has another one.
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base


def get_config() -> ConfigDict:
    config = get_base()

    config.mesh.pp = 2
    config.mesh.dp = 2
    config.mesh.tp = 2
    config.mesh.simulate = 8

    config.model.layers = 4
    config.model.d_model = 128
    config.model.d_ff = 384
    config.model.heads = 4
    config.model.d_head = 32
    config.model.d_latent = 64
    config.model.d_rope = 16

    config.pipeline.microbatches = 4
    config.pipeline.remat = "none"  # memory is no concern at this size, time is

    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 6e-3
    config.optimizer.warmup_steps = 20

    config.data.source = "stdlib"
    config.data.tokenizer = "bpe"
    config.data.bpe_vocab = 1024
    config.data.seq = 256
    config.data.global_batch = 16

    config.train.steps = 240
    config.train.eval_every_steps = 120

    config.checkpoint.every_steps = 120

    config.sample.prompt = "import os\n\n\ndef main(args):\n    "
    config.sample.tokens = 200

    return config
