"""A layer sends what its docstring says: its trace holds those collectives, and no other."""

import importlib
import inspect
import pkgutil
from collections import Counter
from functools import partial

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.communication_sections import Item, expected, sections
from support.sharded_layers import IN_FAMILIES, SIZES, call, declared, residual_layers, windows
from support.step_collectives import step_collectives
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, build, mesh_of, model_config

import parallax.sharding.einsum as contraction
from parallax import model as layers
from parallax.analysis.traced.collectives import collectives
from parallax.model.attention import attend_over_context
from parallax.model.context import Context
from parallax.model.dense import Dense
from parallax.model.dropout import Dropout
from parallax.model.families import CONTEXTS, FAMILIES
from parallax.model.halo import reshard_seen
from parallax.model.kernels.blockwise import blockwise_attention
from parallax.model.lora import LoRA
from parallax.model.loss import cross_entropy
from parallax.model.mask import Mask
from parallax.model.mla import MLA, Reshard, Up
from parallax.model.rope import Rope
from parallax.model.transformer import Block, Parts
from parallax.pipeline.embed_and_head import BatchedHead, MicrobatchHead, Tokens
from parallax.sharding import collectives as moves
from parallax.sharding import streams
from parallax.sharding.collectives import as_varying
from parallax.sharding.layers_on_ranks import layers_from_ranks, layers_to_ranks
from parallax.sharding.layout import Layout
from parallax.sharding.zigzag import reshard_in_order, to_order

MESH = (2, 2, 2)
TOKENS, ROWS_OF_SEGMENTS = "batch/dp seq/cp", "batch/dp seq"


def sent(local, arrays, layouts, *, vary=True, sizes=MESH):
    """What a device calls forward and backward, as {(kind, axis): count}, when it runs `local` on pieces of arrays and
    takes the gradient in those of floats. They vary over every axis: the sum of a whole one's gradient is not counted.
    """
    varying = lambda x: as_varying(x) if vary else x  # noqa: E731
    mesh = mesh_of(*sizes)

    def passes(*pieces):
        y, pull = jax.vjp(local, *jax.tree.map(varying, pieces))
        gradients = [leaf for leaf in jax.tree.leaves(pull(y)) if leaf.dtype != jax.dtypes.float0]
        return as_varying(sum(leaf.sum() for leaf in gradients)[None])

    specs = jax.tree.map(lambda layout: Layout.parse(str(layout)).spec(mesh), layouts, is_leaf=_is_layout)
    mapped = jax.shard_map(passes, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names))
    found = {"forward": Counter(), "backward": Counter()}
    for one in collectives(mapped, *arrays, rank=dict.fromkeys(mesh.axis_names, 0), sizes=dict(mesh.shape)):
        found[one.direction][one.kind.replace("-", "_"), "/".join(one.axes)] += one.count
    return found["forward"], found["backward"]


def _is_layout(leaf):
    return isinstance(leaf, str | Layout)


def promised(thing, variant, facts, **others):
    """What the section says for a case in which these conditions hold."""
    section = sections(thing, **others)[variant]
    return expected(section.forward, facts), expected(section.backward, facts)


# ---- layers of the residual stream

LAYERS = {
    "norm": "",
    "layer_norm": "",
    **dict.fromkeys(
        ["mlp", "mlp_clamped", "mlp_plain", "gqa", "gqa_bias", "gqa kv_heads", "mla", "mla_latent_queries"], "family"
    ),
    **dict.fromkeys(["gqa_qk_norm", "gqa_qk_norm kv_heads"], "family"),
    **dict.fromkeys(["gqa_normed_together", "gqa_normed_together kv_heads"], "family"),
}
LAYERS |= {f"{part}_{form}": form for part in ("embedding", "head") for form in ("vocab_parallel", "all_to_all")}


