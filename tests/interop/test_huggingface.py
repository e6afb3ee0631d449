"""Folders of Hugging Face's models go into a run and out of it bit for bit, and what is not computed is refused."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from support.checkpoint_examples import flip
from support.exportable_runs import OWN, own_run, own_settings
from support.hf_folders import (
    CONFIGS,
    KINDS,
    MIXTURE_KEYS,
    MIXTURES,
    config_of,
    fused,
    random_tensors,
    read_folder,
    shapes_of,
    without,
    write_folder,
)
from support.published_configs import GEMMA3, GEMMA3_12B
from support.run_examples import first_state, tiny_config
from test_convert import params_of

import parallax as px
from parallax.checkpoint.arrays import flatten
from parallax.checkpoint.steps import complete_steps
from parallax.cli.command import load_config
from parallax.cli.convert import main, parse, settings_of_import
from parallax.cli.generate import main as generate
from parallax.config.settings import default_settings, load_settings, read_settings
from parallax.data.chat import ChatTemplate
from parallax.data.tokenizer import Bytes, train_bpe
from parallax.errors import CheckpointError, ConfigError
from parallax.interop.export import RECORD, SavedStep, make_run
from parallax.interop.hf_config import read_config, write_config
from parallax.interop.huggingface import read_record
from parallax.model.rope import Rope

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
YARN |= {"original_max_position_embeddings": 64}


def imported(tmp_path, config, tensors, **how):
    folder = write_folder(tmp_path / "theirs", config, tensors, **how)
    return folder, main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")])


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_a_model_with_nan_is_not_imported(kind, tmp_path, capsys):
    config = config_of("LlamaForCausalLM")
    tensors = random_tensors(shapes_of(config), kind)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 4:6] = [np.nan, np.inf]
    _, status = imported(tmp_path, config, tensors)
    assert status == 3 and " has values that are not finite, first nan" in capsys.readouterr().err
    assert not list(tmp_path.glob("run*"))


def same_bytes(there, here):
    assert {name: x.tobytes() for name, x in there.items()} == {name: x.tobytes() for name, x in here.items()}
    assert {name: x.dtype for name, x in there.items()} == {name: x.dtype for name, x in here.items()}


FROM = [(architecture, "F32") for architecture in CONFIGS]
FROM += [("MistralForCausalLM", "BF16"), ("DeepseekV3ForCausalLM", "BF16"), ("Qwen3ForCausalLM", "F16")]


@pytest.mark.fast(4)
@pytest.mark.parametrize(("architecture", "kind"), FROM)
def test_an_import_that_nothing_touched_goes_out_as_it_came(tmp_path, capsys, architecture, kind):
    config = config_of(architecture)
    tensors = random_tensors(shapes_of(config), kind)
    folder, status = imported(tmp_path, config, tensors, shards=3)
    assert status == 0 and f"the {architecture} in {folder} is step 0 of" in capsys.readouterr().out
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--shard-mbytes=1"]) == 0
    same_bytes(tensors, read_folder(tmp_path / "out"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((folder / name).read_text())


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_that_nothing_touched_goes_out_as_it_came(tmp_path, name, kind):
    architecture, changes = MIXTURES[name]
    config = config_of(architecture, **changes)
    tensors = random_tensors(shapes_of(config), kind)
    bias = "gate.e_score_correction_bias"
    tensors |= {name: x.astype(np.float32) for name, x in tensors.items() if name.endswith(bias)}
    folder, status = imported(tmp_path, config, tensors, shards=3)
    assert status == 0 and main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    same_bytes(tensors, read_folder(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    # Through our own names, too, layer by layer.
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "plain")]) == 0
    assert main(["import", str(tmp_path / "plain"), str(tmp_path / "back")]) == 0
    same_bytes(params_of(tmp_path / "run", 0), params_of(tmp_path / "back", 0))


@pytest.mark.fast(1)
@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_reads_pictures_the_language_model_comes_in_and_goes_out_alone(tmp_path, capsys, start):
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    text = (
        GEMMA3 | sizes | dict(num_key_value_heads=2, vocab_size=260, tie_word_embeddings=True, sliding_window_pattern=2)
    )
    tensors = random_tensors(shapes_of(text))
    whole = {start + name.removeprefix("model."): x for name, x in tensors.items()}
    whole[f"{start.partition('language_model.')[0]}vision_tower.embeddings.weight"] = np.ones(3, np.float32)
    text = without(text, "architectures")
    config = without(GEMMA3_12B, "text_config") | {"text_config": text}
    assert imported(tmp_path, config, whole)[1] == 0
    said = "of a gemma3 its language model alone, a Gemma3ForCausalLM: what reads pictures is left out"
    assert said in capsys.readouterr().out
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    same_bytes(tensors, read_folder(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Gemma3ForCausalLM"] and "vision_config" not in written


def test_experts_are_stacked_in_the_layers_that_have_them(tmp_path):
    architecture, changes = MIXTURES["DeepSeek-V3"]
    config = config_of(architecture, **changes)
    tensors = random_tensors(shapes_of(config))
    imported(tmp_path, config, tensors)
    ours = params_of(tmp_path / "run", 0)
    assert load_settings(tmp_path / "run").model.layer_kinds == ("dense", "moe", "moe")
    norm = "post_attention_layernorm.weight"
    assert (ours["blocks.dense.mlp_norm.scale"][0] == tensors[f"model.layers.0.{norm}"]).all()
    assert (ours["blocks.dense.mlp.up.kernel"][0] == tensors["model.layers.0.mlp.up_proj.weight"].T).all()
    for at in range(2):
        theirs = {name.removeprefix(f"model.layers.{at + 1}."): x for name, x in tensors.items()}
        mine = {name.removeprefix("blocks.moe."): x[at] for name, x in ours.items() if name.startswith("blocks.moe.")}
        assert (mine["mlp_norm.scale"] == theirs[norm]).all()
        assert (mine["mlp.router.kernel"] == theirs["mlp.gate.weight"].T).all()
        assert (mine["mlp.router.bias"] == theirs["mlp.gate.e_score_correction_bias"]).all()
        for name in ("gate", "up", "down"):
            shared = theirs[f"mlp.shared_experts.{name}_proj.weight"]
            assert (mine[f"mlp.shared.{name}.kernel"] == shared.T).all()
            for expert in range(8):
                one = theirs[f"mlp.experts.{expert}.{name}_proj.weight"]
                assert (mine[f"mlp.experts.{name}"][expert] == one.T).all()


def test_mixtrals_first_and_third_kernel_are_gate_and_up(tmp_path):
    config = config_of("MixtralForCausalLM")
    tensors = random_tensors(shapes_of(config))
    imported(tmp_path, config, tensors)
    ours = params_of(tmp_path / "run", 0)
    for name, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        for layer, expert in np.ndindex(2, 4):
            there = tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{theirs}.weight"]
            assert (ours[f"blocks.mlp.experts.{name}"][layer, expert] == there.T).all()
    assert not ours["blocks.mlp.router.bias"].any()


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_a_layer_in_one_tensor_come_in_as_the_same_one_by_one(tmp_path, name):
    architecture, changes = MIXTURES[name]
    config = config_of(architecture, **changes)
    tensors = random_tensors(shapes_of(config), "BF16")
    together = fused(tensors)
    assert {x.ndim for x in together.values()} == {1, 2, 3} and len(together) < len(tensors)
    for which, stored in {"one": tensors, "other": together}.items():
        assert imported(tmp_path / which, config, stored, shards=3)[1] == 0
    same_bytes(*(params_of(tmp_path / which / "run", 0) for which in ("one", "other")))
    # And go out one by one.
    assert main(["to-hf", str(tmp_path / "other" / "run"), str(tmp_path / "out")]) == 0
    same_bytes(tensors, read_folder(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


GATES_AND_UPS, DOWNS = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
ONE = "model.layers.1.mlp.experts.0.up_proj.weight"
# What is stored in place of the tensors, of 8 experts with d_model 16 and d_expert 8, and what is said.
WRONGLY_FUSED = {
    "other way round": (
        lambda x: {GATES_AND_UPS: x[GATES_AND_UPS].swapaxes(1, 2), DOWNS: x[DOWNS].swapaxes(1, 2)},
        f"{DOWNS} is [8, 8, 16] there and [8, 16, 8] here",
    ),
    "fewer experts": (
        lambda x: {GATES_AND_UPS: x[GATES_AND_UPS][:6]},
        f"{GATES_AND_UPS} is [6, 16, 16] there and [8, 16, 16] here",
    ),
    "flat": (lambda x: {DOWNS: x[DOWNS].reshape(128, 8)}, f"{DOWNS} is [128, 8] there and [8, 16, 8] here"),
    "one expert twice": (lambda x: {ONE: x[GATES_AND_UPS][0, 8:]}, f"{ONE} is unexpected"),
    "half of it": (lambda x: {DOWNS: None}, f"{DOWNS} is missing"),
    "float8": (
        lambda x: {GATES_AND_UPS: x[GATES_AND_UPS].astype(KINDS["F8_E4M3"])},
        f"{GATES_AND_UPS} is float8_e4m3fn, not one of float32, bfloat16, float16",
    ),
}


@pytest.mark.parametrize("how", WRONGLY_FUSED)
def test_experts_in_one_tensor_that_are_not_as_transformers_has_them_are_refused(tmp_path, capsys, how):
    change, message = WRONGLY_FUSED[how]
    config = config_of("Qwen3MoeForCausalLM")
    tensors = fused(random_tensors(shapes_of(config)))
    stored = {name: x for name, x in (tensors | change(tensors)).items() if x is not None}
    assert imported(tmp_path, config, stored)[1] == 3
    said = capsys.readouterr().err
    assert f"does not have the parameters of its config.json: {message}\n" in said and len(said.splitlines()) == 1


def test_a_dense_model_has_no_use_for_experts(tmp_path, capsys):
    config = config_of("Qwen3ForCausalLM")
    assert imported(tmp_path, config, random_tensors(shapes_of(config) | {DOWNS: (8, 16, 8)}))[1] == 3
    assert f"config.json: {DOWNS} is unexpected\n" in capsys.readouterr().err


LAYERS_OF = {
    "Mixtral": "moe*2",
    "Qwen3-MoE": "moe*2",
    "Qwen3-MoE, every other layer": "dense moe dense*3",
    "DeepSeek-V2": "dense moe",
    "DeepSeek-V2, groups": "moe*3",
    "DeepSeek-V3": "dense moe*2",
}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_a_mixture_computes_is_in_the_config(name):
    architecture, changes = MIXTURES[name]
    found = described(architecture, **changes)
    assert found["layers_of"] == LAYERS_OF[name]
    assert [found[key] for key in MIXTURE_KEYS] == {
        "Mixtral": [4, 2, 24, 0, "softmax", True, 1.0, 1, 1],
        "Qwen3-MoE": [8, 3, 8, 0, "softmax", True, 1.0, 1, 1],
        "Qwen3-MoE, every other layer": [8, 3, 8, 0, "softmax", False, 1.0, 1, 1],
        "DeepSeek-V2": [8, 2, 8, 2, "softmax", False, 16.0, 1, 1],
        "DeepSeek-V2, groups": [8, 2, 8, 2, "softmax", False, 1.0, 4, 2],
        "DeepSeek-V3": [8, 2, 8, 1, "sigmoid", True, 2.5, 4, 2],
    }[name]


def test_an_experts_number_has_either_of_its_names():
    there = described("Qwen3MoeForCausalLM")
    other = without(config_of("Qwen3MoeForCausalLM", num_local_experts=8), "num_experts")
    assert read_config(other).model == there == described("Qwen3MoeForCausalLM", num_local_experts=8)
    with pytest.raises(ConfigError, match="num_local_experts=4 is not supported; supported: null or 8"):
        described("Qwen3MoeForCausalLM", num_local_experts=4)


def test_tensors_of_several_dtypes_each_keep_their_own(tmp_path):
    config = config_of("LlamaForCausalLM", tie_word_embeddings=True)
    shapes = shapes_of(config)
    norms = {name: shape for name, shape in shapes.items() if len(shape) == 1}
    tensors = random_tensors(shapes, "BF16") | random_tensors(norms, "F32")
    imported(tmp_path, config, tensors)
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    same_bytes(tensors, read_folder(tmp_path / "out"))


def test_a_kernel_is_the_transpose_with_heads_as_dims_of_their_own(tmp_path):
    config = config_of("Qwen3ForCausalLM")
    tensors = random_tensors(shapes_of(config))
    imported(tmp_path, config, tensors)
    ours = params_of(tmp_path / "run", 0)
    for layer in range(2):
        theirs = {name.split(f"layers.{layer}.")[-1]: x for name, x in tensors.items()}
        q, out = ours["blocks.attention.q.kernel"][layer], ours["blocks.attention.out.kernel"][layer]
        for d, h, k in np.ndindex(16, 4, 8):
            assert q[d, h, k] == theirs["self_attn.q_proj.weight"][8 * h + k, d]
            assert out[h, k, d] == theirs["self_attn.o_proj.weight"][d, 8 * h + k]
        assert (ours["blocks.mlp.down.kernel"][layer] == theirs["mlp.down_proj.weight"].T).all()
        assert (ours["blocks.attention.k_norm.scale"][layer] == theirs["self_attn.k_norm.weight"]).all()
        assert (ours["blocks.mlp_norm.scale"][layer] == theirs["post_attention_layernorm.weight"]).all()
    for name, theirs in {"head.table": "lm_head.weight", "embedding.table": "model.embed_tokens.weight"}.items():
        assert ours[name].shape == (384, 16) and not ours[name][260:].any()
        assert (ours[name][:260] == tensors[theirs]).all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotated_pairs_that_are_neighbours_there_are_halves_here(tmp_path, interleaved):
    config = config_of("DeepseekV3ForCausalLM", rope_interleave=interleaved)
    tensors = random_tensors(shapes_of(config))
    imported(tmp_path, config, tensors)
    ours = {name: x[1] for name, x in params_of(tmp_path / "run", 0).items() if name.startswith("blocks.")}
    theirs = {name.split("layers.1.self_attn.")[-1]: x for name, x in tensors.items()}
    place = [0, 2, 1, 3] if interleaved else [0, 1, 2, 3]  # of 4 rotated entries: pairs (0, 1) and (2, 3) there
    for at, there in enumerate(place):
        assert (ours["blocks.attention.k_rope.kernel"][:, at] == theirs["kv_a_proj_with_mqa.weight"][16 + there]).all()
        queries = theirs["q_b_proj.weight"].reshape(4, 10, 8)
        assert (ours["blocks.attention.queries_3.kernel"][:, :, 6 + at] == queries[:, 6 + there].T).all()
    up = theirs["kv_b_proj.weight"].reshape(4, 12, 16)  # heads, keys then values, latent
    assert (ours["blocks.attention.up_k.kernel"] == up[:, :6].transpose(2, 0, 1)).all()
    assert (ours["blocks.attention.up_v.kernel"] == up[:, 6:].transpose(2, 0, 1)).all()


def test_the_config_becomes_keys_of_the_model_and_the_rest_stays_as_configured(tmp_path):
    config = config_of("LlamaForCausalLM", rope_scaling=LLAMA3, rms_norm_eps=1e-5, max_position_embeddings=512)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    flags = ["--config.mesh.tp=2", "--config.model.dtype=bfloat16", "--config.optimizer.learning_rate=1e-5"]
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run"), *flags]) == 0
    settings = load_settings(tmp_path / "run")
    model = settings.model
    assert (model.vocab, model.layers, model.d_model, model.d_ff) == (260, 2, 16, 24)
    assert (model.heads, model.kv_heads, model.d_head, model.norm_eps, model.tied) == (4, 2, 4, 1e-5, False)
    assert (model.rope_scaling, model.rope_factor, model.rope_original_seq) == ("llama3", 8.0, 64)
    assert (model.rope_fast_turns, model.rope_slow_turns) == (4.0, 1.0)
    assert (settings.mesh.tp, model.dtype, settings.optimizer.learning_rate) == (2, "bfloat16", 1e-5)
    assert settings.data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    assert complete_steps(tmp_path / "run" / "checkpoints") == {0}


COMPUTES_IN = {
    "bfloat16": ("BF16", [], "bfloat16"),
    "float32": ("F32", [], "float32"),
    "float16, which no run computes in": ("F16", [], "float32"),
    "bfloat16, but a flag says otherwise": ("BF16", ["--config.model.dtype=float32"], "float32"),
    "float32, but a config says otherwise": ("F32", ["--config=own.json"], "bfloat16"),
}


@pytest.mark.parametrize("what", COMPUTES_IN)
def test_a_run_computes_in_the_dtype_of_the_file_and_both_are_said(tmp_path, monkeypatch, capsys, what):
    stored, flags, dtype = COMPUTES_IN[what]
    monkeypatch.chdir(tmp_path)
    own = read_settings(default_settings(), model={"dtype": "bfloat16"}).to_dict()
    (tmp_path / "own.json").write_text(json.dumps(own))
    config = config_of("LlamaForCausalLM", max_position_embeddings=8192)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config), stored))
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run"), *flags]) == 0
    settings, said = load_settings(tmp_path / "run"), capsys.readouterr().out
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    assert settings.model.dtype == dtype and settings.optimizer.weights_dtype == "float32"
    assert f"the weights are {names[stored]}; a run computes in {dtype} (model.dtype), with float32 parameters" in said
    data = settings.data
    assert (
        f"it trains on {data.global_batch} windows of {data.seq} tokens in a step (data.global_batch, data.seq)" in said
    )


def described(architecture, **changes):
    return read_config(config_of(architecture, **changes)).model


def test_both_ways_of_writing_a_rotary_embedding_say_the_same():
    old = described("LlamaForCausalLM", rope_scaling=LLAMA3, rope_theta=500000.0)
    new = without(config_of("LlamaForCausalLM", rope_parameters=LLAMA3 | {"rope_theta": 500000.0}), "rope_theta")
    assert read_config(new).model == old and old["rope_theta"] == 500000.0


def test_yarn_sharpens_all_of_a_head_or_what_is_rotated():
    grown = 0.1 * np.log(40) + 1
    gqa = described("Qwen2ForCausalLM", rope_scaling={"rope_type": "yarn", "factor": 40.0})
    assert gqa["rope_temperature"] == pytest.approx(grown**2) and gqa["rope_magnitude"] == 1
    v3 = described("DeepseekV3ForCausalLM", rope_scaling=YARN)
    assert v3["rope_magnitude"] == 1
    assert v3["rope_temperature"] == pytest.approx((0.0707 * np.log(40) + 1) ** 2)
    part = described("DeepseekV3ForCausalLM", rope_scaling=without(YARN, "mscale", "mscale_all_dim"))
    assert part["rope_magnitude"] == pytest.approx(grown) and part["rope_temperature"] == 1


# ---- what a run can do with it


def write_bpe(folder):
    """A tokenizer.json of the `tokenizers` library."""
    train_bpe(["It is a truth that a small text is enough."] * 4, vocab=270).save(folder)


def test_an_imported_model_knows_the_tokens_of_its_template(tmp_path, capsys):
    """Also with an added token beyond its table, as Llama-2 with a <pad> has one."""
    config = config_of("LlamaForCausalLM", vocab_size=272)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    write_bpe(folder)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|user|>", "<|end|>", "<pad>"])
    assert inner.get_vocab_size() == 273
    (folder / "tokenizer.json").write_text(inner.to_str())
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    assert load_settings(tmp_path / "run").sample.special_tokens == "tokens"
    run = px.load(tmp_path / "run")
    prompt = "<|user|>It is<|end|>"
    assert run.batch_of(prompt)["tokens"].tolist() == [inner.encode(prompt).ids[:-1]]
    assert run.generate(prompt, tokens=1, temperature=0.0).startswith(prompt)
    capsys.readouterr()
    how = ["--workdir", str(tmp_path / "run"), "--prompt", prompt, "--tokens=1", "--temperature=0"]
    assert generate([*how, "--special-tokens=text"]) == 0
    assert "note: the prompt spells 2 special tokens of the tokenizer as text" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="token id 272; the model knows 0 to 271"):
        run.generate("<pad>", tokens=1)
    flags = ["--config.sample.special_tokens=text"]
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "other"), *flags]) == 0
    assert load_settings(tmp_path / "other").sample.special_tokens == "text"


@pytest.mark.slow
def test_an_imported_run_writes_text_with_its_own_tokenizer_on_a_mesh(tmp_path, capsys):
    config = config_of("Qwen3ForCausalLM", vocab_size=272)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    write_bpe(folder)
    mesh = ["--config.mesh.tp=2", "--config.mesh.dp=1"]
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run"), *mesh]) == 0
    capsys.readouterr()
    flags = ["--workdir", str(tmp_path / "run"), "--prompt", "It is", "--tokens=4", "--temperature=0"]
    texts = []
    for more in ([], ["--tp=1"]):
        assert generate([*flags, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("It is")


def test_a_run_starts_from_an_import_with_its_tokenizer(corpus, tmp_path):
    config = config_of("DeepseekV2ForCausalLM", vocab_size=272)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    write_bpe(folder)
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    tuned = load_config(str(tmp_path / "run" / "config.json"))[0]
    tuned.data = tiny_config(corpus).data
    tuned.update({"data": {"tokenizer": str(tmp_path / "run" / "tokenizer.json"), "cache": str(tmp_path / "cache")}})
    tuned.update({"train": {"init_from": str(tmp_path / "run"), "steps": 4}, "optimizer": {"warmup_steps": 1}})
    tuned.model.dtype = "bfloat16"
    state, start = first_state(tuned, tmp_path / "on")
    log = (tmp_path / "on" / "log.txt").read_text()
    assert f"train.init_from='{tmp_path}/run' computed in float32, this run computes in bfloat16 (model.dtype)" in log
    assert f"{tuned.data.global_batch} x {tuned.data.seq} = " in log
    there = params_of(tmp_path / "run", 0)
    same_bytes({name: np.asarray(x) for name, x in flatten(state.params).items()}, there)
    assert start == 0


# ---- what is refused

LLAMA, QWEN3, V3 = "LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM"
MIXTRAL, QWEN3_MOE, V2 = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"
SOME = {"first_k_dense_replace": 1}
REFUSED = {
    "an architecture": (LLAMA, {"architectures": ["MptForCausalLM"]}, r"\['MptForCausalLM'\] is not supported"),
    "two architectures": (LLAMA, {"architectures": [LLAMA, QWEN3]}, "architectures=.* is not supported"),
    "a model type": (LLAMA, {"model_type": "phi"}, "model_type='phi' is not supported; supported: 'llama'"),
    "an activation": (LLAMA, {"hidden_act": "tanh"}, "hidden_act='tanh' is not supported; supported: 'silu' or"),
    "a clamped MLP": (LLAMA, {"hidden_act": "clamped"}, "hidden_act='clamped' is not supported; supported: 'silu'"),
    "a limit": (LLAMA, {"swiglu_limit": 7.0}, "swiglu_limit=7.0 is not supported because its meaning is"),
    "an activation of experts": (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act='gelu' .* supported: 'silu' or 'swish'"),
    "biases of latents": (V3, {"attention_bias": True}, "attention_bias=True .* projections to latents have biases"),
    "no window": ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window=0 is not supported; .* of 1 or more"),
    "some layers": (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*is not supported"),
    "quantization": (
        LLAMA,
        {"quantization_config": {"bits": 4}},
        "quant_method=None is not supported; supported: 'fp8' in blocks, or weights in float32, bfloat16",
    ),
    "dynamic": (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supported"),
    "longrope": (
        LLAMA,
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}, "original_max_position_embeddings": 64},
        "rope_scaling has no long_factor",
    ),
    "a factor": (
        LLAMA,
        {"rope_scaling": LINEAR | {"factor": 0.5}},
        "factor=0.5 is not supported; supported: 1 or more",
    ),
    "no factor": (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
    "a field of rope": (LLAMA, {"rope_scaling": LINEAR | {"bent": 1}}, "rope_scaling: bent=1 is not supported"),
    "truncated by a number": (LLAMA, {"rope_scaling": YARN | {"truncate": 0}}, "truncate=0 is not supported"),
    "another slope": (
        "GptOssForCausalLM",
        {"swiglu_alpha": 1.0},
        "swiglu_alpha=1.0 is not supported; supported: 1.702",
    ),
    "two ropes": (LLAMA, {"rope_scaling": LINEAR, "rope_parameters": LINEAR}, "has rope_parameters and rope_scaling"),
    "a part of a head": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    "some layers of experts": (V3, {**SOME, "moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; supported: 1"),
    "V2's normalised weights": (V2, {**SOME, "norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
    "V2 with sigmoids": (V2, {**SOME, "scoring_func": "sigmoid"}, "scoring_func='sigmoid' .* supported: 'softmax'"),
    "V3 with softmax": (V3, {**SOME, "scoring_func": "softmax"}, "scoring_func='softmax' .* supported: 'sigmoid'"),
    "another choice": (V2, {**SOME, "topk_method": "noaux_tc"}, "'noaux_tc' .* 'greedy' or 'group_limited_greedy'"),
    "another choice of V3": (V3, {**SOME, "topk_method": "greedy"}, "'greedy' is not supported; .* 'noaux_tc'"),
    "no groups": (V2, {**SOME, "topk_method": "group_limited_greedy"}, "config.json has no n_group"),
    "odd groups of experts": (V3, {**SOME, "n_group": 3, "topk_group": 1}, "model.experts=8 does not divide over"),
    "too few groups": (V3, {**SOME, "n_group": 8, "topk_group": 1}, "experts_per_token=2 is more than the 1 experts"),
    "no experts of a token": (V2, {**SOME, "num_experts_per_tok": None}, "config.json has no num_experts_per_tok"),
    "noise": (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported; supported: 0"),
    "layers by text": (QWEN3_MOE, {"mlp_only_layers": ["0"]}, "mlp_only_layers=.* supported: a list of layers"),
    "absurd layers of experts": (MIXTRAL, {"num_hidden_layers": 10**9}, "model.layers=1000000000 is too large"),
    "other value heads": (V3, {"v_head_dim": 8}, "v_head_dim=8 is not supported; supported: 6"),
    "grouped latents": (V3, {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported; supported: 4"),
    "another epsilon": (V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported; supported: 1e-06"),
    "an unknown field": (LLAMA, {"residual_multiplier": 2.0}, "residual_multiplier=2.0 is not supported because its"),
    "a misspelt field": (LLAMA, {"rope_thetta": 1e6}, "rope_thetta=1000000.0 is not supported.*mean 'rope_theta'"),
    "no size": (LLAMA, {"hidden_size": None}, "config.json has no hidden_size"),
    "a size of text": (LLAMA, {"hidden_size": "16"}, "hidden_size='16' is not supported; supported: a whole number"),
    "a flag of text": (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' is not supported"),
    "rotation by picture": ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope=True is not supported"),
    "absurd layers": (LLAMA, {"num_hidden_layers": 10**9}, "model.layers=1000000000 is too large"),
    "no name": (LLAMA, {"architectures": [{}]}, r"architectures=\[{}\] is not supported"),
    "an absurd theta": (LLAMA, {"rope_theta": 10**400}, "rope_theta=1000.* supported: a number from 0 to"),
    "an absurd context": (LLAMA, {"max_position_embeddings": 10**400}, "a whole number of 1 .* at most 2147483647"),
    "an absurd strength": (
        LLAMA,
        {"rope_scaling": LINEAR | {"rope_type": "yarn", "attention_factor": 1e200}},
        "attention_factor=1e.200 is not supported; supported: a number from 0 to 1e.30",
    ),
    "odd groups": (LLAMA, {"num_key_value_heads": 3}, "model.heads=4 does not divide over model.kv_heads=3"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, capsys, what):
    architecture, changes, message = REFUSED[what]
    folder = write_folder(tmp_path / "theirs", config_of(architecture, **changes), {})
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ") and error.count("\n") == 1
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(error)
    assert not list(tmp_path.glob("run*"))


def test_a_window_that_is_not_written_is_the_one_that_it_stands_for():
    assert described("MistralForCausalLM")["sliding_window"] == 0
    assert read_config(without(config_of("MistralForCausalLM"), "sliding_window")).model["sliding_window"] == 4096


def test_tables_of_angles_and_a_tied_head_that_is_there_twice_are_passed_over(tmp_path):
    config = config_of("LlamaForCausalLM", tie_word_embeddings=True)
    tensors = random_tensors(shapes_of(config))
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    more["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert imported(tmp_path, config, tensors | more)[1] == 0
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    same_bytes(tensors, read_folder(tmp_path / "out"))


WRONG_TENSORS = {
    "missing": ({"model.norm.weight": None}, "model.norm.weight is missing"),
    "more": ({"model.layers.2.mlp.up_proj.weight": (24, 16)}, "model.layers.2.mlp.up_proj.weight is unexpected"),
    "a shape": ({"lm_head.weight": (256, 16)}, r"lm_head.weight is \[256, 16\] there and \[260, 16\] here"),
    "a bias": ({"model.layers.0.self_attn.q_proj.bias": (16,)}, "q_proj.bias is unexpected"),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_tensors_that_are_not_those_of_the_config_are_named(tmp_path, capsys, what):
    changes, message = WRONG_TENSORS[what]
    config = config_of("LlamaForCausalLM")
    shapes = {name: shape for name, shape in (shapes_of(config) | changes).items() if shape}
    assert imported(tmp_path, config, random_tensors(shapes))[1] == 3
    with pytest.raises(ValueError, match=f"does not have the parameters of its config.json: .*{message}"):
        raise ValueError(capsys.readouterr().err)
    assert not list(tmp_path.glob("run*"))


def test_a_folder_without_a_config_or_with_one_that_is_no_json_is_refused(tmp_path, capsys):
    flags = ["from-hf", str(tmp_path), "--workdir", str(tmp_path / "run")]
    assert main(flags) == 3 and f"{tmp_path} has no config.json; name a folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(flags) == 3 and "config.json cannot be read" in capsys.readouterr().err


def test_a_text_that_is_none_is_refused(tmp_path, capsys):
    config = config_of("LlamaForCausalLM")
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    (folder / "tokenizer_config.json").write_bytes(b"\xff\xfe")
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 3
    assert "tokenizer_config.json cannot be read: " in capsys.readouterr().err and not list(tmp_path.glob("run*"))


def test_a_folder_without_its_tokenizer_or_with_one_that_is_too_large_is_refused(tmp_path, capsys):
    config = config_of("LlamaForCausalLM", vocab_size=256)
    folder, status = imported(tmp_path, config, random_tensors(shapes_of(config)))
    said = "has 257 entries besides added tokens, but vocab_size=256; it belongs to another model: use the"
    assert status == 5 and said in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 5
    assert "tokenizer" in capsys.readouterr().err and not list(tmp_path.glob("run*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.model.d_ff=8"], "--config.model.d_ff is determined by the folder's config.json; of the model set"),
        (["--config.model.d_fff=8"], "unknown key --config.model.d_fff; did you mean 'd_ff'"),
        (["--mesh=2"], "unknown flag --mesh"),
        (["--config=nowhere.py"], "--config=nowhere.py does not exist"),
    ],
)
def test_settings_that_the_folder_has_or_nobody_knows_are_refused(tmp_path, flags, message):
    with pytest.raises(ConfigError) as error:
        settings_of_import(parse(["from-hf", "theirs", "--workdir", "run", *flags]).settings, tmp_path)
    assert message in str(error.value)


# ---- runs that were not imported, or trained on


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", OWN)
def test_a_run_of_our_own_goes_out_as_the_plainest_architecture_and_comes_back(corpus, tmp_path, capsys, kind):
    changes, architecture = OWN[kind]
    settings = own_settings(corpus, **changes)
    made = own_run(tmp_path / "mine", settings)
    assert main(["to-hf", str(tmp_path / "mine"), str(tmp_path / "out")]) == 0
    assert f"{tmp_path / 'out'}: {architecture}, float32" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: x.shape for name, x in read_folder(tmp_path / "out").items()} == shapes_of(config)
    assert main(["from-hf", str(tmp_path / "out"), "--workdir", str(tmp_path / "back")]) == 0
    same_bytes(made, params_of(tmp_path / "back", 0))
    there, here = Rope(settings.model), Rope(load_settings(tmp_path / "back").model)
    np.testing.assert_array_equal(there.frequencies(), here.frequencies())
    np.testing.assert_allclose(
        (there.temperature(), there.model.rope_magnitude), (here.temperature(), here.model.rope_magnitude), rtol=1e-12
    )


MOE = dict(attention="gqa", layers_of="moe*2")
NOWHERE = {
    "biases and a cap": (
        dict(attention="gqa", qkv_bias=True, score_cap=30.0),
        "Qwen2ForCausalLM has model.score_cap=0.0; Qwen3ForCausalLM has model.score_cap=0.0, model.qk_norm=True, ",
    ),
    "latents with biases": (dict(attention="mla", qkv_bias=True), "V3ForCausalLM has model.qkv_bias=False; "),
    "a window of latents": (dict(attention="mla", sliding_window=64), "V3ForCausalLM has no window; "),
    "clamped experts": (
        dict(MOE, expert_activation="clamped"),
        "LlamaForCausalLM has model.expert_activation='swiglu', no experts; ",
    ),
    "a clamped MLP": (dict(attention="gqa", activation="clamped"), "LlamaForCausalLM has model.activation='silu'; "),
    "a clamped MLP and its limit": (
        dict(attention="gqa", activation="clamped", activation_limit=5.0),
        "LlamaForCausalLM has model.activation_limit=7.0, model.activation='silu'; ",
    ),
    "clamped shared experts": (
        dict(MOE, attention="mla", shared_experts=1, activation="clamped", router_normalized=False),
        "DeepseekV2ForCausalLM has model.activation='silu'; ",
    ),
    "shared experts of grouped heads": (
        dict(MOE, shared_experts=1),
        "MixtralForCausalLM has model.shared_experts=0; Qwen3MoeForCausalLM has model.qk_norm=True, ",
    ),
    "weights that are not normalised": (
        dict(MOE, router_normalized=False),
        "MixtralForCausalLM has model.router_normalized=True; ",
    ),
    "some layers without norms": (
        dict(MOE, layers_of="dense moe"),
        "MixtralForCausalLM has experts in every layer; Qwen3MoeForCausalLM has model.qk_norm=True",
    ),
    "experts first": (
        dict(MOE, attention="mla", layers_of="moe dense", router_score="sigmoid"),
        "DeepseekV3ForCausalLM has experts from a layer on; ",
    ),
    "normalised softmax of latents": (
        dict(MOE, attention="mla"),
        "DeepseekV2ForCausalLM has model.router_normalized=False; ",
    ),
    "a temperature": (dict(attention="gqa", rope_temperature=1.5), "rope_temperature=1.5 .* no place"),
    "a blunt one": (
        dict(attention="mla", rope_scaling="yarn", rope_factor=4.0, rope_temperature=0.5),
        "rope_temperature=0.5 with rope_factor=4 has no place",
    ),
}


@pytest.mark.parametrize("what", NOWHERE)
def test_a_model_that_no_architecture_computes_is_not_written(corpus, what):
    changes, message = NOWHERE[what]
    with pytest.raises(ConfigError, match=message):
        write_config(own_settings(corpus, **changes).model, 32)


def test_a_routers_bias_that_an_architecture_has_not_must_be_zero(corpus, tmp_path, capsys):
    settings = own_settings(corpus, **OWN["mixture"][0])
    made = own_run(tmp_path / "zeros", settings)
    made["blocks.mlp.router.bias"][1, 2] = -0.25
    carried = {name: (tmp_path / "zeros" / name).read_text() for name in ("config.json", "tokenizer.json")}
    parts = lambda _, here: [(here.index, [made[here.name][here.index]])]  # noqa: E731
    make_run(tmp_path / "mine", settings, Bytes(), carried, parts)
    assert main(["to-hf", str(tmp_path / "mine"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "blocks.mlp.router.bias of layer 1 reaches 0.25, and a MixtralForCausalLM has no such bias" in error
    assert error.count("\n") == 1 and not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_a_mixture_trained_from_an_import_goes_out_like_it_however_its_layers_are_written(tmp_path):
    architecture, changes = MIXTURES["DeepSeek-V3"]
    config = config_of(architecture, **changes)
    imported(tmp_path, config, random_tensors(shapes_of(config), "BF16"))
    settings = load_settings(tmp_path / "run").to_dict()
    settings["model"]["layers_of"] = "dense*1 moe moe"
    own_run(tmp_path / "tuned", read_settings(settings))
    assert main(["to-hf", str(tmp_path / "tuned"), str(tmp_path / "out"), "--like", str(tmp_path / "run")]) == 0
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {**said, "max_position_embeddings": 64, "rope_scaling": 0} == {**config, "rope_scaling": 0}
    settings["model"]["layers_of"] = "moe*3"
    own_run(tmp_path / "other", read_settings(settings))
    assert main(["to-hf", str(tmp_path / "other"), str(tmp_path / "no"), "--like", str(tmp_path / "run")]) == 2


@pytest.fixture
def theirs(tmp_path):
    """A Mistral in bfloat16, its run, and a run that was trained from it."""
    config = config_of("MistralForCausalLM")
    tensors = random_tensors(shapes_of(config), "BF16")
    imported(tmp_path, config, tensors)
    settings = load_settings(tmp_path / "run")
    own_run(tmp_path / "tuned", settings)
    return tmp_path


def test_a_run_trained_from_an_import_goes_out_like_it(theirs, capsys):
    flags = [str(theirs / "tuned"), str(theirs / "out")]
    assert main(["to-hf", *flags, "--like", str(theirs / "run")]) == 0
    assert "MistralForCausalLM, bfloat16" in capsys.readouterr().out
    config = json.loads((theirs / "out" / "config.json").read_text())
    assert config == config_of("MistralForCausalLM", max_position_embeddings=256, rope_scaling=None)  # data.seq
    assert json.loads((theirs / "out" / "generation_config.json").read_text()) == {"eos_token_id": [2, 256]}
    shutil.rmtree(theirs / "out")
    assert main(["to-hf", *flags]) == 0
    assert "LlamaForCausalLM, float32" in capsys.readouterr().out


def test_a_dtype_that_is_asked_for_is_taken(theirs):
    assert main(["to-hf", str(theirs / "run"), str(theirs / "wide"), "--dtype=float32"]) == 0
    there, here = read_folder(theirs / "theirs"), read_folder(theirs / "wide")
    assert {x.dtype for x in here.values()} == {np.dtype(np.float32)}
    assert all((here[name] == x.astype(np.float32)).all() for name, x in there.items())
    assert json.loads((theirs / "wide" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_value_that_a_dtype_cannot_hold_is_not_written_as_infinite(tmp_path, capsys):
    config = config_of("LlamaForCausalLM")
    tensors = random_tensors(shapes_of(config))
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 2] = -70000
    imported(tmp_path, config, tensors)
    flags = [str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(["to-hf", *flags, "--dtype=float16"]) == 2
    message = "blocks.attention.q.kernel has values beyond float16's largest; write it with --dtype=bfloat16"
    assert message in capsys.readouterr().err and not list(tmp_path.glob("out*"))
    assert main(["to-hf", *flags, "--dtype=bfloat16"]) == 0


def test_a_longer_context_is_written_into_the_config_that_was_imported(theirs):
    settings = load_settings(theirs / "tuned").to_dict()
    settings["model"] |= dict(rope_scaling="linear", rope_factor=2.0)
    own_run(theirs / "longer", read_settings(settings))
    assert main(["to-hf", str(theirs / "longer"), str(theirs / "out"), "--like", str(theirs / "run")]) == 0
    config = json.loads((theirs / "out" / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config["max_position_embeddings"] == 256 and config["architectures"] == ["MistralForCausalLM"]


def test_a_run_goes_out_like_an_import_whose_config_has_no_context(tmp_path):
    """As Llama 1's: 2048 tokens, which it stands for, or the run's windows where they are longer."""
    config = without(config_of("LlamaForCausalLM"), "max_position_embeddings")
    imported(tmp_path, config, random_tensors(shapes_of(config)))
    settings = load_settings(tmp_path / "run").to_dict()
    for seq, written in {64: None, 4096: 4096}.items():
        settings["data"]["seq"] = seq
        own_run(tmp_path / f"tuned{seq}", read_settings(settings))
        flags = [str(tmp_path / f"tuned{seq}"), str(tmp_path / f"out{seq}"), "--like", str(tmp_path / "run")]
        assert main(["to-hf", *flags]) == 0
        said = json.loads((tmp_path / f"out{seq}" / "config.json").read_text())
        assert said.get("max_position_embeddings") == written


def test_another_model_is_not_like_it(theirs, corpus, capsys):
    own_run(theirs / "mine", own_settings(corpus))
    assert main(["to-hf", str(theirs / "mine"), str(theirs / "out"), "--like", str(theirs / "run")]) == 2
    assert "the model is not the one that was imported: model.vocab=260 there, 384 here" in capsys.readouterr().err
    assert main(["to-hf", str(theirs / "run"), str(theirs / "out"), "--like", str(theirs / "mine")]) == 2
    assert "mine was not made by from-hf" in capsys.readouterr().err
    shutil.rmtree(theirs / "mine")
    settings = load_settings(theirs / "run")
    own_run(theirs / "mine", settings, train_bpe(["another tokenizer"], vocab=259))
    assert main(["to-hf", str(theirs / "mine"), str(theirs / "out"), "--like", str(theirs / "run")]) == 2
    assert "run has another tokenizer, so that its special tokens are others" in capsys.readouterr().err


def test_damaged_parameters_do_not_go_out(theirs, capsys):
    for path in (theirs / "run" / "checkpoints" / "0" / "params" / "d").iterdir():  # some are of no array any more
        flip(path)
    assert main(["to-hf", str(theirs / "run"), str(theirs / "out")]) == 3
    assert "the checkpoint of step 0 in" in capsys.readouterr().err and not list(theirs.glob("out*"))


def test_a_record_that_is_damaged_is_not_believed(theirs, capsys):
    flip(theirs / "run" / "checkpoints" / "0" / "huggingface.json")
    assert main(["to-hf", str(theirs / "run"), str(theirs / "out")]) == 3
    assert "its file huggingface.json does not match its checksum" in capsys.readouterr().err


FORGED = {
    "a path": {"files": {"../stolen": "text"}},
    "a place": {"files": {"/tmp/stolen": "text"}},
    "a config": {"files": {"config.json": "{}"}},
    "no text": {"files": {"generation_config.json": 1}},
    "a dtype": {"dtypes": {"lm_head.weight": ["int8"]}},
    "no config": {"config": []},
}


@pytest.mark.parametrize("what", FORGED)
def test_a_record_that_no_import_writes_is_refused(tmp_path, what):
    """Its checksum is right: who hands on a run may have written both. Its names must not lead out of the folder."""
    record = {"config": config_of("LlamaForCausalLM"), "dtypes": {"lm_head.weight": "float32"}, "files": {}}
    step = SavedStep(0, tmp_path / "run" / "checkpoints" / "0", Bytes(), {}, {RECORD: None})
    step.folder.mkdir(parents=True)
    (step.folder / RECORD).write_text(json.dumps(record))
    assert read_record(step) == record
    (step.folder / RECORD).write_text(json.dumps(record | FORGED[what]))
    with pytest.raises(CheckpointError, match="huggingface.json was not written by an import"):
        read_record(step)


def test_texts_beside_the_model_keep_their_line_ends(tmp_path):
    config = config_of("LlamaForCausalLM", vocab_size=272)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    write_bpe(folder)
    (folder / "chat_template.jinja").write_bytes(b"one\r\ntwo\r\n")
    indented = json.dumps(json.loads((folder / "tokenizer.json").read_text()), indent=1)
    (folder / "tokenizer.json").write_bytes(indented.replace("\n", "\r\n").encode())
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert b"\r\n" in (folder / name).read_bytes()
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_additional_chat_templates_go_with_the_run(tmp_path):
    config = config_of("LlamaForCausalLM", vocab_size=272)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    write_bpe(folder)
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    tokenizers = list((tmp_path / "run").rglob("tokenizer.json"))
    assert tokenizers
    for tokenizer in tokenizers:
        template = ChatTemplate.of_tokenizer(tokenizer)
        assert template.render([]) == "plain" and template.render([], [{"name": "add"}]) == "tools"


# ---- memory

ENVIRONMENT = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
CONVERT = """
import re, sys
from parallax.checkpoint import arrays
from parallax.cli.convert import main
arrays.CACHE_BYTES = 1 << 26
import jax; jax.devices()
# Of this process alone: getrusage begins with the memory of the one that started it.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
before = peak()
assert main(sys.argv[1:]) == 0
print("grew", peak() - before)
"""


LARGE = {
    "LlamaForCausalLM": dict(intermediate_size=4096, num_hidden_layers=12),
    "MixtralForCausalLM": dict(intermediate_size=3584, num_hidden_layers=2, num_local_experts=8),  # 168 MiB a layer
}


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "stored"), [*((name, dict) for name in LARGE), ("MixtralForCausalLM", fused)])
def test_a_model_of_350_mib_takes_the_memory_of_a_few_pieces(tmp_path, architecture, stored):
    """In and out, 700 MiB in float32: a cache of 64 MiB, a matrix of a layer or of an expert, a few pieces of at most
    64 MiB. All experts of a layer in one tensor take no more than one by one."""
    sizes = dict(hidden_size=1024, num_attention_heads=16, **LARGE[architecture])
    config = config_of(architecture, vocab_size=4096, **sizes)
    tensors = random_tensors(shapes_of(config), "BF16")
    assert sum(x.nbytes for x in tensors.values()) > 350 << 20
    write_folder(tmp_path / "theirs", config, stored(tensors), shards=4)
    grown = {}
    for act, flags in {"from-hf": ["theirs", "--workdir", "run"], "to-hf": ["run", "out"]}.items():
        command = [sys.executable, "-c", CONVERT, act, *flags]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
        assert ended.returncode == 0, ended.stderr
        grown[act] = int(ended.stdout.split("grew ")[1])
    same_bytes(tensors, read_folder(tmp_path / "out"))
    print({act: f"{size >> 20} MiB" for act, size in grown.items()})
    assert max(grown.values()) < 350 << 20
