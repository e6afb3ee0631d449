"""The quickstart in the manner of Gemma: layers with a sliding window, and every third without; the same text.

For:      seeing layers by kind work on a laptop: windows and positions by kind, a pipeline of two stages.
Numbers:  ours. Norms of 1 + w before and after, caps, tied and scaled embeddings and GELU are those of Gemma 2; more
          local than global layers, and a rope_theta for each, are from Gemma 3. The quickstart has as many parameters,
          a million.
Command:  python train.py --config=configs/tiny_local.py
Hardware: any CPU, 2 cores or more.
Time:     390 CPU seconds, on 2 cores beside much other work.
Loss:     eval 3.628 nats a token, 1.329 a byte, after 240 steps; unigram entropy 5.971 a token, 3.147 a byte; all of
          the library of Python 3.11, each version has another one. The quickstart's is 3.97.
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
