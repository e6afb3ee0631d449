"""Models of Hugging Face's `transformers` compute here what they compute there: logits, fine-tuning and greedy text.

And an exported run is usable there as it is: its model, its tokenizer, and text that ends where a document does.
"""

import functools
import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.exportable_runs import OWN, own_run, own_settings
from test_convert import params_of
from test_to_hf import BOS, BPE, TEMPLATE, published, tuned

import parallax as px
from parallax.cli.convert import main
from parallax.data.tokenizer import Bytes, load_tokenizer
from parallax.inference.generate import encode
from parallax.interop.mxfp4 import of_mxfp4

EXTRA = 'needs the extra hf-tests: pip install -e ".[hf-tests]" -c constraints.txt'
torch = pytest.importorskip("torch", reason=EXTRA)
pytest.importorskip("transformers", reason=EXTRA)

from support.hf_families import (
    CONTEXT,
    FAMILIES,
    LENGTHS,
    Pair,
    comes_back,
    equal_tokens,
    import_pair,
    logits_difference,
    loss_difference,
    make_pair,
    meshes_of,
    ours_on,
    published_pair,
    random_model,
    written_anew,
)
from support.hf_families import MIXTURES as EXPERTS
from support.hf_folders import in_blocks, read_folder, write_folder
from support.published_configs import MIXTURES, TAKEN, V3
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# Sums over up to 96 float32 terms in other orders, on logits of size 1 to 10.
LOGITS_ERROR = 1e-4
LOSS_ERROR = 1e-3
on_every_mesh = pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.slow] * (place > 0), id=f"{name}-{mesh}")
        for name in FAMILIES
        for place, mesh in enumerate(meshes_of(name))
    ],
)


@pytest.fixture(scope="module")
def pair_of():
    """The pair of a family, made once."""
    with tempfile.TemporaryDirectory() as folder:
        yield functools.cache(lambda name: make_pair(name, Path(folder) / name))


@on_every_mesh
def test_logits_are_theirs(pair_of, name, mesh):
    assert logits_difference(pair_of(name), *ours_on(pair_of(name), mesh)) < LOGITS_ERROR


@on_every_mesh
def test_greedy_text_is_theirs(pair_of, name, mesh):
    equal, total = equal_tokens(pair_of(name), *ours_on(pair_of(name), mesh))
    assert equal == total


@pytest.mark.slow
@on_every_mesh
def test_losses_of_fine_tuning_are_theirs(pair_of, name, mesh):
    assert loss_difference(name, pair_of(name), *ours_on(pair_of(name), mesh)) < LOSS_ERROR


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_imported_goes_back_bit_for_bit(pair_of, tmp_path, name):
    assert comes_back(pair_of(name), tmp_path / "out")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_that_is_written_for_our_own_run_means_the_same_there(name):
    ours, theirs = written_anew(name)
    assert ours == theirs


@pytest.mark.parametrize("name", [name for name in EXPERTS if name not in ("Granite-MoE", "gpt-oss")])  # of one form
def test_experts_are_imported_from_each_of_the_formats_that_they_are_saved_in(pair_of, tmp_path, name):
    """One tensor for each expert and kernel, as published, or all experts of a layer in one, as in memory."""
    theirs = pair_of(name).theirs
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=False)
    found = set(read_folder(tmp_path / "theirs"))
    assert found == set(theirs.state_dict()) and any(x.endswith(".mlp.experts.gate_up_proj") for x in found)
    assert any(".experts.0." in x for x in read_folder(pair_of(name).run.parent / "theirs"))
    together, apart = (params_of(pair.run, 0) for pair in (import_pair(theirs, tmp_path), pair_of(name)))
    assert together.keys() == apart.keys()
    assert all((together[array] == apart[array]).all() for array in apart)


@pytest.mark.parametrize("kind", OWN)
def test_a_run_of_our_own_computes_there_what_it_computes_here(corpus, tmp_path, kind):
    """Windows no longer than 16 tokens, the context of these runs, and beyond."""
    changes, architecture = OWN[kind]
    own_run(tmp_path / "run", own_settings(corpus, rope_original_seq=16, tied=False, **changes))
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(theirs).__name__ == architecture
    pair = Pair(theirs.eval(), tmp_path / "run")
    # With longrope transformers goes by the longest document of a batch, and a run by its rows: not beyond the context.
    lengths = [2, 16] if "rope_long_factors" in changes else LENGTHS[:2]
    assert logits_difference(pair, *ours_on(pair, (1, 1, 1)), lengths) < LOGITS_ERROR


