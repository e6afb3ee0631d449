"""The quickstart's model on three sources, with other weights from step 161 on and longer windows from step 201 on.

For:      seeing a mixture of sources, an annealing phase and a phase of long context on a laptop.
Numbers:  ours; weights, steps and lengths only show what can be written.
Command:  python train.py --config=configs/tiny_mixture.py
Hardware: any CPU, 2 cores or more.
Time:     not yet run.
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.quickstart import get_config as get_quickstart


def get_config() -> ConfigDict:
    config = get_quickstart()

    config.data.tokenizer = "bytes"
    config.data.mixture = (
        "code=(source='stdlib', weight=0.7) prose=(source='moby', weight=0.2) "
        "numbers=(source='synthetic', weight=0.1, epochs=0.5, end='drop')"
    )
    config.data.phases = "anneal=(from_step=161, code=0.4, prose=0.6) long=(from_step=201, seq=512, global_batch=8)"

    return config
