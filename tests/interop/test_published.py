"""The config.json of published models is read as it stands, and what is not computed is refused by its field."""

import dataclasses
import importlib
import math

import pytest
from support.hf_folders import MIXTURE_KEYS
from support.published_configs import BILLIONS, FORMS, FP8, GEMMA3_12B, MIXTURES, REFUSED, TAKEN, V2_LITE, V3

from configs.base import get_config
from configs.olmo3_7b_64k import get_config as olmo3_7b_64k
from parallax.analysis.traced.flops import active_parameters, parameters_by_component
from parallax.config.settings import read_settings
from parallax.errors import ConfigError
from parallax.interop.export import param_shapes, plain_names, plan_of
from parallax.interop.hf_config import language_model, read_config, write_config
from parallax.interop.hf_weights import weight_views
from parallax.model.checks import check_divides
from parallax.model.rope import Rope


def model_of(config, **more):
    return read_settings(get_config(), model=read_config(config).model | more).model


def parameters(model):
    """How many a model has, written out."""
    narrow, out = model.kv_heads * model.d_head, model.heads * model.d_head
    layer = (
        model.d_model * (out + 2 * narrow) + out * model.d_model + 3 * model.d_model * model.d_ff + 2 * model.d_model
    )
    layer += (out + 2 * narrow) * model.qkv_bias + 2 * model.d_head * model.qk_norm
    return model.layers * layer + model.d_model * (1 + model.vocab * (1 if model.tied else 2))


@pytest.mark.parametrize("name", TAKEN)
def test_a_published_model_is_read_and_has_its_number_of_parameters(name):
    config, count = TAKEN[name]
    model = model_of(config)
    assert parameters(model) == count
    assert model.rope_theta == config.get("rope_theta", 10000)
    assert (model.norm_eps, model.tied) == (config["rms_norm_eps"], config["tie_word_embeddings"])
    scaling = config.get("rope_scaling") or {}
    assert model.rope_scaling == scaling.get("rope_type", scaling.get("type", "none"))
    assert model.rope_factor == scaling.get("factor", 1)


@pytest.mark.parametrize("name", FORMS)
def test_a_published_model_of_another_form_has_its_number_of_parameters(name):
    config, count = FORMS[name]
    settings = read_settings(get_config(), model=read_config(config).model)
    assert sum(math.prod(about.shape) for about in param_shapes(settings).values()) == count


def test_the_config_of_olmo_3_is_the_model_that_its_import_is():
    """So that train.init_from starts from it; the factor on logits is YaRN's default, but for rounding."""
    settings = read_settings(olmo3_7b_64k())
    imported = read_config(FORMS["allenai/Olmo-3-1025-7B"][0]).model
    temperature = imported.pop("rope_temperature")
    assert Rope(settings.model).temperature() == pytest.approx(temperature, rel=1e-15)
    assert {key: getattr(settings.model, key) for key in imported} == imported
    assert settings.model.windows == (4096, 4096, 4096, 0) * 8


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", MIXTURES)
def test_the_tensors_of_a_published_mixture_have_its_number_of_parameters(name):
    """Counted once each, though some are more than one of our arrays; and its config is written as it was read."""
    config, count = MIXTURES[name]
    found = read_config(config)
    settings = read_settings(get_config(), model=found.model)
    views = weight_views(settings.model, found.architecture, interleaved=found.interleaved)
    tensors = {}
    for here in plain_names(param_shapes(settings), settings.model.layer_kinds).values():
        if view := views[here.name]:
            tensors |= {tensor: math.prod(view.shape) for _, tensor in view.tensors(here)}
    assert sum(tensors.values()) == count
    again = read_config(write_config(settings.model, settings.data.seq))
    for key in ("layers_of", "layers", "attention", *MIXTURE_KEYS):
        assert again.model[key] == found.model[key]
    assert again.architecture == found.architecture


