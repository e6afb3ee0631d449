"""Numbers that must not move: a short run on the vendored text, the same on every Python, jax and mesh."""

import numpy as np
import pytest

from configs.tiny_gqa import get_config
from parallax.storage.run_files import read_metrics
from parallax.training.run import train

# Recorded with jax 0.10.2 on 2·2·2. A change of these numbers is a change of the model, the data, the order of windows,
# the initial values or the optimizer, and says why in its commit.
LOSSES = [6.0099058, 5.8388548, 5.6377430, 5.4516315, 5.3206644, 5.2418056]


@pytest.mark.parametrize("sizes", [pytest.param((1, 8, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=str)
def test_a_short_run_has_the_recorded_losses(sizes, tmp_path):
    config = get_config()
    config.mesh.pp, config.mesh.dp, config.mesh.tp = sizes
    config.pipeline.microbatches = 2
    config.train.steps, config.optimizer.warmup_steps = len(LOSSES), 2
    config.train.eval_batches = config.checkpoint.keep_best = config.checkpoint.every_steps = 0
    config.sample.prompt = ""
    train(config, tmp_path)
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    # 1e-6 a step for the order of sums, multiplied by Adam from step to step: 1e-5.
    np.testing.assert_allclose(losses, LOSSES, rtol=1e-5)
