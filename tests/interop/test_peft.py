"""Adapters of Hugging Face's `peft` train here as they do there, and are written as it writes them."""

import json

import numpy as np
import pytest
from support.hf_folders import read_folder

from parallax.cli.convert import main

EXTRA = 'needs the extra hf-tests: pip install -e ".[hf-tests]" -c constraints.txt'
torch = pytest.importorskip("torch", reason=EXTRA)
pytest.importorskip("transformers", reason=EXTRA)
peft = pytest.importorskip("peft", reason=EXTRA)

from support.hf_families import (
    MESHES,
    adamw_losses,
    make_pair,
    our_losses,
    ours_on,
    random_model,
)

LOSS_ERROR = 1e-4  # of ten steps
PROJECTIONS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
ADAPTED = {
    "Llama 2": dict(target_modules=PROJECTIONS),
    "Qwen2, tied": dict(target_modules=PROJECTIONS, use_rslora=True),
    "DeepSeek-V3, halves": dict(target_modules=["q_a_proj", "q_b_proj", "o_proj", "up_proj"]),
    "DeepSeek-V2, yarn": dict(target_modules=["q_b_proj", "o_proj", "up_proj"]),
    "Mixtral": dict(target_modules=["q_proj", "o_proj"]),
}


def adapted(name):
    """PEFT's model, both of whose matrices are random."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTED[name])
    return peft.get_peft_model(random_model(name), config)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.slow] * ((name, mesh) != ("Llama 2", MESHES[0])))
        for name in ADAPTED
        for mesh in MESHES
    ],
    ids=str,
)
def test_ten_steps_are_theirs_and_adapters_go_back_bitwise(tmp_path, name, mesh):
    pair, theirs = make_pair(name, tmp_path), adapted(name)
    theirs.save_pretrained(tmp_path / "adapter")
    back = ["from-peft", str(tmp_path / "adapter"), str(pair.run), "--workdir", str(tmp_path / "tuned")]
    assert main(back) == 0 and main(["to-peft", str(tmp_path / "tuned"), str(tmp_path / "again")]) == 0
    there, here = (read_folder(tmp_path / folder) for folder in ("adapter", "again"))
    assert there.keys() == here.keys()
    for tensor, values in there.items():
        np.testing.assert_array_equal(values, here[tensor])
    about = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert {*about["target_modules"]} == {*ADAPTED[name]["target_modules"]}
    run = pair._replace(run=tmp_path / "tuned")
    expected, actual = adamw_losses(theirs.train()), our_losses(run, *ours_on(run, mesh))
    assert expected[-1] < expected[0]
    assert np.abs(np.subtract(expected, actual)).max() < LOSS_ERROR