@pytest.mark.fast(26)
@pytest.mark.parametrize(("family", "residual"), IN_FAMILIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_sends_what_it_says(name, family, residual):
    # Permutes of simulated pipeline ranks are gathers.
    sizes = (1, 4, 2) if family == "streams" else MESH
    found, said, _ = found_and_said(name, FAMILIES[family], family, residual, sizes)
    assert found == said


def found_and_said(name, how, family, residual, sizes):
    """What a layer of LAYERS sends on a mesh, what it says for its family, and its class."""
    as_plain = family == "streams" and name.startswith("mla")
    variant = LAYERS[name] if LAYERS[name] != "family" else "column_row" if as_plain else family
    name, _, kv = name.partition(" ")
    layer = residual_layers(residual, how, kv=kv or "kv_heads/tp")[name]
    rope = Rope(model_config(attention="gqa" if "gqa" in name else "mla"))
    layouts, params = declared(layer, rope)
    facts = {
        "it is cut over seq": residual == SEQ_CUT,
        "the residual is cut over d_model": residual == HIDDEN_CUT,
        "the last dim is cut over tp": residual == HIDDEN_CUT,
        "kv_heads are cut": not kv,
        "kv_heads are whole": bool(kv),
        "heads are normed together": name == "gqa_normed_together",
        "kv_heads are cut and normed together": name == "gqa_normed_together" and not kv,
        "d_latent_q > 0": name == "mla_latent_queries",
    }
    arrays = params, *windows()
    found = sent(call(layer, rope), arrays, (layouts, residual, TOKENS, TOKENS, ROWS_OF_SEGMENTS), sizes=sizes)
    return found, promised(type(layer), variant, facts), type(layer)


def added(*both):
    """Counts (forward, backward) of things that are sent one after the other."""
    return tuple(sum(counters, Counter()) for counters in zip(*both))


# A ring of 4 makes 3 hops.
ON_CONTEXT = (1, 1, 2, 1, 4)


def over_context(form, *, is_mla):
    """What the softmax core says that it sends over cp."""
    if form == "ring":
        return added(*3 * [promised(blockwise_attention, "a hop", {})], promised(blockwise_attention, "the end", {}))
    gathered = is_mla and form == "all_gather"
    core = promised(attend_over_context, form, {"they are cut over it": not gathered})
    return added(core, promised(MLA, form, {})) if gathered else core


@pytest.mark.fast(12)
@pytest.mark.parametrize(("family", "residual"), IN_FAMILIES)
@pytest.mark.parametrize("form", CONTEXTS)
@pytest.mark.parametrize("name", ["gqa", "gqa kv_heads", "mla", "mla_latent_queries"])
def test_attention_sends_over_context_ranks_what_it_says(name, form, family, residual):
    how = FAMILIES[family]._replace(context=CONTEXTS[form])
    found, said, layer = found_and_said(name, how, family, residual, ON_CONTEXT)
    assert found == added(said, over_context(form, is_mla=layer is MLA))


@pytest.mark.parametrize("residual", [HIDDEN_CUT, SEQ_CUT], ids=["hidden_cut", "seq_cut"])
@pytest.mark.parametrize("name", [name for name in LAYERS if "gqa" not in name and "mla" not in name])
def test_no_other_layer_sends_anything_over_context_ranks(name, residual):
    found, said, _ = found_and_said(name, FAMILIES["column_row"], "column_row", residual, ON_CONTEXT)
    assert found == said


def test_tokens_come_back_into_order_by_the_messages_that_are_said():
    layout = f"{ROWS_OF_SEGMENTS}/cp d_model"
    found = sent(lambda x: to_order(x, axis=1), ones(layout), (layout,), sizes=ON_CONTEXT)
    assert found == promised(to_order, "", {})


IN_ORDER, BY_ENTRIES, IN_ZIGZAG = "batch/dp seq d_model", "batch/dp seq d_model/cp", "batch/dp seq/cp d_model"


@pytest.mark.parametrize(
    ("before", "after"),
    [(IN_ZIGZAG, IN_ORDER), (IN_ORDER, IN_ZIGZAG), (IN_ZIGZAG, BY_ENTRIES), (BY_ENTRIES, IN_ZIGZAG)],
)
def test_a_move_of_tokens_sends_what_it_would_send_in_any_order(before, after):
    def sent_by(move):
        return sent(lambda x: move(f"{before} -> {after}", x), ones(before), (before,), sizes=ON_CONTEXT)

    plain = moves.gather_with_exchange if (before, after) == (IN_ZIGZAG, IN_ORDER) else moves.reshard
    assert sent_by(reshard_in_order) == sent_by(plain)


@pytest.mark.parametrize(("window", "tails"), [(2, 2), (3, 2), (4, 5), (8, 0)])
def test_a_window_has_the_tails_of_chunks_sent_and_no_other_keys(window, tails):
    """Of 4 ranks with two chunks of 2 tokens. A window of 4 reaches a chunk and a token before: from the chunk that is
    next but one, which each rank gets from both sides, and at the turn of the order once more. One of 8 sees all."""
    arrays = jax.ShapeDtypeStruct((2, 16, 3), "float32"), jax.ShapeDtypeStruct((2, 16), "int32")

    def sent_by(window):
        def move(x, segments):
            return reshard_seen([(f"{IN_ZIGZAG} -> {IN_ORDER}", x)], Mask(segments, window=window))[0]

        return sent(move, arrays, (IN_ZIGZAG, ROWS_OF_SEGMENTS), sizes=ON_CONTEXT)

    assert sent_by(window) == (added(*tails * [promised(reshard_seen, "a tail", {})]) if tails else sent_by(0))


@pytest.mark.parametrize("mesh", [(2, 1, 2, 1, 2), (1, 1, 1, 1, 4)], ids=str)
def test_the_batch_is_brought_into_context_order_once_a_step_as_is_said(mesh):
    model = build(mesh, schedule="one_f_one_b", microbatches=4)
    assert sent_in(Tokens.of, model) == said_of(promised(Tokens.of, "", {}))


def test_a_block_sends_what_its_parts_send():
    model = model_config(attention="gqa")
    family, residual = FAMILIES["column_row"], HIDDEN_CUT
    block = Parts.build(model, residual, family, None, 1, "batch/dp").blocks["dense"]
    parts = residual_layers(residual, family)

    def run(params, x, ids, positions, segments):
        context = Context(Rope(model).tables(positions), np.arange(len(ids)), None, Mask(segments))
        return block.apply({"params": params}, x, context)

    layouts, params = {}, {}
    for name, part in {"attention_norm": "norm", "attention": "gqa", "mlp_norm": "norm", "mlp": "mlp"}.items():
        layouts[name], params[name] = declared(parts[part], Rope(model))
    found = sent(run, (params, *windows()), (layouts, residual, *["batch/dp seq"] * 3))
    facts = {"the last dim is cut over tp": True, "heads are normed together": False}
    facts |= {"kv_heads are cut and normed together": False}
    whole = [promised(type(parts[part]), name, facts) for part, name in (("gqa", "column_row"), ("mlp", "column_row"))]
    whole += 2 * [promised(type(parts["norm"]), "", facts)]
    assert found == added(*whole)


# ---- layers that are what their strings say

X_IN = "batch/dp seq d_model"
DENSE = {
    "column": ("d_model d_ff/tp", X_IN, "batch/dp seq d_ff/tp"),
    "row": ("d_ff/tp d_model", "batch/dp seq d_ff/tp", "batch/dp seq d_model/tp"),
    "scatter": ("d_model/tp d_ff", "batch/dp seq d_model/tp", "batch/dp seq d_ff/tp"),
    "reduced": ("d_model/tp d_ff", "batch/dp seq d_model/tp", "batch/dp seq d_ff"),
}


def dense_facts(weight, x, y):
    contracted = "tp" in {axis for name in set(x.names) & set(weight.names) for axis in x.cut_of(name)}
    return {
        "it is cut over dp": "dp" in weight.used_axes(),
        "a contracted dim and `y` are cut over tp": contracted and "tp" in y.used_axes(),
        "a contracted dim is cut over tp and `y` is not": contracted and "tp" not in y.used_axes(),
    }


def ones(*layouts):
    return [np.ones([SIZES[dim] for dim in Layout.parse(text).names], np.float32) for text in layouts]


@pytest.mark.parametrize("module", [Dense, Up])
@pytest.mark.parametrize("form", DENSE)
def test_a_dense_sends_what_its_strings_say(form, module):
    weight, x_layout, y_layout = DENSE[form]
    dense = module(weight, x_layout, y_layout, SIZES)
    run = lambda kernel, x: dense.apply({"params": {"kernel": kernel}}, x)  # noqa: E731
    found = sent(run, ones(weight, x_layout), (weight, x_layout))
    assert found == promised(module, "", dense_facts(*map(Layout.parse, DENSE[form])), Dense=Dense)


# Where columns are whole, `sent` makes them vary, and their gradients are sums that no mesh needs.
@pytest.mark.parametrize("form", ["column", "row", "scatter", "row over seq"])
def test_an_adapter_sends_what_its_strings_say(form):
    weight, x, y = DENSE.get(form, (*DENSE["row"][:2], "batch/dp seq/tp d_model"))
    layer = LoRA(weight, x, y, SIZES, model=model_config(lora_rank=4, lora_on="*"), name="up")
    model = jax.eval_shape(layer.init, jax.random.key(0), *ones(x))["params"]
    layouts = {name: leaf.layout for name, leaf in model.items()}
    params = {name: np.ones(leaf.value.shape, np.float32) for name, leaf in model.items()}
    found = sent(lambda params, x: layer.apply({"params": params}, x), (params, *ones(x)), (layouts, x))
    weight, x, y = map(Layout.parse, (weight, x, y))
    facts, is_cut = dense_facts(weight, x, y), "tp" in {axis for name in x.names[2:] for axis in x.cut_of(name)}
    over_seq = "tp" in y.cut_of("seq")
    facts["a contracted dim is cut over tp and seq of `y` is not"] = is_cut and not over_seq
    facts["a contracted dim and seq of `y` are cut over tp"] = is_cut and over_seq
    facts["a contracted dim and columns are cut over tp"] = is_cut and not over_seq
    assert found == promised(LoRA, "", facts, Dense=Dense)


@pytest.mark.parametrize("method", ["absorb_query", "expand"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 4])
def test_an_absorbed_kernel_is_all_that_is_sent(family, method, rank):
    weight = FAMILIES[family].into("d_latent", "heads/tp d_head")
    narrow = "batch/dp seq heads/tp " + {"absorb_query": "d_head", "expand": "d_latent"}[method]
    latent, model = FAMILIES[family].input("d_latent"), model_config(lora_rank=rank, **{"lora_on": "*"} if rank else {})
    up = Up(weight, latent, "batch/dp seq heads/tp d_head", SIZES, model=model, name="up_k")
    shapes = jax.eval_shape(partial(up.init, method=method), jax.random.key(0), *ones(narrow))["params"]
    layouts = {name: leaf.layout for name, leaf in shapes.items()}
    params = {name: np.ones(leaf.value.shape, np.float32) for name, leaf in shapes.items()}
    found = sent(
        lambda params, x: up.apply({"params": params}, x, method=method), (params, *ones(narrow)), (layouts, narrow)
    )
    is_cut = family == "scatter"
    facts = {"it is cut over d_latent": is_cut, "there is one, cut over d_latent": is_cut and rank > 0}
    assert found == promised(Up, "absorbed", facts, Dense=Dense)


@pytest.mark.parametrize("after", ["batch/dp seq d_latent", "batch/dp seq d_latent/tp"])
def test_a_reshard_sends_what_its_layouts_say(after):
    before = "batch/dp seq d_latent/tp"
    found = sent(lambda x: Reshard(before, after).apply({}, x), ones(before), (before,))
    assert found == promised(Reshard, "", {"only `before` is cut over it": "tp" not in after})


def test_dropout_sends_nothing():
    dropout = Dropout(HIDDEN_CUT, SIZES, rate=0.5, site=0)
    run = lambda x, key: dropout.apply({}, x, np.arange(len(x)), jax.random.wrap_key_data(key))  # noqa: E731
    found = sent(run, [*ones(HIDDEN_CUT), np.zeros(2, np.uint32)], (HIDDEN_CUT, "entries"))
    assert found == promised(Dropout, "", {}) == (Counter(), Counter())


# ---- the loss, the pipeline's ends and the collectives themselves


@pytest.mark.parametrize("table", ["vocab/tp d_model", "vocab d_model"])
def test_cross_entropy_sends_what_it_says(table):
    cut, labels = "/tp" if "/tp" in table else "", np.zeros(4, np.int32)  # the same on all ranks of tp
    run = lambda logits: cross_entropy(logits, labels, Layout.parse(table), 1e-4)  # noqa: E731
    found = sent(run, [np.ones((8, 64), np.float32)], (f"batch/dp vocab{cut}",))
    assert found == promised(cross_entropy, "", {"the vocab is cut over tp": bool(cut)})


@pytest.mark.parametrize(
    ("schedule", "ends", "variant", "times"),
    [("one_f_one_b", MicrobatchHead, "a microbatch", 4), ("gpipe", BatchedHead, "a step", 1)],
)
def test_the_pipelines_ends_send_what_they_say(schedule, ends, variant, times):
    found = sent_in(ends, build(MESH, schedule=schedule, microbatches=4))
    assert found == said_of(promised(ends, variant, {}), times)


def sent_in(thing, model):
    """What the lines of a class or function send in a step, as {(direction, kind, axis): calls}."""
    (text, first), file = inspect.getsourcelines(thing), inspect.getmodule(thing).__name__.replace(".", "/")
    own, found = {f"{file}.py:{line}" for line in range(first, first + len(text))}, Counter()
    for one in step_collectives(model, 64, 16):
        if one.source in own:
            found[one.direction, one.kind.replace("-", "_"), *one.axes] += one.count
    return found


def said_of(both, times=1):
    """What is promised so many times, as `sent_in` has it."""
    ways = zip(("forward", "backward"), both)
    return {(way, *key): count * times for way, counts in ways for key, count in counts.items()}


def test_layers_that_change_ranks_are_packed_into_the_messages_that_are_said():
    model = build((4, 1, 2), schedule="zero_bubble_v", microbatches=4)
    both = [expected(getattr(sections(way)["a step"], direction), {})
            for way, direction in ((layers_to_ranks, "forward"), (layers_from_ranks, "backward"))]  # fmt: skip
    moved = [one for one in step_collectives(model, 64, 16) if one.module == "sharding/layers_on_ranks"]
    assert both == [Counter([("all_to_all", "pp")])] * 2
    assert {(one.direction, one.kind, one.axes): one.count for one in moved} == {
        ("forward", "all-to-all", ("pp",)): 1,
        ("backward", "all-to-all", ("pp",)): 1,
    }


CUT, WHOLE = "batch/dp seq d_model/tp", "batch/dp seq d_model"
OVER_SEQ = "batch/dp seq/tp d_model"
RESHARD = dict.fromkeys(
    [
        "`after` cuts over it",
        "`after` does not",
        "it changes its dim",
        "it goes",
        "it comes and x does not vary over it",
    ],
    False,
)
PERMUTES_WAIT = {"not `permutes_wait`": False, "`permutes_wait`": True}  # for the other stages of simulated devices
COLLECTIVES = [  # name, function, layout of x, conditions that hold; whether x varies over every axis
    ("all_gather", lambda x: moves.all_gather(f"{CUT} -> {WHOLE}", x), CUT, {}, True),
    ("gather_with_exchange", lambda x: moves.gather_with_exchange(f"{CUT} -> {WHOLE}", x), CUT, {}, True),
    ("reduce_scatter", lambda x: moves.reduce_scatter(f"{WHOLE} -> {CUT}", x), WHOLE, {}, True),
    ("exchange_and_add", lambda x: moves.exchange_and_add(f"{WHOLE} -> {CUT}", x), WHOLE, {}, True),
    ("all_reduce", lambda x: moves.all_reduce(f"{WHOLE} +tp -> {WHOLE}", x), WHOLE, {}, True),
    ("sum_over", lambda x: moves.sum_over(x, ["tp"]), WHOLE, {}, True),
    ("max_over", lambda x: moves.max_over(jax.lax.stop_gradient(x), ["tp"]) * x, WHOLE, {}, True),
    ("all_to_all", lambda x: moves.all_to_all(f"{CUT} -> {OVER_SEQ}", x), CUT, {}, True),
    ("permute", lambda x: moves.permute(WHOLE, x, axis="tp"), WHOLE, {}, True),
    ("to_next_rank", lambda x: moves.to_next_rank(x, "tp"), WHOLE, PERMUTES_WAIT, True),
    ("cut", lambda x: moves.cut(f"{WHOLE} -> {CUT}", x), WHOLE, {"x does not vary over it": False}, True),
    ("cut", lambda x: moves.cut(f"{WHOLE} -> {CUT}", x), WHOLE, {"x does not vary over it": True}, False),
    ("after", lambda x: moves.after(x, jax.lax.stop_gradient(x)), WHOLE, {}, True),
    ("as_varying", lambda x: as_varying(x, ["tp"]), WHOLE, {"x does not vary over them": False}, True),
    ("as_varying", lambda x: as_varying(x, ["tp"]), WHOLE, {"x does not vary over them": True}, False),
    ("einsum", lambda x: contraction.einsum(f"{CUT}, {CUT} -> batch/dp seq +tp", x, x), CUT, {}, True),
    ("reshard", lambda x: moves.reshard(f"{WHOLE} +tp -> {CUT}", x), WHOLE, {"`after` cuts over it": True}, True),
    ("reshard", lambda x: moves.reshard(f"{WHOLE} +tp -> {WHOLE}", x), WHOLE, {"`after` does not": True}, True),
    ("reshard", lambda x: moves.reshard(f"{CUT} -> {OVER_SEQ}", x), CUT, {"it changes its dim": True}, True),
    ("reshard", lambda x: moves.reshard(f"{CUT} -> {WHOLE}", x), CUT, {"it goes": True}, True),
    ("reshard", lambda x: moves.reshard(f"{WHOLE} -> {CUT}", x), WHOLE, {}, True),
    ("reshard", lambda x: moves.reshard(f"{WHOLE} -> {CUT}", x), WHOLE, {"it comes and x does not vary over it": True},
     False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "run", "layout", "facts", "vary"), COLLECTIVES, ids=[f"{c[0]}-{at}" for at, c in enumerate(COLLECTIVES)]
)
def test_a_collective_sends_what_it_says(name, run, layout, facts, vary):
    function = getattr(contraction if name == "einsum" else moves, name)
    said = promised(function, "", RESHARD | facts if name == "reshard" else facts)
    assert tuple(map(kinds, sent(run, ones(layout), (layout,), vary=vary))) == tuple(map(kinds, said))


def kinds(counter):
    """How often each kind is called, over whichever axes."""
    return Counter({kind: sum(n for (k, _), n in counter.items() if k == kind) for kind, _ in counter})


def test_values_for_the_next_rank_are_permuted_where_there_are_no_other_stages():
    said = promised(moves.to_next_rank, "", {fact: not waits for fact, waits in PERMUTES_WAIT.items()})
    found = sent(lambda x: moves.to_next_rank(x, "tp"), ones(WHOLE), (WHOLE,), sizes=(1, 2, 2))
    assert tuple(map(kinds, found)) == tuple(map(kinds, said))


@pytest.mark.parametrize(("ranks", "permutes"), [(2, 1), (4, 6)])
def test_token_streams_send_permutes_for_each_other_rank(ranks, permutes):
    """The tokens of each other rank there, and their sums back; of 4 ranks in halves."""

    def there_and_back(x):
        x = streams.gather_as_streams(f"{OVER_SEQ} -> {WHOLE}", x)
        return streams.reshard_streams(f"{WHOLE} +tp -> {OVER_SEQ}", x)

    found = sent(there_and_back, ones(OVER_SEQ), (OVER_SEQ,), sizes=(1, 8 // ranks, ranks))
    there = promised(streams.gather_as_streams, "", {})
    back = promised(streams.reshard_streams, "sums of streams", {})
    assert found == added(*permutes * [there, back])


# ---- nothing is left out


def modules_of(package):
    """Every Flax module that is written in a package."""
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for _, thing in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
            if issubclass(thing, nn.Module) and thing.__module__ == found.name:
                yield thing


def silent(modules):
    """Those that do not say what they send, inherited words not counted."""
    return [module.__name__ for module in modules if not (module.__doc__ and sections(module, Dense=Dense))]


def test_every_layer_says_what_it_sends():
    Silent = type("Silent", (nn.Module,), {"__doc__": "It sends something."})
    Heir = type("Heir", (Dense,), {})
    assert silent([Silent, Heir, MLA]) == ["Silent", "Heir"]
    modules = [module for module in modules_of(layers) if module is not Block]  # sends what its parts send
    assert len(modules) >= 10 and silent(modules) == []


def test_every_collective_has_a_case_here():
    is_function = lambda thing: inspect.isfunction(inspect.unwrap(thing)) if callable(thing) else False  # noqa: E731
    functions = {name: thing for module in (moves, contraction)
                 for name, thing in inspect.getmembers(module, is_function)  # those with a gradient of their own, too
                 if thing.__module__ == module.__name__ and not name.startswith("_")}  # fmt: skip
    public = {name for name, f in functions.items() if sections(f)}
    assert public >= {name for name, f in functions.items() if inspect.signature(f).return_annotation is jax.Array}
    assert public == {case[0] for case in COLLECTIVES}


def test_sections_are_read_as_they_are_written():
    section = sections(type(residual_layers(SEQ_CUT, FAMILIES["scatter"])["mlp"]))["scatter"]
    first, second = section.forward
    assert first == Item("all_to_all", 1, "tp", "it is cut over seq") and second == Item(
        "reduce_scatter", 3, "tp", None
    )
    assert [item.kind for item in section.backward] == ["all_to_all", "all_gather"]
    with pytest.raises(KeyError, match="cut over seq"):
        expected(section.forward, {})