# Published config.jsons with all their flags, at sizes that keep how many query heads share a key head. A vocab of 321
# is padded; 96 tokens, the longest window of the comparison, are all that a sliding window may hide nothing of.
SMALL = dict(num_hidden_layers=2, intermediate_size=48, vocab_size=321)
LATENTS = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16)
LATENTS |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, max_position_embeddings=4 * CONTEXT)
LATENTS |= dict(moe_intermediate_size=24)
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
    "codellama/CodeLlama-7b-hf": dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4),
    "mistralai/Mistral-7B-v0.1": dict(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, sliding_window=3 * CONTEXT
    ),
    "Qwen/Qwen2-0.5B": dict(hidden_size=112, num_attention_heads=14, num_key_value_heads=2),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": dict(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, max_position_embeddings=4 * CONTEXT
    ),
    "mistralai/Mixtral-8x7B-v0.1": dict(hidden_size=32, num_attention_heads=8, num_key_value_heads=2),
    "Qwen/Qwen3-30B-A3B": dict(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=1, head_dim=16, moe_intermediate_size=24
    ),
    "deepseek-ai/DeepSeek-V2-Lite": LATENTS | dict(q_lora_rank=None),
    "deepseek-ai/DeepSeek-V2": LATENTS,
    "deepseek-ai/DeepSeek-V3": LATENTS | dict(first_k_dense_replace=1, quantization_config=None),
}


def small(name):
    config = (TAKEN | MIXTURES)[name][0] | SMALL | PUBLISHED[name]
    rope = config.get("rope_scaling") or {}
    if "original_max_position_embeddings" in rope:
        factor = min(rope["factor"], config["max_position_embeddings"] / CONTEXT)
        config["rope_scaling"] = rope | {"original_max_position_embeddings": CONTEXT, "factor": factor}
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_of_published_configs_are_theirs(tmp_path, name):
    pair = published_pair(small(name), tmp_path)
    assert logits_difference(pair, *ours_on(pair, (1, 1, 1))) < LOGITS_ERROR


def test_a_window_hides_nothing_of_as_many_tokens_and_something_of_one_more(tmp_path):
    """What transformers computes without a mask of ours: where data.seq ends is where its window begins to hide."""
    pair = published_pair(small("mistralai/Mistral-7B-v0.1") | {"sliding_window": 512}, tmp_path)
    tokens = torch.arange(CONTEXT)[None] % 7
    with torch.no_grad():
        whole, same, less = (
            setattr(pair.theirs.config, "sliding_window", window) or pair.theirs(tokens).logits
            for window in (None, CONTEXT, CONTEXT - 1)
        )
    assert torch.equal(whole, same) and (whole - less).abs().max() > 20 * LOGITS_ERROR


def test_the_language_model_of_one_that_reads_pictures_is_theirs_and_goes_out_alone(tmp_path):
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=28, patch_size=14)
    _, fields = FAMILIES["Gemma 3"]
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=fields, vision_config=vision, mm_tokens_per_image=4, image_token_index=9)
    )
    alone = random_model("Gemma 3")
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.save_pretrained(tmp_path / "theirs")
    assert any("vision_tower" in name for name in read_folder(tmp_path / "theirs"))
    pair = import_pair(alone, tmp_path)
    assert logits_difference(pair, *ours_on(pair, (1, 1, 1)), LENGTHS[:2]) < LOGITS_ERROR
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(written) is type(alone)
    assert all(torch.equal(x, alone.state_dict()[name]) for name, x in written.state_dict().items())


def test_float8_weights_compute_what_their_values_do_in_transformers(tmp_path):
    """DeepSeek-V3's config.json with all layers dense; transformers has the values, and we the blocks."""
    config = V3 | SMALL | LATENTS | {"first_k_dense_replace": 2}
    config["rope_scaling"] = V3["rope_scaling"] | {"factor": 4, "original_max_position_embeddings": CONTEXT}
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    first = published_pair(plain, tmp_path / "first")
    tensors = {name: x.numpy() for name, x in first.theirs.state_dict().items()}
    stored, meant = in_blocks(tensors, config["quantization_config"]["weight_block_size"])
    first.theirs.load_state_dict({name: torch.from_numpy(x) for name, x in meant.items()})
    assert isinstance(first.theirs, DeepseekV3ForCausalLM) and len(stored) > len(meant)
    write_folder(tmp_path / "second" / "theirs", config, stored)
    second = import_pair(first.theirs, tmp_path / "second")
    assert logits_difference(second, *ours_on(second, (1, 1, 1))) < LOGITS_ERROR


