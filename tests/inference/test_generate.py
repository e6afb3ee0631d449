"""Cached decoding says what the full forward pass says, and what is chosen depends on the seed, not on the mesh."""

import dataclasses
import functools
import itertools
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.checkpoint_examples import flip, truncate
from support.tiny_model import model_config
from support.traced_equations import equations

import parallax as px
from parallax.checkpoint.arrays import flatten
from parallax.cli.generate import main
from parallax.config.sections import (
    LayoutConfig,
    MeshConfig,
    PipelineConfig,
    SampleConfig,
)
from parallax.config.settings import default_settings
from parallax.data.tokenizer import Bytes
from parallax.errors import ConfigError
from parallax.inference import layer_sequences
from parallax.inference.decode import CacheForm, Decoder, Prompts
from parallax.inference.generate import complete, generate, stream
from parallax.model import attention
from parallax.model.kernels.blockwise import LONGEST_SIDE
from parallax.pipeline import ShardedModel
from parallax.sharding.layers_on_ranks import Arrangement
from parallax.sharding.mesh import make_mesh
from parallax.step.step import with_first_scales

VOCAB, SEQ, ROWS = 64, 12, 8
SIZES = {"vocab": VOCAB, "layers": 4, "d_model": 32, "d_ff": 48, "heads": 8, "d_head": 4, "d_latent": 16, "d_rope": 4}
# Biases are on so that they are tested; dropout is on because decoding must leave it out.
MODELS = {
    "mha": {"attention": "gqa", "kv_heads": 8, "qkv_bias": True},
    "gqa": {"attention": "gqa", "kv_heads": 2, "dropout": 0.5},
    "mqa": {"attention": "gqa", "kv_heads": 1, "tied": False, "d_model": 80},  # of tables pp cuts what data axes cut
    "mla": {"attention": "mla", "qkv_bias": True, "rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_seq": 8},
    "mla_q": {"attention": "mla", "d_latent_q": 16, "tied": False},
}
EXPERTS = {"experts": 8, "d_expert": 16, "shared_experts": 1, "tied": False}
MODELS |= {
    "moe": EXPERTS | {"attention": "gqa", "kv_heads": 2, "layers_of": "moe*4", "experts_per_token": 2},
    "mixed": EXPERTS
    | {"attention": "mla", "layers_of": "dense moe*2 dense", "experts_per_token": 3, "router_score": "sigmoid"}
    | {"router_groups": 4, "router_groups_chosen": 2},
    "choices": EXPERTS
    | {"attention": "gqa", "kv_heads": 2, "layers_of": "(dense moe)*2", "score_cap": 2.0, "sinks": True}
    | {"qk_norm": True, "qk_norm_over": "projection", "qk_norm_after_rope": True, "rope_fraction": 0.5}
    | {"qk_norm_scale": "one_plus"}
    | {"residual_scale": 0.7, "embedding_scale": 3.0, "logit_scale": 1.5, "logit_cap": 2.0, "attention_scale": 0.9}
    | {"router_shift": True, "shared_gate": True, "expert_activation": "clamped", "expert_bias": True}
    | {"activation": "clamped", "activation_limit": 0.5},
}
# Windows shorter than the shortest text, and no positions; and as long as a text, of another base.
WINDOWED = {"layers_of": "(near far)*2", "kinds": "near=(sliding_window=3, rope=False) far=(sliding_window=12)"}
WINDOWS = {
    "windows": {"attention": "gqa", "kv_heads": 2, "sliding_window": 5} | WINDOWED,
    "windows of latents": {"attention": "mla"} | WINDOWED,
    "one window": {"attention": "gqa", "kv_heads": 2, "sliding_window": 3, "sinks": True, "score_cap": 2.0},
    "windows of kinds": EXPERTS
    | {"attention": "gqa", "kv_heads": 2, "layers_of": "near far wide near", "experts_per_token": 2}
    | {"kinds": "near=(sliding_window=3) far=(base='moe') wide=(base='moe', sliding_window=4)"},
}
MODELS |= WINDOWS
MESHES = [(1, 1, 1), (2, 2, 2), (1, 1, 8), (4, 1, 2), (1, 8, 1)]
RESIDUALS = {"hidden": "batch/dp seq d_model/tp", "seq": "batch/dp seq/tp d_model"}
LAYOUTS = {
    "-".join((residual, family, form)): LayoutConfig(RESIDUALS[residual], family, form)
    for residual, family, form in itertools.product(
        RESIDUALS, ("column_row", "scatter"), ("vocab_parallel", "all_to_all")
    )
}
PLAIN, OTHER = "hidden-column_row-vocab_parallel", "seq-scatter-all_to_all"
FAST = [
    ("gqa", (2, 2, 2), OTHER),
    ("mqa", (1, 1, 8), "hidden-column_row-all_to_all"),
    ("mla", (1, 8, 1), "hidden-scatter-vocab_parallel"),
    ("mla", (2, 2, 2), PLAIN),
    ("gqa", (2, 1, 2, 1, 2), OTHER),
    ("mqa", (2, 2, 1, 1, 1, 2), PLAIN),
    ("mixed", (2, 1, 2, 1, 1, 2), OTHER),
    ("choices", (2, 1, 2), OTHER),
]
ALL = {
    *itertools.product(MODELS.keys() - WINDOWS.keys(), MESHES, (PLAIN, OTHER)),
    *itertools.product(("gqa", "mla"), [(2, 2, 2)], LAYOUTS),
    ("mqa", (1, 1, 8), "hidden-column_row-all_to_all"),
    ("mqa", (4, 1, 2), "seq-column_row-vocab_parallel"),
    ("mla", (1, 8, 1), "hidden-scatter-vocab_parallel"),
    ("moe", (1, 1, 1, 1, 1, 8), PLAIN),
    ("moe", (1, 1, 2, 1, 2, 2), OTHER),
    ("mixed", (2, 1, 1, 1, 1, 4), PLAIN),
} - {*FAST}
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(ALL))]
# Which tokens are chosen, and where rows end, has nothing to do with the number of layers.
SHORT = "gqa of two layers"
MODELS[SHORT] = MODELS["gqa"] | {"layers": 2}
GREEDY = SampleConfig(prompt="", tokens=10, temperature=0.0, top_k=0, top_p=1.0, seed=0)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_k=20, top_p=0.95, seed=3)
# Tests with as many rows, and a longest prompt as long, share what is compiled.
LONGEST_PROMPT = [9, 8, 7, 6, 5]
ROWS_OF_PROMPTS = [LONGEST_PROMPT, [1, 2], [3]]


