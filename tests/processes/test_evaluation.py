"""An evaluation of all that is held out has the same result with every number of processes."""

import pytest
from support.process_examples import flags_of, launched

from parallax.storage.run_files import read_metrics

# The last batch is filled up for three ranks, too.
MESH = {"mesh.pp": 1, "mesh.replica": 3, "mesh.dp": 2, "mesh.tp": 1, "mesh.simulate": 6, "pipeline.microbatches": 1}
RUN = {"data.global_batch": 6, "train.steps": 3, "train.eval_batches": -1, "model.dropout": 0.0}


@pytest.mark.slow
def test_the_held_out_text_has_the_same_loss_with_one_two_and_three_processes(corpus, tmp_path):
    last = {}
    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        flags = [*flags_of(corpus, **MESH, **RUN), f"--workdir={folder}"]
        with launched("train.py", *flags, processes=count, devices=6 // count) as job:
            status, text = job.end()
        assert status == 0 and "the whole held-out text" in text, text
        row = read_metrics(folder / "metrics.jsonl")[-1]
        last[count] = {key: value for key, value in row.items() if key.startswith("eval/")}
    assert len(last[1]) == 1 + len([0, 1, 2, 4, 8, 16])
    assert last[2] == pytest.approx(last[1], rel=1e-6) and last[3] == pytest.approx(last[1], rel=1e-6)
