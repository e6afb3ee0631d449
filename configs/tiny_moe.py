"""The quickstart as a mixture of experts: the same text and FLOPs a token, eight experts in each layer.

For:      seeing experts work on a laptop: a pipeline of two stages, experts over two ranks, two-way tensor cuts.
Numbers:  ours; a token's two experts and the shared one are together as wide as the quickstart's MLP. Choices by
          sigmoid, load kept even by the routers' biases, as in DeepSeek-V3.
Command:  python train.py --config=configs/tiny_moe.py
Hardware: any CPU, 2 cores or more.
Time:     4 minutes on 2 cores beside other work, 340 CPU seconds.
Loss:     eval 3.936 nats a token, 1.442 a byte, after 240 steps; unigram entropy 5.971 a token, 3.147 a byte; all of
          the library of Python 3.11, each version has another one. The quickstart's is 3.97.
"""

from ml_collections import ConfigDict

from configs.quickstart import get_config as get_quickstart


def get_config() -> ConfigDict:
    config = get_quickstart()

    config.mesh.dp = 1
    config.mesh.ep = 2

    config.model.layers_of = "moe*4"
    config.model.experts = 8
    config.model.experts_per_token = 2
    config.model.d_expert = 128
    config.model.shared_experts = 1
    config.model.router_score = "sigmoid"

    config.optimizer.balance_rate = 2e-3

    return config