@functools.cache
def model_on(
    name: str, mesh: tuple[int, ...] = (1, 1, 1), layout: str = PLAIN, schedule: str = "gpipe", virtual: int = 1
) -> ShardedModel:
    pipeline = dataclasses.replace(PipelineConfig(), schedule=schedule, virtual=virtual)
    settings = default_settings()
    sizes = dict(zip(("pp", "dp", "tp", "replica", "cp", "ep"), mesh))
    laid_out = make_mesh(MeshConfig(**sizes, simulate=0), jax.devices()[: np.prod(mesh)])
    model = dataclasses.replace(settings.model, **SIZES | MODELS[name])
    return ShardedModel(dataclasses.replace(settings, model=model, layout=LAYOUTS[layout], pipeline=pipeline), laid_out)


@functools.cache
def whole_params(name: str):
    """Values that make every parameter matter, norms and biases too; on the host, for any mesh."""
    random = np.random.default_rng(0)

    def values(path, leaf):
        around = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return (around + 0.2 * random.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(values, model_on(name).shapes)


def params_on(name: str, model: ShardedModel):
    return jax.device_put(whole_params(name), model.shardings)


@functools.cache
def full_forward(name: str):
    """Texts of different lengths that end in the last column, and their logits without a cache, uncut."""
    random = np.random.default_rng(0)
    empty_B = np.array([0, 3, 5, 0, 1, 2, 4, 0], np.int32)
    ids_BS = random.integers(VOCAB, size=(ROWS, SEQ), dtype=np.int32)
    slot_S = np.arange(SEQ, dtype=np.int32)
    filled_BS = slot_S[None] >= empty_B[:, None]
    positions_BS = np.maximum(slot_S[None] - empty_B[:, None], 0)
    batch = ids_BS, filled_BS.astype(np.int32), positions_BS
    logits_BSV = jax.jit(model_on(name).logits)(params_on(name, model_on(name)), *batch)
    return Prompts(ids_BS, empty_B), np.asarray(logits_BSV), filled_BS


@pytest.mark.fast(1)
@pytest.mark.parametrize("name, mesh, layout", CASES, ids=str)
def test_cached_decoding_gives_the_logits_of_the_full_forward_pass(name, mesh, layout):
    check_decoding(name, model_on(name, mesh, layout))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gqa", (1, 1, 1)),
        ("windows", (1, 1, 1)),
        ("mixed", (1, 1, 1)),
        ("mla", (1, 2, 2)),
        ("windows of kinds", (1, 1, 1)),
        ("choices", (1, 1, 2)),
        ("gqa", (2, 2, 2)),
        ("windows", (3, 2, 1)),  # 4 layers on 3 ranks: uneven
    ],
    ids=str,
)
def test_layers_in_a_loop_say_what_they_say_one_by_one(name, mesh, monkeypatch):
    monkeypatch.setattr(layer_sequences, "UNROLLED_LAYERS", 1)
    check_decoding(name, model_on(name, mesh))