def test_mxfp4_is_read_bitwise_as_they_read_it():
    """But for exponents whose numbers bfloat16 has only in part, where they round twice."""
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (3, 40, 4, 16), np.uint8)
    exponents = draw.integers(2, 253, (3, 40, 4)).astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(exponents))
    ours = of_mxfp4(blocks, exponents).astype(ml_dtypes.bfloat16)
    assert theirs.contiguous().view(torch.int16).numpy().tobytes() == ours.tobytes()


MATTERS = [
    ("Llama 2", dict(norm_eps=1e-2)),
    ("Llama 2, linear", dict(rope_factor=3.5)),
    ("Llama 3, llama3, tied", dict(rope_fast_turns=8.0)),
    ("Mistral, wide heads", dict(rope_theta=9000.0)),
    ("Qwen2, yarn", dict(rope_temperature=1.0)),
    ("Qwen3", dict(rope_theta=9000.0)),
    ("DeepSeek-V2, yarn", dict(rope_temperature=1.0)),
    ("DeepSeek-V3, yarn", dict(rope_slow_turns=0.5)),
    ("DeepSeek-V3, yarn on what is rotated", dict(rope_magnitude=1.0)),
    ("Mixtral", dict(router_normalized=False)),
    ("Qwen3-MoE", dict(experts_per_token=2)),
    ("DeepSeek-V2, experts", dict(router_scale=1.0)),
    ("Granite", dict(attention_scale=0.0)),
    ("GLM", dict(rope_fraction=1.0)),
    ("Hunyuan", dict(qk_norm_after_rope=False)),
    ("Gemma", dict(embedding_scale=1.0)),
    ("Gemma 2", dict(logit_cap=0.0)),
    ("Gemma 3", dict(qk_norm_scale="direct")),
    ("Gemma 3", dict(kinds="local=(sliding_window=20)")),
    ("StarCoder2", dict(activation="silu")),
    ("GPT-NeoX", dict(branches="sequential")),
    ("Llama, biases", dict(attention_scale=0.2)),
    ("GLM-4", dict(rope_theta=9000.0)),
    ("OLMo 3", dict(kinds="local=(sliding_window=31)")),
    ("OLMo 3, yarn in some layers", dict(rope_temperature=1.0)),
    ("Ministral", dict(kinds="local=(sliding_window=6)")),
    ("SmolLM3", dict(kinds="nope=(rope=True)")),
    ("Cohere 2", dict(kinds="local=(sliding_window=7) nope=()")),
    ("Qwen2-MoE, windows in some layers", dict(kinds="moe_local=(base='moe')")),
    ("DeepSeek-V2, groups of experts", dict(router_groups=1, router_groups_chosen=1)),
    ("DeepSeek-V3, groups of experts", dict(router_groups_chosen=3)),
    ("DeepSeek-V3, one group", dict(router_score="softmax")),
    ("gpt-oss", dict(rope_truncate=True)),
    ("gpt-oss", dict(expert_limit=7.0)),
]


@pytest.mark.parametrize(("name", "change"), MATTERS, ids=[name for name, _ in MATTERS])
def test_the_comparison_sees_a_field_that_is_not_as_they_have_it(pair_of, name, change):
    model, params = ours_on(pair_of(name), (1, 1, 1), **change)
    assert logits_difference(pair_of(name), model, params, [3 * CONTEXT]) > 20 * LOGITS_ERROR


# ---- an exported run, used as it is

TEXTS = ["It is a truth", " two  spaces , and a comma .", "né\r\n\t日本語 e\u0301 \U0001f600", "don't 1234", "a"]


