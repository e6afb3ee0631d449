"""The quickstart in the manner of Gemma: layers with a sliding window, and every third without; the same text.

For:      seeing layers by kind work on a laptop: windows and positions by kind, a pipeline of two stages.
Numbers:  ours. Norms of 1 + w before and after, caps, tied and scaled embeddings and GELU are those of Gemma 2, more
          local than global layers and a rope_theta for each are from Gemma 3. 1.02 million parameters, the quickstart has 0.99.
Command:  python train.py --config=configs/tiny_local.py
Hardware: any CPU, 2 cores or more.
Time:     not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.quickstart import get_config as get_quickstart


def get_config() -> ConfigDict:
    config = get_quickstart()

    config.model.layers = 6
    config.model.layers_of = "(local*2 global)*2"  # a stage has each once
    config.model.kinds = "local=(sliding_window=32) global=(rope_theta=1e6)"

    config.model.attention = "gqa"
    config.model.kv_heads = 2
    config.model.score_cap = 50.0
    config.model.norm_scale = "one_plus"
    config.model.norm_place = "both"
    config.model.d_ff = 256
    config.model.activation = "gelu_tanh"
    config.model.embedding_scale = config.model.d_model**0.5
    config.model.logit_cap = 30.0

    return config