def test_a_stages_layers_have_one_order_in_every_process():
    """Of a set, the hash seed would say."""
    arrangement = Arrangement((0,), ("near", "far") * 4)
    (sequence,) = layer_sequences.layer_sequences(arrangement, [3, 0] * 4)
    assert [(layer.kind, layer.indices) for layer in sequence.layers] == [
        (kind, (number,)) for number in range(4) for kind in ("near", "far")
    ]


def test_the_program_of_a_deep_model_does_not_grow_with_its_layers(monkeypatch):
    monkeypatch.setattr(layer_sequences, "UNROLLED_LAYERS", 4)

    def count(pairs):
        layers, model = dict(layers=2 * pairs, layers_of=f"(near far)*{pairs}"), model_on("windows")
        model = model.replace(model=dataclasses.replace(model.config, **layers))
        return sum(1 for _ in equations(greedy(model, tokens=3), *inputs(model, prompt=5)))

    assert count(3) == count(6) < count(2)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("windows", (3, 2, 1)),  # 4 layers on 3 ranks: uneven
        ("windows", (2, 1, 2)),
        ("windows", (1, 2, 1, 1, 2, 2)),
        ("windows of latents", (2, 2, 2)),
        ("one window", (2, 1, 2)),
        ("windows of kinds", (3, 1, 1, 1, 1, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("prefill", "chunk"), [(2, 5), (7, 1)], ids=str)
def test_a_layers_cache_is_as_long_as_its_window(name, mesh, prefill, chunk):
    """Prompts shorter than the window and longer, then tokens one at a time or more of them than the cache has."""
    check_decoding(name, model_on(name, mesh), prefill=prefill, chunk=chunk)


def test_a_cache_has_a_windows_slots_for_each_layer_with_it():
    lengths = {"windows": {3: 2, 12: 2}, "one window": {3: 4}, "gqa": {12: 4}}
    for name, layers in lengths.items():
        model = model_on(name)
        decoder = Decoder(model.config, model.plan.rows, model.mesh)
        of_places = shapes_of(model, lambda decoder=decoder: decoder.caches(2, SEQ).of_sequences[0])
        found = [(form.length, entries["k"].shape) for place in of_places for form, entries in place.items()]
        assert sorted(found) == sorted(
            (length, (2, 2, length, 4)) for length, count in layers.items() for _ in range(count)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mesh, schedule, virtual",
    [
        ("gqa", (2, 2, 2), "interleaved", 2),
        ("mla", (3, 1, 2), "one_f_one_b", 1),  # 4 layers on 3 ranks: uneven
        pytest.param("moe", (3, 1, 1, 1, 1, 2), "one_f_one_b", 1, marks=pytest.mark.slow),
        pytest.param("mixed", (2, 1, 1, 1, 1, 2), "interleaved", 2, marks=pytest.mark.slow),
    ],
)
def test_a_model_stored_for_another_order_of_layers_decodes_the_same(name, mesh, schedule, virtual):
    check_decoding(name, model_on(name, mesh, PLAIN, schedule, virtual))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("name", "mesh"), [("gqa", (2, 1, 2)), pytest.param("one window", (1, 1, 1), marks=pytest.mark.slow)]
)
def test_where_queries_are_scaled_first_decoding_reads_the_same_cache(name, mesh, monkeypatch):
    """Keys are cached as they are, so the logits are those of the forward pass that scales scores."""
    full_forward(name)
    scaled = []
    monkeypatch.setattr(attention, "scales_queries_first", lambda: scaled.append(True) or True)
    check_decoding(name, model_on.__wrapped__(name, mesh))
    assert scaled