def stops_at(folder, end, *more):
    """Greedy text of the folder's model, and of it with an end in the place of one of those tokens: it stops there, and
    in each batch of `more`. All is said by the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = written(model, tokenizer("It is", return_tensors="pt"), eos_token_id=None)[0].tolist()
    at = max(free.index(token) for token in free[:10])
    head, (one, other) = model.lm_head.weight.data, (free[at], end)
    head[[one, other]] = head[[other, one]]
    for prompts in (["It is"], *more):
        row = written(model, tokenizer(prompts, padding=len(prompts) > 1, return_tensors="pt"))[0].tolist()
        row = row[: row.index(end) + 1]
        assert row == [*free[:at], end] and len(row) < len(free)
    assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(free[:at], skip_special_tokens=True)


def written(model, inputs, **how):
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=16, **how)
    return ids[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE], ids=lambda tokenizer: tokenizer.name)
@pytest.mark.parametrize("kind", ["gqa", "norms", "mla"])
def test_a_run_of_our_own_is_used_there_as_it_is(corpus, tmp_path, kind, tokenizer):
    changes, _ = OWN[kind]
    own_run(tmp_path / "run", own_settings(corpus, tied=False, **changes), tokenizer)
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert theirs(text).input_ids == tokenizer.encode(text).tolist()
        assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == tokenizer.end and theirs.bos_token is None
    stops_at(tmp_path / "out", tokenizer.end, ["It is", "It is a truth"])


def test_a_run_with_biases_is_read_by_the_class_that_is_named(corpus, tmp_path):
    """AutoTokenizer takes every tokenizer of a model of type qwen2 for Qwen's: should that end, the line may go."""
    own_run(tmp_path / "run", own_settings(corpus, tied=False, **OWN["biases"][0]), BPE)
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    qwens = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert theirs(text).input_ids == BPE.encode(text).tolist()
    assert any(qwens(text).input_ids != theirs(text).input_ids for text in TEXTS)


@pytest.fixture
def chat(tmp_path):
    """A folder that `transformers` saved: a model whose turns end with a token of their own, and documents with one."""
    model = random_model("Mistral, wide heads")
    published(tmp_path / "made", template=True)
    names = dict(bos_token=BOS, eos_token="<|user|>", chat_template=TEMPLATE)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "made" / "tokenizer.json"), **names)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "theirs")
    assert main(["from-hf", str(tmp_path / "theirs"), "--workdir", str(tmp_path / "run")]) == 0
    return tmp_path


def test_a_prompt_is_encoded_as_they_encode_it(chat):
    theirs, ours = AutoTokenizer.from_pretrained(chat / "theirs"), load_tokenizer(chat / "run")
    for text in TEXTS:
        assert encode(ours, text).tolist() == theirs(text).input_ids
        assert theirs(text).input_ids[0] == theirs.bos_token_id


def test_generation_stops_where_theirs_does(chat):
    """At an end of generation_config.json, or of config.json without it; none of them ends a document."""
    model = AutoModelForCausalLM.from_pretrained(chat / "theirs", attn_implementation="eager").eval()
    there = AutoTokenizer.from_pretrained(chat / "theirs")
    inputs = there("It is", return_tensors="pt")
    how = {"suppress_tokens": list(range(len(there), model.config.vocab_size))}
    free = written(model, inputs, eos_token_id=None, **how)[0].tolist()
    for place, name in ((3, "generation_config.json"), (6, "config.json")):
        file = chat / "theirs" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [there.eos_token_id, free[place]]}))
        if name == "config.json":
            (chat / "theirs" / "generation_config.json").unlink()
        model = AutoModelForCausalLM.from_pretrained(chat / "theirs", attn_implementation="eager").eval()
        *kept, end = written(model, inputs, **how)[0].tolist()
        assert end == free[place] and [*kept, end] == free[: free.index(end) + 1]
        assert main(["from-hf", str(chat / "theirs"), "--workdir", str(chat / f"stops at {place}")]) == 0
        ours = px.load(chat / f"stops at {place}").generate("It is", tokens=16, temperature=0.0)
        assert ours == there.decode([*inputs.input_ids[0], *kept], skip_special_tokens=True)


def test_a_run_trained_from_an_import_is_used_there_as_it_is(chat, corpus):
    run = tuned(corpus, chat)
    assert main(["to-hf", str(run), str(chat / "out")]) == 0
    there, here = (AutoTokenizer.from_pretrained(chat / name) for name in ("theirs", "out"))
    for text in TEXTS:
        assert here(text).input_ids == there(text).input_ids
    turns = [{"role": "user", "content": "It is"}]
    assert here.apply_chat_template(turns, tokenize=False) == there.apply_chat_template(turns, tokenize=False)
    assert here.special_tokens_map == there.special_tokens_map
    for end in (load_tokenizer(run).end, here.eos_token_id):
        stops_at(chat / "out", end)  # no batch: what came has no token to pad with