@pytest.mark.parametrize("name", MIXTURES)
def test_a_published_mixture_has_as_many_parameters_and_active_ones_as_its_authors_say(name):
    config, _ = MIXTURES[name]
    settings = read_settings(get_config(), model=read_config(config).model)
    counts = parameters_by_component(plan_of(settings).declared)
    active = active_parameters(settings.model, counts)
    if config["architectures"][0].startswith("Deepseek"):
        del active["embedding"]
    if settings.model.sinks:  # of gpt-oss the head's table, and not the embedding's, is counted as active
        del active["embedding"]
    for found, said in zip((counts, active), BILLIONS[name]):
        last_digit = 0.1 if "." in said else 1
        assert abs(sum(found.values()) / 1e9 - float(said)) < last_digit


def test_six_families_of_mixtures_are_there():
    assert len({config["architectures"][0] for config, _ in MIXTURES.values()}) == 6


def test_forty_dense_models_are_there_with_every_family():
    assert len(TAKEN) >= 40
    assert {config["architectures"][0] for config, _ in TAKEN.values()} == {
        f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Granite", "Phi3", "Glm")
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_its_field_and_value(name):
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as error:
        read_config(config)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("config", [V2_LITE, V3], ids=["V2-Lite", "V3"])
def test_deepseeks_attention_is_read_where_its_layers_are_dense(config):
    model = model_of(config | {"first_k_dense_replace": config["num_hidden_layers"]})
    assert (model.attention, model.d_head, model.d_rope, model.d_latent) == ("mla", 128, 64, 512)
    assert model.d_latent_q == (config["q_lora_rank"] or 0)
    assert (model.rope_scaling, model.rope_factor, model.rope_original_seq) == ("yarn", 40, 4096)
    weight = config["rope_scaling"]["mscale_all_dim"]
    assert model.rope_temperature == pytest.approx((0.1 * weight * math.log(40) + 1) ** 2)


def test_every_vocab_can_be_cut_with_the_padding_of_an_import():
    for config, _ in TAKEN.values():
        model = model_of(config, vocab_multiple=128)
        for tp in (2, 4, 8, 16):
            if model.heads % tp == 0:
                check_divides(model, {"pp": 1, "dp": 1, "tp": tp})
    assert model_of(TAKEN["codellama/CodeLlama-7b-hf"][0], vocab_multiple=128).padded_vocab == 32128


# ---- fields that change nothing, and the same fields where they would


LLAMA, QWEN2, MISTRAL, QWEN3 = (
    TAKEN[name][0]
    for name in (
        "meta-llama/Llama-2-7b-hf",
        "Qwen/Qwen2.5-7B-Instruct",
        "mistralai/Mistral-7B-v0.1",
        "Qwen/Qwen3-8B",
    )
)
WOULD_MATTER = {
    "rope_interleaved": (True, "rope_interleaved=True is not supported; supported: null or False"),
    "qk_layer_norms": (True, "qk_layer_norms=True is not supported"),
    "activation": ("gelu", "activation='gelu' is not supported; supported: null or 'swiglu'"),
    "add_cross_attention": (True, "add_cross_attention=True is not supported"),
    "pruned_heads": ({"0": [1]}, "pruned_heads=.* is not supported"),
}


@pytest.mark.parametrize("field", WOULD_MATTER)
def test_a_field_that_is_taken_at_its_default_is_refused_at_another_value(field):
    value, message = WOULD_MATTER[field]
    with pytest.raises(ConfigError, match=message):
        read_config(LLAMA | {field: value})


@pytest.mark.parametrize("field", ["is_llama_config", "neftune_noise_alpha", "transformers.js_config"])
def test_a_field_that_changes_nothing_changes_nothing(field):
    for value in (True, 5.0, {"kv_cache_dtype": {}}, None):
        assert read_config(LLAMA | {field: value}) == read_config(LLAMA)


@pytest.mark.parametrize("field", ["attention_dropout", "resid_pdrop", "residual_dropout"])
def test_a_dropout_is_left_out_and_said(field):
    read = read_config(LLAMA | {field: 0.1})
    assert read.model == read_config(LLAMA).model
    assert read.notes == (f"config.json: {field}=0.1 is of training, and left out: set model.dropout",)
    with pytest.raises(ConfigError, match=f"{field}='much' is not supported; supported: a number from 0"):
        read_config(LLAMA | {field: "much"})


GEMMA, GEMMA2 = (FORMS[name][0] for name in ("google/gemma-2b", "google/gemma-2-2b"))


def test_an_error_quotes_the_field_of_an_activation_that_is_written():
    neox = FORMS["EleutherAI/pythia-1.4b"][0]
    wrong = {
        "hidden_act='tanh' is not supported; supported: 'gelu_pytorch_tanh' or": GEMMA | {"hidden_act": "tanh"},
        "hidden_activation='tanh' is not supported; supported: 'gelu_pytorch_tanh' or": GEMMA2
        | {"hidden_activation": "tanh"},
        "hidden_activation='silu' is not supported; supported: null or 'gelu_pytorch_tanh'": GEMMA
        | {"hidden_activation": "silu"},
        "hidden_act='silu' is not supported; supported: null or 'gelu_pytorch_tanh'": GEMMA2 | {"hidden_act": "silu"},
        "rotary_pct='half' is not supported; supported: a number": neox | {"rotary_pct": "half"},
    }
    for message, config in wrong.items():
        with pytest.raises(ConfigError, match=message):
            read_config(config)


def test_biases_are_read_where_transformers_makes_them():
    keys = ("qkv_bias", "out_bias", "mlp_bias")
    for config in (GEMMA, GEMMA2, FORMS["google/gemma-3-1b-pt"][0], QWEN3, FORMS["allenai/OLMo-2-1124-7B"][0]):
        model = model_of(config | {"attention_bias": True})
        assert [getattr(model, key) for key in keys] == [True, True, False]
        written = write_config(model, 64)
        assert written["architectures"] == config["architectures"] and written["attention_bias"] is True
    wrong = {
        "attention_bias=True is not supported; supported: false; transformers ignores the field in a mistral": MISTRAL,
        "attention_bias=True is not supported; supported: false; transformers ignores the field in a qwen2": QWEN2,
        "attention_bias=True .*; projections to latents have biases there and none here": V3,
        "mlp_bias=True .*; transformers ignores the field in a gemma": GEMMA,
        "mlp_bias=True .*; shared experts have biases there and none here": V2_LITE,
        "lm_head_bias=True .*; transformers ignores the field in a llama": LLAMA,
    }
    for message, config in wrong.items():
        with pytest.raises(ConfigError, match=message):
            read_config(config | {message.partition("=")[0]: True})
        read_config(config | {message.partition("=")[0]: False})


def test_a_stretched_theta_of_hunyuan_is_a_larger_one():
    hunyuan = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "vocab_size": 290943}
    hunyuan |= dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    hunyuan |= dict(num_key_value_heads=8, head_dim=128, rope_theta=10000.0)
    scaling = dict(type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    model = model_of(hunyuan | {"rope_scaling": scaling})
    assert model.rope_theta == pytest.approx(1e4 * 1000 ** (128 / 126)) and model.rope_scaling == "none"
    with pytest.raises(ConfigError, match="rope_type='dynamic' is not supported"):
        model_of(hunyuan | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(ConfigError, match="alpha=0 is not supported; supported: a number"):
        model_of(hunyuan | {"rope_scaling": {"type": "dynamic", "alpha": 0}})


def test_a_misspelt_factor_of_yarn_is_passed_over_as_transformers_does_and_said():
    config, _ = TAKEN["deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"]
    found = read_config(config)
    plain = {key: value for key, value in config["rope_scaling"].items() if key != "attn_factor"}
    assert found.model == read_config(config | {"rope_scaling": plain}).model
    (note,) = found.notes
    assert note.startswith("config.json: rope_scaling: attn_factor=0.8782488562869419 is ignored: transformers reads")
    other = read_config(config | {"rope_scaling": plain | {"attention_factor": 0.8782488562869419}})
    assert other.model["rope_temperature"] == pytest.approx(0.8782488562869419**2) and not other.notes


def test_a_context_that_is_absent_is_the_one_that_it_stands_for():
    contexts = {}
    for config in (LLAMA, MISTRAL, QWEN2, QWEN3):
        left = {key: value for key, value in config.items() if key != "max_position_embeddings"}
        contexts[config["model_type"]] = read_config(left).model["rope_original_seq"]
    assert contexts == {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


# ---- windows


def test_a_window_is_kept_with_the_model():
    assert model_of(MISTRAL).windows == (4096,) * 32
    assert "sliding_window=4096: a token attends to so many" in read_config(MISTRAL).notes[0]
    assert not any(model_of(MISTRAL | {"sliding_window": None}).windows)


def test_a_window_of_qwen_is_that_of_the_layers_that_use_it():
    on = dict(use_sliding_window=True, sliding_window=2048)
    for config in (QWEN2, QWEN3):
        layers = config["num_hidden_layers"]
        types = ["full_attention", "sliding_attention"] * (layers // 2)

        def windows(config=config, **changes):
            return model_of(config | changes).windows

        assert windows() == (0,) * layers
        assert windows(**on, max_window_layers=layers) == (0,) * layers
        assert windows(**on, max_window_layers=0) == (2048,) * layers
        assert windows(**on, max_window_layers=layers - 3) == (0,) * (layers - 3) + (2048,) * 3
        assert windows(**on, max_window_layers=layers, layer_types=types) == (0, 2048) * (layers // 2)
        assert windows(**on, max_window_layers=0, layer_types=["full_attention"] * layers) == (0,) * layers
        assert windows(use_sliding_window=True, sliding_window=None) == (0,) * layers
        with pytest.raises(ConfigError, match="layer_types=.* is not supported; supported: one for each of num_hidden"):
            windows(**on, layer_types=types[:-1])
    with pytest.raises(
        ConfigError, match="layer_types=.* is not supported; supported: 'full_attention' in every layer"
    ):
        read_config(QWEN2 | {"layer_types": ["full_attention", "sliding_attention"] * 14})


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL,
        *(QWEN2 | dict(use_sliding_window=True, max_window_layers=layers) for layers in (0, 5)),
        QWEN2 | dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"] * 14),
        FORMS["google/gemma-2-2b"][0],
        FORMS["google/gemma-3-1b-pt"][0],
        FORMS["google/gemma-2-2b"][0] | dict(layer_types=["full_attention"] * 26),
    ],
)
def test_a_model_with_windows_is_written_with_them(config):
    model = model_of(config)
    written = write_config(model, 64)
    assert written["architectures"] == config["architectures"]
    assert model_of(written).windows == model.windows
    assert read_config(write_config(model_of(LLAMA, sliding_window=64), 64)).architecture == "MistralForCausalLM"
    latents = V3 | {"first_k_dense_replace": V3["num_hidden_layers"]}
    with pytest.raises(ConfigError, match="V3ForCausalLM has no window; "):
        write_config(model_of(latents, sliding_window=64), 64)


def test_caps_of_gemma_are_those_of_its_file_and_null_is_none():
    gemma = FORMS["google/gemma-2-2b"][0]
    model = model_of(gemma)
    assert (model.score_cap, model.logit_cap, model.attention_scale) == (50.0, 30.0, 1 / 16)
    assert model.windows == (4096, 0) * 13
    without = gemma | dict(attn_logit_softcapping=None, query_pre_attn_scalar=168)
    assert model_of(without).score_cap == 0
    written = write_config(model_of(without), 64)
    names = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "hidden_activation")
    assert [written[name] for name in names] == [None, 30.0, 168, "gelu_pytorch_tanh"]
    assert isinstance(written["query_pre_attn_scalar"], int) and "hidden_act" not in written
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM has a whole number of 1 / attention_scale "):
        write_config(model_of(gemma, attention_scale=0.1234), 64)
    absent = {name: value for name, value in gemma.items() if name not in (*names, "hidden_act", "sliding_window")}
    assert model_of(absent) == model
    for field, value in dict(hidden_activation="relu", sliding_window=None, sliding_window_pattern=3).items():
        with pytest.raises(ConfigError, match=f"{field}=.* is not supported"):
            model_of(gemma | {field: value})


def test_fields_of_the_code_that_came_with_a_model_are_read_at_the_value_that_changes_nothing():
    phi = TAKEN["microsoft/Phi-3-mini-4k-instruct"][0]
    told = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
    assert read_config(phi | told) == read_config(phi)
    assert read_config(GEMMA2 | {"sliding_window_size": 4096}) == read_config(GEMMA2)
    for config, name in ((phi, "full_attn_mod"), (phi, "interpolate_factor"), (GEMMA2, "sliding_window_size")):
        with pytest.raises(ConfigError, match=f"{name}=2 is not supported; supported: null or "):
            read_config(config | {name: 2})


def test_layers_of_gemma_3_rotate_by_what_their_type_says():
    gemma, _ = FORMS["google/gemma-3-1b-pt"]
    model = model_of(gemma)
    assert model.windows == ((512,) * 5 + (0,)) * 4 + (512,) * 2
    assert {(each.sliding_window, each.rope_theta) for each in model.settings_of_layers.settings} == {
        (0, 1e6),
        (512, 1e4),
    }
    stretched = {"rope_type": "linear", "factor": 8.0}
    old = model_of(gemma | {"rope_scaling": stretched})
    assert {(each.rope_theta, each.rope_factor) for each in old.settings_of_layers.settings} == {(1e6, 8), (1e4, 1)}
    plain = {name: value for name, value in gemma.items() if not name.startswith("rope_")}
    of_types = {"full_attention": stretched, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert model_of(plain | {"rope_parameters": of_types}) == old == model_of(plain | {"rope_scaling": stretched})
    written = write_config(old, old.rope_original_seq)
    assert written["architectures"] == ["Gemma3ForCausalLM"] and written["rope_local_base_freq"] == 1e4
    assert model_of(written) == old
    both = {name: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5} for name in of_types}
    again = write_config(model_of(plain | {"rope_parameters": both}), 32768)
    assert again["rope_parameters"] == both and "rope_theta" not in again


def test_of_gemma_3_with_pictures_the_language_model_is_read_as_the_shipped_config_has_it():
    content, part = language_model(GEMMA3_12B)
    found = read_config(content)
    assert part.architecture == found.architecture == "Gemma3ForCausalLM" and found.context == 131072
    model = read_settings(get_config(), model=found.model).model
    ours = read_settings(importlib.import_module("configs.gemma3_12b").get_config()).model
    stretched = {"kinds": ours.kinds, "rope_scaling": "none", "rope_factor": 1.0, "dtype": ours.dtype}
    stretched |= {"rope_original_seq": ours.rope_original_seq, "layers_of": ours.layers_of}
    stretched |= {"attention_scale": ours.attention_scale}
    assert dataclasses.replace(model, **stretched) == ours and model.windows == ours.windows
    assert model.score_factor == ours.score_factor == 1
    with pytest.raises(ConfigError, match="config.json has no text_config"):
        language_model({name: value for name, value in GEMMA3_12B.items() if name != "text_config"})
    with pytest.raises(ConfigError, match="twist=2 is not supported because its meaning is unknown"):
        read_config(language_model(GEMMA3_12B | {"twist": 2})[0])


# ---- quantization


def test_blocks_of_float8_are_read_and_their_lines_said():
    found = read_config(V3)
    assert (found.block, found.further_layers) == ((128, 128), 1)
    assert "float8 weights become float32, each block of 128 x 128 times its scale" in found.notes
    assert "1 layer for multi-token prediction, after the model's, left out" in found.notes
    assert read_config(QWEN3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}).block == (128, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, "fmt='e5m2' is not supported; supported: 'e4m3'"),
        ({"weight_block_size": None}, "weight_block_size=None is not supported; supported: two whole numbers"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\] is not supported"),
        ({"weight_block_size": [128, True]}, r"weight_block_size=\[128, True\] is not supported"),
        ({"quant_method": None}, "quant_method=None is not supported; supported: 'fp8' in blocks"),
        ({"twist": 2}, "twist=2 is not supported because its meaning is unknown"),
    ],
    ids=str,
)
def test_float8_of_another_kind_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"config.json: quantization_config: {message}"):
        read_config(QWEN3 | {"quantization_config": FP8 | changes})