def check_decoding(name, model, *, prefill=7, chunk=1):
    prompts, expected_BSV, filled_BS = full_forward(name)
    logits_BSV = decoded_logits(model, params_on(name, model), prompts, prefill=prefill, chunk=chunk)
    # Sums of float32 in another order: 1e-5 of the largest.
    worst = np.abs(logits_BSV - expected_BSV)[filled_BS].max() / np.abs(expected_BSV).max()
    assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matmul", "scales"), [("int8", "delayed"), ("float8", "delayed"), ("int8", "row"), ("float8", "mxfp8")]
)
def test_decoding_in_the_latent_space_rounds_what_8_bit_products_round(matmul, scales):
    """A sum in another order may round an entry to the other neighbour. Without rounding of latents and kernels, logits
    were 10 % off with int8, 24 % with float8."""
    plain = model_on("mla")
    model = plain.replace(model=dataclasses.replace(plain.config, matmul=matmul, matmul_scales=scales))
    prompts, _, filled_BS = full_forward("mla")
    slot_BS = np.arange(SEQ, dtype=np.int32) - prompts.empty_B[:, None]
    batch = dict(tokens=prompts.ids_BS, labels=np.where(filled_BS, prompts.ids_BS, -1).astype(np.int32))
    batch |= dict(segments=filled_BS.astype(np.int32), positions=np.maximum(slot_BS, 0).astype(np.int32))
    own = flatten(whole_params("mla"))
    params = unflatten(model.shapes, lambda name, leaf: own.get(name, np.zeros(leaf.shape, leaf.dtype)))
    params = with_first_scales(model, jax.device_put(params, model.shardings), batch, 0)
    arrays = (batch[name] for name in ("tokens", "segments", "positions"))
    expected_BSV = np.asarray(jax.jit(model.logits)(params, *arrays))
    found_BSV = np.asarray(decoded_logits(model, params, prompts, prefill=7))
    off = np.linalg.norm((found_BSV - expected_BSV)[filled_BS]) / np.linalg.norm(expected_BSV[filled_BS])
    assert off < 5e-3
    np.testing.assert_array_equal(found_BSV.argmax(-1)[filled_BS], expected_BSV.argmax(-1)[filled_BS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mesh, schedule, virtual, kind",
    [
        ("mla", (1, 2, 2), "gpipe", 1, "float8"),
        pytest.param("gqa", (2, 2, 2), "interleaved", 2, "int8", marks=pytest.mark.slow),
        pytest.param("mixed", (2, 1, 1, 1, 1, 2), "gpipe", 1, "int8", marks=pytest.mark.slow),
    ],
)
def test_decoding_rounds_the_matrices_that_training_gathers_in_8_bits(name, mesh, schedule, virtual, kind):
    prompts, plain_BSV, filled_BS = full_forward(name)
    alone, model = (
        each.replace(fsdp=dataclasses.replace(each.fsdp, gather_dtype=kind))
        for each in (model_on(name), model_on(name, mesh, PLAIN, schedule, virtual))
    )
    slot_BS = np.arange(SEQ, dtype=np.int32) - prompts.empty_B[:, None]
    batch = prompts.ids_BS, filled_BS.astype(np.int32), np.maximum(slot_BS, 0)
    expected_BSV = np.asarray(jax.jit(alone.logits)(params_on(name, alone), *batch))
    found_BSV = decoded_logits(model, params_on(name, model), prompts, prefill=7)
    largest = np.abs(expected_BSV).max()
    assert np.abs(expected_BSV - plain_BSV)[filled_BS].max() / largest > 1e-3
    assert np.abs(found_BSV - expected_BSV)[filled_BS].max() / largest < 1e-5


def unflatten(tree, value):
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: value(jax.tree_util.keystr(path, simple=True, separator="."), leaf), tree
    )


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_a_prompt_has_no_square_of_scores(name):
    """It attends to itself in blocks; the tokens after it, one at a time, have a row of scores."""
    model, prompt = model_on(name), 4 * LONGEST_SIDE["cpu"]
    traced = equations(greedy(model, tokens=3), *inputs(model, prompt=prompt))
    made = [var.aval.shape for one in traced for var in one.outvars]
    assert not [shape for shape in made if sum(size >= prompt for size in shape) > 1]
    assert any(sum(size == LONGEST_SIDE["cpu"] for size in shape) > 1 for shape in made)  # blocks


