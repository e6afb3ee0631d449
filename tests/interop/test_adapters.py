"""Adapters of runs: trained on another run's weights, merged, and as folders of PEFT."""

import json
import re

import jax
import numpy as np
import pytest
from support.exportable_runs import OWN, own_run, own_settings
from support.hf_folders import read_folder
from support.run_examples import tiny_config, train

import parallax as px
from parallax.cli.convert import main
from parallax.errors import CheckpointError
from parallax.interop.safetensors import write_tensors
from parallax.sharding.layout import named_leaves

ON = "attention/[qv] attention/out mlp"
LORA = {"model.lora_rank": 4, "model.lora_on": ON, "model.lora_base": "int8"}
SHORT = {"train.steps": 2, "train.eval_batches": 0, "optimizer.warmup_steps": 0}


@pytest.fixture(scope="module")
def tuned(corpus, whole_run, tmp_path_factory):
    """A run of adapters on the weights of the tiny run, which rest in 8 bits; not to be changed."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    train(tiny_config(corpus, **SHORT, **LORA, **{"train.init_from": str(whole_run)}), folder)
    return folder


def params_of(run):
    return {name: np.asarray(values) for name, values in named_leaves(jax.device_get(px.load(run).params)).items()}


def test_adapters_alone_are_trained_on_the_weights_of_another_run(whole_run, tuned):
    before, after = params_of(whole_run), params_of(tuned)
    added = {name for name in after if name not in before}
    assert {name.rpartition("/")[2] for name in added} == {"lora_a", "lora_b", "unit"}
    assert all(np.abs(after[name]).max() > 0 for name in added)
    kernel, values, units = (
        tree[f"blocks/mlp/up/{name}"] for tree, name in ((before, "kernel"), (after, "kernel"), (after, "unit"))
    )
    assert values.dtype == np.int8
    assert (np.abs(kernel - values * units[:, None]) <= 0.501 * units[:, None]).all()


def test_a_merged_run_computes_what_its_adapters_do(tuned, tmp_path):
    assert main(["merge", str(tuned), str(tmp_path / "merged")]) == 0
    runs = [px.load(run) for run in (tuned, tmp_path / "merged")]
    losses = [float(jax.jit(run.model.loss)(run.params, run.batch_of("Call me Ishmael."))["loss"]) for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for run, out in ((tuned, "theirs"), (tmp_path / "merged", "of_merged")):
        assert main(["to-hf", str(run), str(tmp_path / out)]) == 0
    here, there = (read_folder(tmp_path / out) for out in ("theirs", "of_merged"))
    assert here.keys() == there.keys() and not any("lora" in name for name in here)
    assert all(np.array_equal(here[name], there[name]) for name in here)
    assert main(["merge", str(tmp_path / "merged"), str(tmp_path / "again")]) == 2


def test_adapters_of_experts_in_one_tensor_are_merged_into_each_and_are_none_of_pefts(corpus, tmp_path, capsys):
    """As gpt-oss has them; `merge` goes expert by expert, and `to-hf` through whole tensors."""
    changes, _ = OWN["mixture, biases"]
    lora = dict(lora_rank=2, lora_on="mlp/experts", lora_base="int8")
    own_run(tmp_path / "run", own_settings(corpus, tied=False, **changes, **lora))
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    for run in ("run", "merged"):
        assert main(["to-hf", str(tmp_path / run), str(tmp_path / f"of_{run}"), "--dtype=float32"]) == 0
    here, there = (read_folder(tmp_path / f"of_{run}") for run in ("run", "merged"))
    assert here.keys() == there.keys() and "model.layers.0.mlp.experts.down_proj_bias" in here
    for name in here:
        np.testing.assert_allclose(here[name], there[name], rtol=1e-6, atol=1e-6)
    capsys.readouterr()
    assert main(["to-peft", str(tmp_path / "run"), str(tmp_path / "peft")]) == 2
    said = capsys.readouterr().err
    assert "no adapters of single experts for mlp.experts.down_proj" in said and len(said.splitlines()) == 1


def test_adapters_go_to_peft_and_back_bitwise(whole_run, tuned, tmp_path, capsys):
    assert main(["to-peft", str(tuned), str(tmp_path / "peft")]) == 0
    path = tmp_path / "peft" / "adapter_config.json"
    about = json.loads(path.read_text())
    assert (
        about["target_modules"] == ["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        and about["r"] == 4
    )
    back = ["from-peft", str(tmp_path / "peft"), str(whole_run), "--workdir"]
    assert main([*back, str(tmp_path / "back")]) == 0
    there, here = params_of(tuned), params_of(tmp_path / "back")
    adapters = {name for name in there if "lora_" in name}
    assert adapters == {name for name in here if "lora_" in name}
    for name in adapters:
        np.testing.assert_array_equal(there[name], here[name])
    path.write_text(json.dumps(about | {"use_dora": True}))
    assert main([*back, str(tmp_path / "dora")]) == 2
    assert "has use_dora=True, which is not supported" in capsys.readouterr().err


def test_an_adapter_that_peft_cannot_have_is_refused_by_name_and_merges(corpus, tmp_path, capsys):
    changes = dict(attention="mla", lora_rank=4, lora_on="attention/up_k attention/out")
    own_run(tmp_path / "run", own_settings(corpus, **changes))
    assert main(["to-peft", str(tmp_path / "run"), str(tmp_path / "peft")]) == 2
    message = "one adapter for self_attn.kv_b_proj.weight, of which .*up_k.kernel is a part"
    assert re.search(message, capsys.readouterr().err)
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0


def test_an_adapter_of_all_gates_and_ups_is_refused_with_the_reason(whole_run, tmp_path, capsys):
    about = dict(peft_type="LORA", r=4, lora_alpha=8, target_parameters=["mlp.experts.gate_up_proj"])
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(about))
    write_tensors(tmp_path / "peft" / "adapter_model.safetensors", {}, None)
    assert main(["from-peft", str(tmp_path / "peft"), str(whole_run), "--workdir", str(tmp_path / "back")]) == 2
    assert "only 'mlp.experts.down_proj' is read: PEFT has one adapter of an expert's gate" in capsys.readouterr().err


def test_adapters_are_not_left_out_silently(corpus, tuned, tmp_path):
    with pytest.raises(CheckpointError, match="has adapters: .*model.lora_rank=4 there, 0 here.*convert merge"):
        train(tiny_config(corpus, **SHORT, **{"train.init_from": str(tuned)}), tmp_path / "run")
