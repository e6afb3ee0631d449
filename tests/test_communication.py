"""A layer sends what its docstring says: its trace holds the collectives of this table, and no other."""

from collections import Counter

import jax
import numpy as np
import pytest
from cut_layers import SIZES, call, declared, residual_layers, windows
from jax.sharding import PartitionSpec as P
from jaxprs import equations, sent
from tiny import HIDDEN_CUT, SEQ_CUT, mesh_of, model_config

from parallax.collectives import as_varying
from parallax.layers.dense import Dense
from parallax.layers.families import FAMILIES
from parallax.notation import Layout


def forward_and_backward(layer, rope, layouts, params, x, x_layout):
    """What a layer sends in its own two passes; parameters vary already, so their gradients are summed elsewhere."""
    specs = jax.tree.map(Layout.spec, layouts, is_leaf=lambda leaf: isinstance(leaf, Layout))

    def trace(local):
        local_varying = lambda params, *arrays: local(jax.tree.map(as_varying, (params, *arrays)))  # noqa: E731
        in_specs = (specs, Layout.parse(x_layout).spec(), P("dp"), P("dp"), P("dp"))
        return jax.shard_map(local_varying, mesh=mesh_of(2, 2, 2), in_specs=in_specs, out_specs=P(("pp", "dp", "tp")))

    def passes(everything):
        (params, x, *rest) = everything
        y, pull = jax.vjp(lambda params, x: call(layer, rope)(params, x, *rest), params, x)
        return summary(pull(y))

    _, *rest = windows()
    both = Counter(sent(equations(trace(passes), params, x, *rest)))
    alone = trace(lambda everything: summary(call(layer, rope)(*everything)))
    forward = Counter(sent(equations(alone, params, x, *rest)))
    return forward, both - forward


def summary(tree):
    """One number a device, so that any output fits the same out_specs."""
    return as_varying(sum(leaf.sum() for leaf in jax.tree.leaves(tree))[None])


def expected(text):
    """Counter of "2 all_reduce, all_gather": over tp."""
    found = Counter()
    for words in filter(None, text.split(", ")):
        count, kind = words.split() if " " in words else ("1", words)
        found[f"{kind} tp"] += int(count)
    return found


H, S = HIDDEN_CUT, SEQ_CUT
TABLE = [
    ("norm", "column_row", H, "all_reduce", "all_reduce"),
    ("norm", "column_row", S, "", ""),
    ("mlp", "column_row", H, "all_gather, reduce_scatter", "all_gather, reduce_scatter"),
    ("mlp", "column_row", S, "all_gather, reduce_scatter", "all_gather, reduce_scatter"),
    ("mlp", "scatter", H, "3 reduce_scatter", "3 all_gather"),
    ("mlp", "scatter", S, "all_to_all, 3 reduce_scatter", "3 all_gather, all_to_all"),
    ("gqa_bias", "column_row", H, "all_gather, reduce_scatter", "all_gather, reduce_scatter"),
    ("gqa_bias", "column_row", S, "all_gather, reduce_scatter", "all_gather, reduce_scatter"),
    ("gqa_bias", "scatter", H, "4 reduce_scatter", "4 all_gather"),
    ("gqa_bias", "scatter", S, "all_to_all, 4 reduce_scatter", "4 all_gather, all_to_all"),
    # Key heads that are not cut: their partial sums are all-reduced, and so are the gradients of their readers.
    ("gqa kv_heads", "column_row", H, "all_gather, reduce_scatter", "all_gather, reduce_scatter"),
    ("gqa kv_heads", "scatter", H, "2 reduce_scatter, 2 all_reduce", "2 all_gather, 2 all_reduce"),
    # Two gathers: of x, and of the narrow latent behind its norm.
    ("mla", "column_row", H, "2 all_gather, all_reduce, reduce_scatter", "all_gather, all_reduce, 2 reduce_scatter"),
    ("mla", "column_row", S, "2 all_gather, all_reduce, reduce_scatter", "all_gather, all_reduce, 2 reduce_scatter"),
    # The rotated key is all-reduced forward, and its gradient, of which each rank's heads have a part, backward.
    ("mla", "scatter", H, "5 reduce_scatter, 2 all_reduce", "5 all_gather, 2 all_reduce"),
    ("mla", "scatter", S, "all_to_all, 5 reduce_scatter, 2 all_reduce", "5 all_gather, 2 all_reduce, all_to_all"),
    # Compressed queries have a norm and a latent of their own.
    (
        "mla_latent_queries",
        "column_row",
        H,
        "3 all_gather, 2 all_reduce, reduce_scatter",
        "all_gather, 2 all_reduce, 3 reduce_scatter",
    ),
    ("mla_latent_queries", "scatter", H, "6 reduce_scatter, 3 all_reduce", "6 all_gather, 3 all_reduce"),
    ("embedding_vocab_parallel", "column_row", H, "reduce_scatter", "all_gather"),
    ("embedding_vocab_parallel", "column_row", S, "reduce_scatter", "all_gather"),
    ("embedding_all_to_all", "column_row", H, "all_to_all", "all_to_all"),
    ("embedding_all_to_all", "column_row", S, "", ""),
    ("head_vocab_parallel", "column_row", H, "all_reduce, all_gather", "all_reduce, reduce_scatter"),
    ("head_vocab_parallel", "column_row", S, "all_gather", "reduce_scatter"),
    ("head_all_to_all", "column_row", H, "all_reduce, all_to_all", "all_reduce, all_to_all"),
    ("head_all_to_all", "column_row", S, "", ""),
]