def greedy(model, *, tokens):
    """`write` of a decoder that takes the likeliest."""
    pick = lambda key, logits_BV, rows_B, positions_B: logits_BV.argmax(axis=-1).astype(np.int32)  # noqa: E731
    decoder = Decoder(model.config, model.plan.rows, model.mesh)
    return functools.partial(decoder.write, pick=pick, tokens=tokens, ends=())


def inputs(model, *, prompt):
    """Shapes of what `write` reads."""
    prompts = Prompts(jax.ShapeDtypeStruct((2, prompt), np.int32), jax.ShapeDtypeStruct((2,), np.int32))
    return model.shapes, prompts, jax.random.key(0)


def test_bfloat16_caches_are_bfloat16():
    model = model_on("mla")
    narrow = Decoder(dataclasses.replace(model.config, dtype="bfloat16"), model.plan.rows, model.mesh)
    caches = shapes_of(model, lambda: narrow.caches(2, 5).of_sequences[0])[3][CacheForm("dense", 5)]
    # Latent attention keeps d_latent + d_rope numbers a token and layer, whatever the number of heads.
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in caches.items()} == {
        "latent": ((2, 5, 16), "bfloat16"),
        "k_rope": ((2, 5, 4), "bfloat16"),
    }


def shapes_of(model, make):
    """The shapes of what is made on a model's mesh."""
    out = jax.sharding.PartitionSpec("dp", "tp", "pp")
    return jax.eval_shape(lambda: jax.shard_map(make, mesh=model.mesh, in_specs=(), out_specs=out)())


def test_a_prompt_goes_on_beside_others_as_it_does_alone():
    model = model_on(SHORT)
    params = params_on(SHORT, model)
    together = generate(model, params, ROWS_OF_PROMPTS, GREEDY)
    alone = generate(model, params, [[1, 2]], GREEDY)
    assert together[1].tolist() == alone[0].tolist()
    assert together[0].tolist() != together[1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout", [("gqa", PLAIN), *(pytest.param(name, OTHER, marks=pytest.mark.slow) for name in ("mla", "mixed"))]
)
def test_a_seed_writes_the_same_on_every_mesh(name, layout):
    written = []
    for mesh in [(1, 1, 1), (2, 2, 2), (1, 8, 1), (1, 2, 1, 1, 2, 2)]:
        model = model_on(name, mesh, layout)
        ids = generate(model, params_on(name, model), [[9, 8, 7, 6, 5], [1, 2], [1, 2]], SAMPLED)
        written.append([row.tolist() for row in ids])
    assert all(ids == written[0] for ids in written)
    assert written[0][1] != written[0][2], "rows draw their own noise"


def test_writing_stops_at_the_end_and_keeps_to_the_vocab():
    model = model_on(SHORT)
    params, prompt = params_on(SHORT, model), LONGEST_PROMPT
    (free,) = generate(model, params, [prompt], GREEDY)
    end = int(free[4])
    (stopped,) = generate(model, params, [prompt], GREEDY, ends=[end])
    assert stopped.tolist() == free[: free.tolist().index(end)].tolist()
    (bounded,) = generate(model, params, [prompt], dataclasses.replace(GREEDY, temperature=5.0), vocab=7)
    assert max(bounded) < 7


