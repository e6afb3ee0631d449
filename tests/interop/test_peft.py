"""Adapters of Hugging Face's `peft` train here as they do there, and are written as it writes them."""

import itertools
import json

import numpy as np
import pytest
from support.hf_folders import read_folder

from parallax.cli.convert import main

EXTRA = 'needs the extra hf-tests: pip install -e ".[hf-tests]" -c constraints.txt'
torch = pytest.importorskip("torch", reason=EXTRA)
pytest.importorskip("transformers", reason=EXTRA)
peft = pytest.importorskip("peft", reason=EXTRA)
save_file = pytest.importorskip("safetensors.numpy", reason=EXTRA).save_file

from support.hf_families import (
    MESHES,
    adamw_losses,
    import_pair,
    logits_difference,
    make_pair,
    meshes_of,
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
    "Mixtral": dict(target_modules=["q_proj", "o_proj"], target_parameters=["mlp.experts.down_proj"]),
}


def adapted(name):
    """PEFT's model, both of whose matrices are random."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTED[name])
    return peft.get_peft_model(random_model(name), config)


def numpy_state(model):
    return {name: values.numpy() for name, values in peft.get_peft_model_state_dict(model).items()}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.slow] * ((name, mesh) != ("Llama 2", MESHES[0])))
        for name in ADAPTED
        for mesh in meshes_of(name)
    ],
    ids=str,
)
def test_ten_steps_are_theirs_and_adapters_go_back_bitwise(tmp_path, name, mesh):
    pair, theirs = make_pair(name, tmp_path), adapted(name)
    theirs.save_pretrained(tmp_path / "adapter")
    back = ["from-peft", str(tmp_path / "adapter"), str(pair.run), "--workdir", str(tmp_path / "tuned")]
    assert main(back) == 0 and main(["to-peft", str(tmp_path / "tuned"), str(tmp_path / "again")]) == 0
    there, here = (read_folder(tmp_path / folder) for folder in ("adapter", "again"))
    if "target_parameters" in ADAPTED[name]:  # ours has those of each expert, as transformers 4; PEFT joins them
        here = numpy_state(peft.PeftModel.from_pretrained(random_model(name), tmp_path / "again"))
        there = numpy_state(theirs)
    assert there.keys() == here.keys()
    for tensor, values in there.items():
        np.testing.assert_array_equal(values, here[tensor])
    about = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    w2 = ["w2"] * ("target_parameters" in ADAPTED[name])
    assert {*about["target_modules"]} == {*ADAPTED[name]["target_modules"], *w2}
    run = pair._replace(run=tmp_path / "tuned")
    expected, actual = adamw_losses(theirs.train()), our_losses(run, *ours_on(run, mesh))
    assert expected[-1] < expected[0]
    assert np.abs(np.subtract(expected, actual)).max() < LOSS_ERROR


@pytest.mark.slow
def test_adapters_of_every_product_of_experts_compute_there_what_they_do_here(tmp_path):
    """As transformers 4 wrote them, which both read: one for each product of an expert."""
    theirs, draw = random_model("Mixtral"), np.random.default_rng(0)
    theirs.save_pretrained(tmp_path / "theirs")
    sizes, tensors = dict(w1=(32, 48), w3=(32, 48), w2=(48, 32)), {}
    for layer, expert, name in itertools.product(range(4), range(4), sizes):
        module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        width, out = sizes[name]
        tensors[f"{module}.lora_A.weight"] = draw.normal(0, 0.2, (4, width)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = draw.normal(0, 0.2, (out, 4)).astype(np.float32)
    (tmp_path / "adapter").mkdir()
    about = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=[*sizes])
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    pair = import_pair(theirs, tmp_path)
    assert main(["from-peft", str(tmp_path / "adapter"), str(pair.run), "--workdir", str(tmp_path / "tuned")]) == 0
    assert main(["to-peft", str(tmp_path / "tuned"), str(tmp_path / "again")]) == 0
    there, here = (read_folder(tmp_path / folder) for folder in ("adapter", "again"))
    assert all(np.array_equal(there[name], here[name]) for name in {*there, *here})
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "again").eval()
    run = pair._replace(theirs=adapted, run=tmp_path / "tuned")
    plain = run._replace(theirs=random_model("Mixtral"))
    ours = ours_on(run, (1, 1, 2, 2))
    assert logits_difference(run, *ours, lengths=[32]) < 2e-4 < 0.1 < logits_difference(plain, *ours, lengths=[32])