def without_data_axis(found):
    """A table is gathered over dp, and its gradient scattered: Dense's part, which has a test of its own."""
    return Counter({key: count for key, count in found.items() if not key.endswith(" dp")})


@pytest.mark.parametrize(("name", "family", "residual", "forward", "backward"), TABLE)
def test_a_layer_sends_what_it_says(name, family, residual, forward, backward):
    name, _, kv = name.partition(" ")
    layer = residual_layers(residual, FAMILIES[family].gathered(), kv=kv or "kv_heads/tp")[name]
    rope = model_config(attention="gqa" if "gqa" in name else "mla").rope
    layouts, params = declared(layer, rope)
    found = forward_and_backward(layer, rope, layouts, params, windows()[0], residual)
    assert tuple(map(without_data_axis, found)) == (expected(forward), expected(backward))
    section = type(layer).__doc__.partition("Communication")[2]
    assert all(key.split()[0] in section for key in found[0]), "the docstring leaves a collective out"


DENSE = {
    "column": ("d_model/dp d_ff/tp", "batch/dp seq d_model", "batch/dp seq d_ff/tp", "", ""),
    "row": ("d_ff/tp d_model/dp", "batch/dp seq d_ff/tp", "batch/dp seq d_model/tp", "reduce_scatter", "all_gather"),
    "scatter": (
        "d_model/tp/dp d_ff",
        "batch/dp seq d_model/tp",
        "batch/dp seq d_ff/tp",
        "reduce_scatter",
        "all_gather",
    ),
    "reduced": ("d_model/tp/dp d_ff", "batch/dp seq d_model/tp", "batch/dp seq d_ff", "all_reduce", ""),
}


@pytest.mark.parametrize("form", DENSE)
def test_a_dense_gathers_its_kernel_over_dp_and_scatters_its_gradient(form):
    weight, x_layout, y_layout, forward, backward = DENSE[form]
    kernel, x = (np.ones([SIZES[dim] for dim in Layout.parse(text).names], np.float32) for text in (weight, x_layout))
    dense, layouts = Dense(weight, x_layout, y_layout, SIZES), {"kernel": Layout.parse(weight)}
    found = forward_and_backward(dense, None, layouts, {"kernel": kernel}, x, x_layout)
    assert found[0] == expected(forward) + Counter(["all_gather dp"])
    assert found[1] == expected(backward) + Counter(["reduce_scatter dp"])