def test_each_row_stops_at_the_first_of_several_ends():
    """Rows of different lengths, on a mesh that shards them: the others go on."""
    alone, model = model_on(SHORT), model_on(SHORT, (2, 2, 2))
    free = [row.tolist() for row in generate(alone, params_on(SHORT, alone), ROWS_OF_PROMPTS, GREEDY)]
    ends = [free[0][3], free[1][6]]
    expected = [row[: min([row.index(end) for end in ends if end in row], default=len(row))] for row in free]
    written = generate(model, params_on(SHORT, model), ROWS_OF_PROMPTS, GREEDY, ends=ends)
    assert [row.tolist() for row in written] == expected and len({*map(len, expected)}) > 1


def test_another_seed_writes_another_text_without_compiling_again(caplog):
    model = model_on(SHORT)
    params = params_on(SHORT, model)
    first = generate(model, params, [LONGEST_PROMPT], SAMPLED)
    with jax.log_compiles():
        again, other = (
            generate(model, params, [LONGEST_PROMPT], dataclasses.replace(SAMPLED, seed=seed)) for seed in (3, 4)
        )
    assert first[0].tolist() == again[0].tolist() != other[0].tolist()
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(SHORT, (1, 1, 1)), (SHORT, (2, 1, 2)), pytest.param("mla", (2, 2, 2), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_text_comes_in_pieces_as_it_is_written_whole_and_nothing_compiles_while_it_grows(name, mesh, caplog):
    model = model_on(name, mesh)
    params, prompt = params_on(name, model), LONGEST_PROMPT
    (whole,) = generate(model, params, [prompt], SAMPLED)
    pieces = stream(model, params, prompt, SAMPLED, length=8, every=3)
    ids = [*next(pieces), *next(pieces)]
    with jax.log_compiles():
        ids += [number for piece in pieces for number in piece]
        again = stream(model, params, [3, 2, 1], SAMPLED, length=8, every=2, tokens=7)
        assert [len(piece) for piece in again] == [1, 2, 2, 2]
    assert ids == whole.tolist() and "Compiling" not in caplog.text


def test_a_text_in_pieces_ends_before_an_end():
    model = model_on(SHORT)
    params, prompt = params_on(SHORT, model), LONGEST_PROMPT
    (free,) = generate(model, params, [prompt], GREEDY)
    ends = [int(free[4])]
    (whole,) = generate(model, params, [prompt], GREEDY, ends=ends)
    assert [number for piece in stream(model, params, prompt, GREEDY, ends=ends) for number in piece] == whole.tolist()


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "there are no prompts; give at least one"),
        ([[1], []], "prompt 1 is float64 of shape [0]; a prompt is a list of whole token ids, of one or more"),
        ([[1, 64]], "prompt 0 has token id 64; the model knows 0 to 63 (model.vocab=64)"),
        ([[-1, 3]], "prompt 0 has token id -1; the model knows 0 to 63 (model.vocab=64)"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_is_compiled(prompts, message):
    with pytest.raises(ConfigError) as error:
        generate(model_on("gqa"), None, prompts, GREEDY)
    assert str(error.value) == message


def test_a_text_that_would_outgrow_its_factors_is_refused():
    """Of longrope: from its limit on, all tokens are rotated by others, those in the cache too."""
    factors = dict(rope_short_factors="1 1 1 1", rope_long_factors="2 2 2 2", rope_original_seq=20)
    model = SimpleNamespace(config=model_config(attention="gqa", rope_scaling="longrope", **factors))
    tokens = GREEDY.tokens
    with pytest.raises(
        ConfigError, match=f"prompt 1 of 20 tokens and {tokens} new ones pass .*=20, .* at most 1 tokens"
    ):
        generate(model, None, [[1] * 21, [1] * 20], GREEDY)


WRITES_LITTLE = ["--prompt", "It", "--tokens", "1", "--pp", "1", "--dp", "1", "--tp", "1"]


def test_the_command_goes_on_from_a_prompt_on_any_mesh(whole_run, capsys):
    common = ["--workdir", str(whole_run), "--prompt", "It is", "--tokens", "12", "--top_k", "5"]
    assert main([*common, "--pp", "1", "--dp", "1", "--tp", "1"]) == 0
    single = capsys.readouterr()
    assert main([*common, "--pp", "2", "--dp", "1", "--ep", "2", "--tp", "2", "--step", "8"]) == 0
    cut = capsys.readouterr()
    assert main([*common, "--pp", "1", "--dp", "2", "--cp", "4", "--tp", "1"]) == 0
    assert single.out == cut.out == capsys.readouterr().out
    assert single.out.startswith("It is") and len(single.out) > len("It is\n")
    assert f"step 8 of {whole_run} on pp2·dp1·ep2·tp2" in cut.err and "tokens/s" in cut.err


@pytest.mark.slow
def test_the_command_runs_as_a_module(whole_run):
    command = [sys.executable, "-m", "parallax.generate", "--workdir", str(whole_run), "--prompt", "It"]
    mesh = ["--pp", "2", "--dp", "1", "--tp", "2", "--simulate", "4", "--tokens", "40"]
    ended = subprocess.run([*command, *mesh], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("It")
    assert ended.stderr.splitlines()[1].startswith("note: 42 tokens are more than the 32 of the windows")
    assert len(ended.stderr.splitlines()) == 3


@pytest.mark.parametrize(
    "flags, status, message",
    [
        ([], 2, 'there is no prompt; write --prompt "TEXT", once for each text to generate'),
        (["--prompt", "a", "--prompt", ""], 2, "--prompt='' has no tokens; give it at least one character"),
        (["--prompt", "\udc80"], 2, "--prompt='\\udc80' has half a surrogate pair at character 0"),
        (["--prompt", "a", "--stop", ""], 2, "--stop='' holds no text; leave it out, or write at least one character"),
        (["--prompt", "a", "--top_p", "1.5"], 2, "sample.top_p=1.5 must be above 0 and at most 1 (off)"),
        (["--prompt", "a", "--top_k", "x"], 2, "argument --top-k: invalid int value: 'x'"),
        (["--prompt", "a", "--temprature=1"], 2, "unknown argument '--temprature=1'; did you mean '--temperature'?"),
        (["--prompt", "a", "def"], 2, "unknown argument 'def'; known: --workdir, --step, --prompt, --stop"),
        (["--prompt", "a", "--step", "5"], 3, "there is no checkpoint of step 5 in "),
        (["--prompt", "a", "--tp", "3"], 2, "choose with --config.mesh.pp, --config.mesh."),
        (["--prompt", "a", "--config.mesh.tp=3"], 2, "choose with --config.mesh.pp, --config.mesh."),
        (["--prompt", "a", "--mesh.tp=2"], 2, "unknown flag --mesh.tp; did you mean --config.mesh.tp?"),
        (["--prompt", "a", "--config.mesh.tpp=2"], 2, "unknown key --config.mesh.tpp; did you mean 'tp'?"),
        (["--prompt", "a", "--config.mesh.tp=2", "def"], 2, "stray argument 'def'"),
        (
            ["--prompt", "a", "--workdir", "nowhere", "--config.mesh.tp=2"],
            3,
            "--workdir=nowhere is not the folder of a run: it has no config.json",
        ),
        (
            ["--prompt", "a", "--workdir", "nowhere"],
            3,
            "nowhere/config.json is missing; is nowhere the folder of a run?",
        ),
    ],
)
def test_what_the_command_refuses_is_one_line(whole_run, capsys, flags, status, message):
    assert main(["--workdir", str(whole_run), *flags]) == status
    *before, last = capsys.readouterr().err.splitlines()
    assert message in last and all("/config.json " in line for line in before)


@pytest.mark.parametrize("words", [["--config.mesh.tp=2", "--config.mesh.dp=1"], ["--tp=2", "--dp=1"]], ids=str)
def test_flags_of_the_mesh_are_those_of_other_commands_and_keys_of_a_sample_too(words, whole_run, capsys):
    texts = []
    for written in (["--tokens=3", "--seed=7"], ["--config.sample.tokens=3", "--config.sample.seed", "7"]):
        assert main([f"--workdir={whole_run}", "--prompt=It is", *words, *written]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert "on pp1·dp1·tp2\n" in captured.err and "up to 3 tokens in" in captured.err
    assert texts[0] == texts[1]


def test_a_folder_without_a_checkpoint_is_named(whole_run, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((whole_run / name).read_bytes())
    assert main(["--workdir", str(tmp_path), "--prompt", "a"]) == 3
    assert f"CheckpointError: {tmp_path} has no checkpoint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_newest_step_is_named_and_the_one_before_it_writes(whole_run, tmp_path, capsys, damage):
    shutil.copytree(whole_run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "8" / "params" / "d").iterdir():  # some are of no array any more
        damage(path)
    command = ["--workdir", str(tmp_path / "run"), *WRITES_LITTLE]
    assert main(command) == 0
    error = capsys.readouterr().err
    assert "the checkpoint of step 8 is damaged: its file params/d/" in error and "going on with step 4\n" in error
    assert f"step 4 of {tmp_path / 'run'} on pp1·dp1·tp1" in error
    # Who asks for a step gets that one or none.
    assert main([*command, "--step", "8"]) == 3
    assert "is damaged" in capsys.readouterr().err


def test_a_step_is_read_by_the_tokenizer_that_it_carries(whole_run, tmp_path, capsys):
    command = ["--workdir", str(tmp_path / "run"), *WRITES_LITTLE, "--temperature", "0"]
    shutil.copytree(whole_run, tmp_path / "run")
    assert main(command) == 0
    before = capsys.readouterr().out
    other = tmp_path / "run" / "tokenizer.json"
    other.write_text("of another run")
    assert main(command) == 0 and capsys.readouterr().out == before
    (tmp_path / "run" / "checkpoints" / "8" / "tokenizer.json").write_text(other.read_text())
    assert main(command) == 0
    assert "step 8 is damaged: its file tokenizer.json has 14 bytes" in capsys.readouterr().err


def test_complete_is_the_prompt_and_more():
    model = model_on(SHORT, (2, 2, 2))
    (text,) = complete(model, params_on(SHORT, model), Bytes(), [Bytes().encode("\n\t")], GREEDY, ends=[Bytes.end])
    assert text.startswith("\n\t") and len(text) > 2


def test_a_text_ends_before_the_first_of_the_texts_to_stop_at(whole_run):
    run = px.load(whole_run)
    how = {"tokens": 12, "temperature": 0.0}
    free = run.generate("It is", **how)
    assert run.generate("It is", stop="It", **how) == free, "the prompt is not searched"
    one, two = free[8], free[9:11]
    assert run.generate("It is", stop=[two], **how) == free[: free.index(two, 5)]
    stops = [free.index(text, 5) for text in (one, two)]
    assert run.generate("It is", stop=[two, one, "nowhere"], **how) == free[: min(stops)]
    with pytest.raises(ConfigError, match="stop=3 is not a text; write it in quotes"):
        run.generate("It is", stop=[3], **how)
    with pytest.raises(ConfigError, match="there are no prompts; give at least one"):
        run.generate([], **how)


def test_several_prompts_are_generated_together_as_alone(whole_run, capsys):
    run, prompts = px.load(whole_run), ["It is", "A truth universally", "x"]
    how = {"tokens": 6, "temperature": 0.0}
    texts = [run.generate(prompt, **how) for prompt in prompts]
    assert run.generate(prompts, **how) == texts and len({*texts}) == 3
    mesh = ["--pp=1", "--dp=2", "--tp=1", "--simulate=0"]
    flags = [f"--prompt={prompt}" for prompt in prompts]
    assert main(["--workdir", str(whole_run), *flags, "--tokens=6", "--temperature=0", *mesh]) == 0
    printed = "".join(f"==> {number} of 3 <==\n{text}\n" for number, text in enumerate(texts, 1))
    assert capsys.readouterr().out == printed


def test_a_text_that_cannot_be_written_is_said_and_is_no_success(whole_run, monkeypatch, capsys):
    """On a full disk; whoever closes the pipe has seen enough, and that is none."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--workdir", str(whole_run), *WRITES_LITTLE]) == 2
    assert capsys.readouterr().err.endswith("the output is incomplete: No space left on device\n")
