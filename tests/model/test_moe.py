"""A mixture of experts is a loop over experts, in values and gradients, on every mesh and in both exchanges."""

import functools
import itertools
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from support.communication_sections import expected as numbers
from support.communication_sections import sections
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, model_config
from support.traced_equations import equations

from parallax.analysis.traced.collectives import collectives
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.remat import saved_parts
from parallax.model.experts import exchange_costs, grouped, grouped_kernel, ragged
from parallax.model.experts import experts as experts_module
from parallax.model.experts.exchange import EXCHANGE_FORMS, EXCHANGES, SENT_AGAIN, plain_exchange
from parallax.model.experts.moe import MoE
from parallax.model.experts.ragged import BufferSizes, most_received
from parallax.model.experts.router import Router
from parallax.model.families import FAMILIES
from parallax.model.mlp import GatedMLP
from parallax.model.products import product_of, unit_of
from parallax.pipeline.split_program import select, split_backward
from parallax.sharding.collectives import as_varying
from parallax.sharding.eight_bits import to_eight_bits
from parallax.sharding.layout import Layout, named_leaves
from parallax.sharding.mesh import mesh_of
from parallax.sharding.parameter import layouts_of

ROWS, SEQ, EXPERTS, PLACES, WIDTH = 4, 8, 8, 2, 16
# Sums over up to 64 float32 terms, in another order.
ERROR = 1e-5
SIZES = dict(layers_of="moe*8", d_model=WIDTH, d_expert=8, experts=EXPERTS, experts_per_token=PLACES)
ROUTERS = {
    "softmax": {},
    "one expert": dict(experts_per_token=1, router_normalized=False),
    "three, not normalised": dict(experts_per_token=3, router_normalized=False, router_scale=2.5),
    "softmax, groups": dict(router_groups=4, router_groups_chosen=2, experts_per_token=3),
    "sigmoid": dict(router_score="sigmoid", router_scale=2.5),
    "sigmoid, groups": dict(router_score="sigmoid", router_groups=2, router_groups_chosen=1, experts_per_token=3),
    "shared": dict(shared_experts=2),
    "all experts": dict(experts_per_token=EXPERTS),
    "biases": dict(shared_experts=1, expert_bias=True, router_scale=2.5),
}
MESHES = [
    dict(ep=2), dict(ep=4), dict(tp=2), dict(cp=2), dict(dp=2), dict(ep=2, tp=2), dict(ep=2, cp=2), dict(ep=2, dp=2),
    dict(ep=4, tp=2), dict(ep=4, cp=2), dict(ep=2, tp=2, cp=2), dict(ep=2, dp=2, tp=2), dict(replica=2, ep=2),
]  # fmt: skip
AUXILIARY = dict(balance_coefficient=0.3, router_z_coefficient=0.2)


def mixture(residual=HIDDEN_CUT, family="column_row", *, model=None, **how):
    return MoE(model_config(**SIZES | (model or {})), residual, FAMILIES[family], 0.5, **how)


def declared(layer):
    """(layouts, values) of its parameters: all random, the bias too."""
    x = jnp.zeros((1, 1, layer.model.d_model), layer.model.dtype)
    boxed = jax.eval_shape(lambda key: layer.init(key, x, None), jax.random.key(0))["params"]
    rng = np.random.default_rng(2)
    fill = lambda s: rng.normal(0, 2 * s.shape[-2:][0] ** -0.5, s.shape).astype(np.float32)  # noqa: E731
    params = jax.tree.map(fill, nn.meta.unbox(boxed))
    params["router"]["bias"] = rng.normal(0, 0.1, EXPERTS).astype(np.float32)
    return layouts_of(boxed), params


def arrays(seed=0):
    """(x, a weight for each entry of the output)."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(ROWS, SEQ, WIDTH)).astype(np.float32) for _ in range(2))


def on_mesh(layer, layouts, sizes, *, row_weight=1 / ROWS):
    """`layer` cut over a mesh, a function of whole arrays."""
    mesh = mesh_of(**sizes)
    specs = jax.tree.map(lambda layout: layout.spec(mesh), layouts)
    residual = Layout.parse(layer.residual).spec(mesh)
    local = lambda params, x, weight: layer.apply({"params": params}, x, weight)  # noqa: E731
    cut = jax.shard_map(local, mesh=mesh, in_specs=(specs, residual, P()), out_specs=residual, check_vma=True)
    return lambda params, x: cut(params, x, None if row_weight is None else jnp.float32(row_weight))


def with_gradients(function, params, x, dy):
    """(y, gradients in params, gradient in x), as one compiled program."""

    def run(params, x):
        y, pull = jax.vjp(function, params, x)
        return y, *pull(jnp.asarray(dy, y.dtype))

    return jax.tree.map(np.asarray, jax.jit(run)(params, x))


def check(found, expected, error=ERROR):
    paths = jax.tree_util.tree_leaves_with_path(found)
    for (path, a), e in zip(paths, jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and np.isfinite(a).all(), path
        assert np.abs(a - e).max() <= error * max(np.abs(e).max(), 1e-30), (path, np.abs(a - e).max(), np.abs(e).max())


# ---- the plain form


def naive_choice(scores_E, model):
    """One token's experts: sorted by score, of equal ones the lower id first."""
    size = EXPERTS // model.router_groups
    groups = [range(first, first + size) for first in range(0, EXPERTS, size)]
    counting = 2 if model.router_score == "sigmoid" else 1
    worth = lambda group: sum(sorted(scores_E[e] for e in group)[-counting:])  # noqa: E731
    groups = sorted(groups, key=lambda group: (-worth(group), group[0]))[: model.router_groups_chosen]
    members = [e for group in groups for e in group]
    return sorted(members, key=lambda e: (-scores_E[e], e))[: model.experts_per_token]


def naive_scores(params, x, model):
    logits = x @ params["router"]["kernel"]
    if model.router_score == "sigmoid":
        return logits, 1 / (1 + jnp.exp(-logits))
    return logits, jnp.exp(logits) / jnp.exp(logits).sum(axis=-1, keepdims=True)


def naive_ids(params, x, model):
    scores = np.asarray(naive_scores(params, x, model)[1]) + np.asarray(params["router"]["bias"])
    return np.array([[naive_choice(token, model) for token in row] for row in scores])


def gated(x, gate, up, down, of_gate=0, of_up=0, of_down=0):
    hidden = x @ gate + of_gate
    return (hidden / (1 + jnp.exp(-hidden)) * (x @ up + of_up)) @ down + of_down


def naive(params, x, model, ids):
    """The output: every expert computes all tokens."""
    _, scores = naive_scores(params, x, model)
    weights = scores * (ids[..., None] == np.arange(EXPERTS)).any(axis=2)
    if model.router_normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    y = 0
    for expert in range(EXPERTS):
        kernels = [params["experts"][name][expert] for name in ("gate", "up", "down")]
        biases = []
        if model.expert_bias:
            biases = [*(params["experts"][f"{name}_bias"] for name in ("gate", "up")), params["down_bias"]]
            biases = [bias[expert][None, None] for bias in biases]
        y += model.router_scale * weights[..., expert, None] * gated(x, *kernels, *biases)
    if model.shared_experts:
        y += gated(x, *(params["shared"][name]["kernel"] for name in ("gate", "up", "down")))
    return y


def naive_losses(params, x, model, ids, balance_coefficient=0.0, router_z_coefficient=0.0):
    """The docstring of LossConfig, row by row."""
    logits, scores = naive_scores(params, x, model)
    total = 0
    for row in range(ROWS):
        share = np.bincount(ids[row].reshape(-1), minlength=EXPERTS) / ids[row].size
        p = scores[row] / scores[row].sum(axis=-1, keepdims=True)
        total += balance_coefficient * EXPERTS * (share * p.mean(axis=0)).sum() / ROWS
    return total + router_z_coefficient * (jnp.log(jnp.exp(logits).sum(axis=-1)) ** 2).mean()


def exact(params, x, dy, model, **coefficients):
    """What `with_gradients` must give, in float64; the bias' gradient are counts."""
    with jax.enable_x64(True):
        params, x, dy = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (params, x, dy))
        ids = naive_ids(params, x, model)
        loss = lambda params, x: (  # noqa: E731
            (naive(params, x, model, ids) * dy).sum() + naive_losses(params, x, model, ids, **coefficients)
        )
        run = lambda params, x: (naive(params, x, model, ids), *jax.grad(loss, argnums=(0, 1))(params, x))  # noqa: E731
        y, grads, dx = jax.tree.map(np.asarray, jax.jit(run)(params, x))
        grads["router"]["bias"] = np.bincount(ids.reshape(-1), minlength=EXPERTS)
        return y, grads, dx


@functools.cache
def of_router(router):
    """(parameters, what is expected) with the auxiliary losses."""
    layer = mixture(model=ROUTERS[router])
    _, params = declared(layer)
    return params, exact(params, *arrays(), layer.model, **AUXILIARY)


# ---- one device


@pytest.mark.fast(1)
@pytest.mark.parametrize("router", ROUTERS)
def test_alone_it_is_a_loop_over_experts(router):
    layer = mixture(model=ROUTERS[router], **AUXILIARY)
    params, expected = of_router(router)
    x, dy = arrays()
    function = lambda params, x: layer.apply({"params": params}, x, jnp.float32(1 / ROWS))  # noqa: E731
    found = with_gradients(function, params, x, dy)
    check(found, expected)
    np.testing.assert_array_equal(found[1]["router"]["bias"], expected[1]["router"]["bias"])


# ---- meshes


def check_on_mesh(sizes, *, residual=HIDDEN_CUT, family="column_row", router="softmax", **how):
    layer = mixture(residual, family, model=ROUTERS[router], **how, **AUXILIARY)
    layouts, _ = declared(layer)
    params, expected = of_router(router)
    found = with_gradients(on_mesh(layer, layouts, sizes), params, *arrays())
    check(found, expected)
    np.testing.assert_array_equal(found[1]["router"]["bias"], expected[1]["router"]["bias"])


CUTS = [(mesh, HIDDEN_CUT) for mesh in MESHES] + [(mesh, SEQ_CUT) for mesh in MESHES if "tp" in mesh]


def in_turn(*factors):
    """All combinations. Fast are those of each value of the first factor with one value of each other, in turn."""
    numbered = itertools.product(*(enumerate(factor) for factor in factors))
    cases = [tuple(zip(*case)) for case in numbered]
    fast = [all(n == at[0] % len(factor) for n, factor in zip(at[1:], factors[1:])) for at, _ in cases]
    return [
        pytest.param(*values, marks=[] if is_fast else pytest.mark.slow)
        for (_, values), is_fast in zip(cases, fast, strict=True)
    ]


@pytest.mark.fast(1)
@pytest.mark.parametrize(("cut", "exchange"), in_turn(CUTS, EXCHANGE_FORMS), ids=str)
def test_it_is_the_same_on_every_mesh(cut, exchange):
    mesh, residual = cut
    check_on_mesh(mesh, residual=residual, exchange=exchange)


TWO_MESHES = [dict(ep=4, tp=2), dict(ep=2, cp=2, tp=2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "mesh", "exchange"),
    in_turn([name for name in ROUTERS if name != "softmax"], TWO_MESHES, EXCHANGE_FORMS),
    ids=str,
)
def test_every_router_is_the_same_on_meshes(router, mesh, exchange):
    check_on_mesh(mesh, router=router, exchange=exchange)


@pytest.mark.slow
@pytest.mark.parametrize("residual", [HIDDEN_CUT, SEQ_CUT], ids=["hidden_cut", "seq_cut"])
@pytest.mark.parametrize("router", ["softmax", "shared"])
def test_both_families_give_the_same(router, residual):
    check_on_mesh(dict(ep=2, dp=2, tp=2), residual=residual, family="scatter", router=router)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("chunk_tokens", "residual", "exchange"), in_turn([1, 8], [SEQ_CUT, HIDDEN_CUT], EXCHANGES), ids=str
)
def test_chunks_of_tokens_give_the_same(chunk_tokens, residual, exchange):
    check_on_mesh(dict(ep=2, tp=2, dp=2), residual=residual, exchange=exchange, chunk_tokens=chunk_tokens)


# ---- products in 8 bits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fake_product(form, x, kernel, amax):
    """A product in 8 bits, in float32; the gradient of `amax` are the largest magnitudes that it meets."""
    return fake(x, amax[0], product_of(form).operand) @ fake(kernel, amax[1], product_of(form).operand)


def fake(x, amax, kind):
    unit = unit_of(amax, kind)
    return to_eight_bits(x, unit, kind).astype(jnp.float32) * unit


def fake_gradients(form, saved, dy):
    x, kernel, amax = saved
    kinds, most = product_of(form), [jnp.abs(array).max() for array in (x, kernel, dy)]
    dx = fake(dy, amax[2], kinds.gradient) @ fake(kernel, amax[1], kinds.operand).T
    return dx, jnp.einsum("BSI,BSO->IO", x, dy), jnp.stack(most)


fake_product.defvjp(lambda form, *args: (fake_product(form, *args), args), fake_gradients)


def emulated(form, params, x, amaxes, ids):
    """The output, every expert computing all tokens; `amaxes` [3, E, 3] are those of gate, up and down."""
    _, scores = naive_scores(params, x, model_config(**SIZES))
    weights = scores * (ids[..., None] == np.arange(EXPERTS)).any(axis=2)
    weights, y, product = weights / weights.sum(axis=-1, keepdims=True), 0, functools.partial(fake_product, form)
    for expert in range(EXPERTS):
        gate, up, down = (params["experts"][name][expert] for name in KERNELS)
        hidden = nn.silu(product(x, gate, amaxes[0, expert])) * product(x, up, amaxes[1, expert])
        y += product(hidden * weights[..., expert, None], down, amaxes[2, expert])
    return y


KERNELS = "gate", "up", "down"
AMAXES = dict(gate_amax=[2.5, 1.8, 0.2], up_amax=[9.0, 2.0, 0.3], down_amax=[2.0, 0.9, 2.9])  # some entries are clipped
ROUNDING_ERROR = 1e-3  # of a norm: of what lies between two 8-bit numbers a few entries are rounded to the other one


@functools.cache
def in_8_bits(form):
    """(parameters, (output, gradients, gradient in x)) as emulated; of scales the gradients are the maxima."""
    _, params = declared(mixture(matmul_of_experts=form))
    params["experts"] |= {name: np.float32(amax) for name, amax in AMAXES.items()}
    x, dy = arrays()
    ids = naive_ids(params, x, model_config(**SIZES))
    amaxes = np.stack([np.tile(params["experts"][f"{name}_amax"], (EXPERTS, 1)) for name in KERNELS])
    amaxes[1, :, 0] = amaxes[0, :, 0]  # gate and up have one input, which is rounded once
    y, pull = jax.vjp(functools.partial(emulated, form, ids=ids), params, x, amaxes)
    grads, dx, most = pull(dy)
    grads["experts"] |= {f"{name}_amax": np.asarray(most[at].max(axis=0)) for at, name in enumerate(KERNELS)}
    del grads["router"]["bias"]
    return params, jax.tree.map(np.asarray, (y, grads, dx))


def check_in_8_bits(form, found, leave_out=()):
    params, expected = in_8_bits(form)
    del found[1]["router"]["bias"]
    for name in leave_out:
        del found[1]["experts"][name]
    paths = dict(jax.tree_util.tree_leaves_with_path(expected))
    for path, a in jax.tree_util.tree_leaves_with_path(found):
        assert np.linalg.norm(a - paths[path]) <= ROUNDING_ERROR * np.linalg.norm(paths[path]), path


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [0, 8])
@pytest.mark.parametrize("form", ["int8", "float8"])
def test_experts_in_8_bits_are_products_of_rounded_operands(form, chunk_tokens):
    layer = mixture(matmul_of_experts=form, chunk_tokens=chunk_tokens)
    function = lambda params, x: layer.apply({"params": params}, x, jnp.float32(1 / ROWS))  # noqa: E731
    check_in_8_bits(form, with_gradients(function, in_8_bits(form)[0], *arrays()))
    plain = with_gradients(
        lambda params, x: mixture().apply({"params": params}, x, jnp.float32(1 / ROWS)), in_8_bits(form)[0], *arrays()
    )
    expected = in_8_bits(form)[1]
    assert np.linalg.norm(plain[0] - expected[0]) > 5 * ROUNDING_ERROR * np.linalg.norm(expected[0])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "mesh", "exchange"), in_turn(["int8", "float8"], TWO_MESHES, EXCHANGES), ids=str)
def test_experts_in_8_bits_are_the_same_on_meshes(form, mesh, exchange):
    """The maxima are left out: here they would be added up over the mesh."""
    layer = mixture(matmul_of_experts=form, exchange=exchange)
    layouts, _ = declared(layer)
    found = with_gradients(on_mesh(layer, layouts, mesh), in_8_bits(form)[0], *arrays())
    check_in_8_bits(form, found, leave_out=AMAXES)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8 row compute", "float8 row compute"])
def test_experts_in_8_bits_add_their_biases_to_products_of_rounded_operands(form):
    """Beside those in float32: a bias is not rounded, and its gradient sums those of products, which are not either."""
    model = ROUTERS["biases"]
    _, params = declared(mixture(model=model, matmul_of_experts=form))

    def passes(**how):
        layer = mixture(model=model, **how)
        function = lambda params, x: layer.apply({"params": params}, x, jnp.float32(1 / ROWS))  # noqa: E731
        return with_gradients(function, params, *arrays())

    (y, grads, _), (expected, wanted, _) = passes(matmul_of_experts=form), passes()
    norm = np.linalg.norm
    assert 0 < norm(y - expected) <= 0.1 * norm(expected)
    pairs = [(tree["experts"]["gate_bias"], tree["experts"]["up_bias"], tree["down_bias"]) for tree in (grads, wanted)]
    for found, other in zip(*pairs, strict=True):
        assert norm(found - other) <= 0.1 * norm(other)


# ---- where tokens go


def steered(to):
    """Parameters with which the bias sends every token where it says: the experts with the largest come first."""
    _, params = declared(mixture(model=ROUTERS["sigmoid"]))
    params["router"]["bias"] = np.zeros(EXPERTS, np.float32)
    for place, expert in enumerate(to):
        params["router"]["bias"][expert] = 100 - place
    return params


@pytest.mark.fast(1)
@pytest.mark.parametrize("exchange", EXCHANGE_FORMS)
@pytest.mark.parametrize("to", [(5, 2), (7, 6), (0, 1)], ids=str)
def test_all_tokens_may_go_to_the_same_experts(to, exchange):
    """So others get none; and one rank may get all, or none."""
    layer = mixture(model=ROUTERS["sigmoid"], exchange=exchange, **AUXILIARY)
    params, (layouts, _) = steered(to), declared(layer)
    expected = exact(params, *arrays(), layer.model, **AUXILIARY)
    assert sorted(np.nonzero(expected[1]["router"]["bias"])[0]) == sorted(to)
    check(with_gradients(on_mesh(layer, layouts, dict(ep=4, tp=2)), params, *arrays()), expected)


def test_the_slices_are_those_of_the_picture_in_the_page():
    """docs/ep.md: what two ranks receive, whose rows are sorted by expert, with room for four and for three units."""
    rows, counts = [["b", "c", "a"], ["d", "e", "f"]], jnp.array([[1, 1, 1, 0], [0, 2, 0, 1]])

    def received(start, units):
        buffers, slices = [["-"] * units for _ in rows], ragged.slices_of(counts, start, units)
        for (expert, rank), size in np.ndenumerate(slices.size):
            source, place = int(slices.source[expert, rank]), int(slices.place[expert, rank])
            buffers[expert // 2][place : place + size] = rows[rank][source : source + size]
        return [" ".join(buffer) for buffer in buffers]

    assert received(0, 4) == ["b c d e", "a f - -"]
    assert [received(start, 3) for start in (0, 3)] == [["b c d", "a f -"], ["e - -", "- - -"]]


def as_documented(x, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, axis_index_groups):
    """`jax.lax.ragged_all_to_all`, which XLA does not have on CPUs, from its documentation; NaN where ranks disagree on
    how much is sent."""
    groups = np.array(axis_index_groups or [range(lax.axis_size(axis_name))])
    ranks, me = groups.shape[1], jnp.argmax((groups == lax.axis_index(axis_name)).any(axis=0))
    gathered = functools.partial(lax.all_gather, axis_name=axis_name, axis_index_groups=axis_index_groups)
    to_me = lambda array: gathered(array).reshape(ranks, ranks, -1)[:, me]  # noqa: E731
    begins, sizes, places = map(to_me, (input_offsets, send_sizes, output_offsets))
    row = jnp.arange(len(output))
    wide = lambda mask: mask.reshape(-1, *(1 for _ in x.shape[1:]))  # noqa: E731
    for rank, sent in enumerate(gathered(x)):
        for begin, size, place in zip(begins[rank], sizes[rank], places[rank]):
            found = sent.at[begin + row - place].get(mode="clip")
            output = jnp.where(wide((row >= place) & (row < place + size)), found, output)
    return jnp.where((sizes.reshape(-1) == recv_sizes).all(), output, jnp.nan)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [dict(ep=4), dict(ep=2, tp=2)], ids=str)
@pytest.mark.parametrize("exchange", EXCHANGE_FORMS)
def test_an_exchange_has_the_values_and_gradients_of_the_plain_one(exchange, mesh, monkeypatch):
    """With what accelerators send, in two rounds and further ones: all tokens choose an expert of the first rank. With
    biases, which each round adds, and whose gradients all rounds do."""
    monkeypatch.setattr(ragged, "platform_traced", lambda: "tpu")
    monkeypatch.setattr(ragged, "LEAST_UNITS", 1)
    monkeypatch.setattr(lax, "ragged_all_to_all", as_documented)
    layer = mixture(model=ROUTERS["biases"])
    layouts, params = declared(layer)
    params["router"]["bias"][0] = 100

    def passes(form):
        monkeypatch.setitem(EXCHANGE_FORMS, "gather", form)
        return with_gradients(on_mesh(layer, layouts, mesh), params, *arrays())

    form = EXCHANGE_FORMS[exchange]
    check(passes(form), passes(plain_exchange))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", ["several", "two at once", "one"])
@pytest.mark.parametrize(
    ("mesh", "to", "how"),
    [
        (dict(ep=4), (5, 2), {}),
        (dict(ep=4), (), dict(matmul_of_experts="int8")),
        (dict(ep=4, tp=2), (), {}),
        (dict(ep=2, tp=2), (5, 2), dict(chunk_tokens=8)),
        (dict(dp=2, ep=2), (), dict(chunk_tokens=8)),
    ],
    ids=str,
)
def test_what_accelerators_send_is_what_cpus_gather(mesh, to, how, rounds, monkeypatch):
    """And what the other exchange gives. Only accelerators have several rounds."""

    def passes(exchange):
        layer = mixture(model=ROUTERS["sigmoid"], exchange=exchange, **how)
        layouts, params = declared(layer)
        params["router"]["bias"][[*to]] = 100
        if how.get("matmul_of_experts"):
            params["experts"] |= {name: np.float32(amax) for name, amax in AMAXES.items()}
        return with_gradients(on_mesh(layer, layouts, mesh), params, *arrays())

    stand_in = passes("ragged")
    if not how.get("matmul_of_experts"):  # of maxima a mesh would add up
        check(stand_in, passes("gather"))
    monkeypatch.setattr(ragged, "platform_traced", lambda: "tpu")
    monkeypatch.setattr(lax, "ragged_all_to_all", as_documented)
    if rounds == "two at once":
        monkeypatch.setattr(ragged, "LEAST_UNITS", 1)
    if rounds == "one":
        monkeypatch.setattr(ragged, "usual_rows", lambda choices, room, ranks: room)
    for form in ("ragged", SENT_AGAIN):
        check(passes(form), stand_in, 0 if rounds == "one" else ERROR)


@pytest.mark.parametrize("form", ["ragged", SENT_AGAIN])
def test_no_branch_for_further_rounds_returns_what_it_is_given(form, monkeypatch):
    """XLA would copy it: the gradients of all of a layer's experts, once more."""
    monkeypatch.setattr(ragged, "platform_traced", lambda: "tpu")
    layer = mixture(exchange=form)
    layouts, params = declared(layer)
    run = on_mesh(layer, layouts, dict(ep=4))
    traced = equations(lambda *given: jax.vjp(run, *given[:2])[1](given[2]), params, *arrays())
    branches = [branch.jaxpr for each in traced if each.primitive.name == "cond" for branch in each.params["branches"]]
    assert len(branches) == 6  # forward, for the tokens' gradients and for the kernels'
    assert not any(out in branch.invars for branch in branches for out in branch.outvars)


@pytest.mark.slow
def test_the_first_products_of_the_backward_pass_wait_for_shared_experts(monkeypatch):
    """Of the gradient of these one number is read: where it is NaN, no rows are multiplied."""
    layer = mixture(model=ROUTERS["shared"], exchange="ragged")
    layouts, params = declared(layer)

    def d_gate(read):
        monkeypatch.setattr(ragged, "_probe", lambda x: jnp.full((), read, x.dtype))
        return with_gradients(on_mesh(layer, layouts, dict(ep=2)), params, *arrays())[1]["experts"]["gate"]

    assert d_gate(0).any() and not d_gate(np.nan).any()


@pytest.mark.fast(1)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_kernels_of_accelerators_give_the_same_layer(platform, exchange, monkeypatch):
    """Those for gated experts and, on GPUs, for all products of groups, interpreted."""
    layer = mixture(model=ROUTERS["shared"], exchange=exchange)
    (layouts, params), sent = declared(layer), arrays()
    expected = with_gradients(on_mesh(layer, layouts, dict(ep=2)), params, *sent)
    if platform == "tpu":
        monkeypatch.setattr(experts_module, "has_kernel", lambda x: x.unit is None)
        monkeypatch.setattr(grouped_kernel, "BLOCK_ROWS", (8,))
        monkeypatch.setattr(exchange_costs, "ROWS_STEP", 8)
    else:
        for module in (experts_module, grouped):
            monkeypatch.setattr(module, "fits_triton", lambda x, *widths: x.unit is None)
    check(with_gradients(on_mesh(layer, layouts, dict(ep=2)), params, *sent), expected)


def test_rounds_send_each_row_once_and_to_its_place():
    """Whatever the load: each rank fills its room round by round, by expert, and then by the rank that sends."""
    rng = np.random.default_rng(0)
    for rounds, sent in itertools.product(((1,), (3,), (1, 4), (7, 2), (100,)), (None, 0, 1, 9, 1000)):
        counts, sizes = rng.integers(0, 6, (4, 8)), BufferSizes(rounds, 1000, sent=sent)
        arrived, left = [[] for _ in range(4)], max(0, int(sizes.further_units(jnp.asarray(counts))))
        assert sent is not None or left == max(0, int(most_received(counts)) - sum(rounds))
        further = range(-(-left // rounds[-1]))
        slices = sizes.usual_slices(jnp.asarray(counts))
        slices += [sizes.further_slices(jnp.asarray(counts), number) for number in further]
        for number, (units, of_round) in enumerate(zip([*rounds, *(rounds[-1] for _ in further)], slices, strict=True)):
            size, source, place = map(np.asarray, of_round)
            for rank in range(4):
                own = {}
                for expert, sender in itertools.product(range(2 * rank, 2 * rank + 2), range(4)):
                    for at in range(size[expert, sender]):
                        own[int(place[expert, sender]) + at] = (sender, int(source[expert, sender]) + at)
                assert sorted(own) == [*range(len(own))] and len(own) <= units
                assert sent is None or number >= len(rounds) or all(at < sent for _, at in own.values())
                arrived[rank] += [own[at] for at in sorted(own)]
        for rank in range(4):
            wanted = []
            for expert, sender in itertools.product(range(2 * rank, 2 * rank + 2), range(4)):
                first = counts[sender, :expert].sum()
                wanted += [(sender, int(first) + at) for at in range(counts[sender, expert])]
            # What a rank may not send in the first rounds comes behind what others may.
            assert arrived[rank] == wanted if sent is None else sorted(arrived[rank]) == sorted(wanted)


@pytest.mark.fast(1)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_of_exact_ties_the_lower_ids_are_chosen(exchange):
    layer = mixture(model=ROUTERS["softmax"], exchange=exchange)
    layouts, params = declared(layer)
    params["router"] = {"kernel": np.zeros((WIDTH, EXPERTS), np.float32), "bias": np.zeros(EXPERTS, np.float32)}
    params["router"]["kernel"][:, 3] = -30 * np.eye(WIDTH)[0]  # 3 alone is better or worse than all others
    found = with_gradients(on_mesh(layer, layouts, dict(ep=4, tp=2)), params, *arrays())
    check(found, exact(params, *arrays(), layer.model))
    first = (arrays()[0][..., 0] < 0).sum()
    expected = [ROWS * SEQ, ROWS * SEQ - first, 0, first, *[0] * (EXPERTS - 4)]
    np.testing.assert_array_equal(found[1]["router"]["bias"], expected)


def test_the_bias_chooses_and_weighs_nothing():
    """What it says of all experts alike changes nothing."""
    layer = mixture(model=ROUTERS["sigmoid"])
    _, params = declared(layer)
    x, _ = arrays()
    apply = jax.jit(lambda params: layer.apply({"params": params}, x, None))
    before = apply(params)
    params["router"]["bias"] = params["router"]["bias"] + np.float32(0.5)
    np.testing.assert_array_equal(apply(params), before)


@pytest.mark.slow
def test_without_a_row_weight_there_are_no_gradients_but_those_of_the_output():
    layer = mixture(model=ROUTERS["sigmoid"], **AUXILIARY)
    layouts, params = declared(layer)
    for function in (
        lambda params, x: layer.apply({"params": params}, x, None),
        on_mesh(layer, layouts, dict(ep=4, cp=2), row_weight=None),
    ):
        _, grads, dx = with_gradients(function, params, *arrays())
        _, expected, expected_dx = exact(params, *arrays(), layer.model)
        assert not grads["router"].pop("bias").any() and expected["router"].pop("bias").any()
        check((grads, dx), (expected, expected_dx))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mesh", "loss"), in_turn([dict(dp=1), dict(ep=4, tp=2), dict(cp=2, dp=2, tp=2)], AUXILIARY), ids=str
)
def test_an_auxiliary_loss_has_the_gradient_of_its_formula(loss, mesh):
    """Where nothing else has one."""
    layer = mixture(model=ROUTERS["sigmoid"], **{loss: 0.3})
    layouts, params = declared(layer)
    x, dy = arrays()
    found = with_gradients(on_mesh(layer, layouts, mesh), params, x, 0 * dy)
    expected = exact(params, x, 0 * dy, layer.model, **{loss: 0.3})
    check(found, expected)
    assert np.abs(found[2]).max() > 1e-4


@pytest.mark.slow
def test_microbatches_have_the_gradients_of_their_batch():
    layer = mixture(**AUXILIARY)
    _, params = declared(layer)
    x, dy = arrays()
    function = lambda params, x: layer.apply({"params": params}, x, jnp.float32(1 / ROWS))  # noqa: E731
    _, whole, _ = with_gradients(function, params, x, dy)
    halves = [with_gradients(function, params, x[at], dy[at])[1] for at in (slice(0, 1), slice(1, ROWS))]
    check(jax.tree.map(np.add, *halves), whole)


# ---- numbers, and what is kept


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bfloat16_is_near_float32_where_the_choice_is_the_same(exchange):
    """Inputs, products and what travels are rounded to 8 bits, 2^-9 each; sums and the router are float32."""
    layer = mixture(model=ROUTERS["sigmoid"] | dict(dtype="bfloat16"), exchange=exchange)
    params, (layouts, _) = steered((1, 6)), declared(layer)
    x, dy = (np.asarray(jnp.asarray(a, jnp.bfloat16)) for a in arrays())
    y, grads, dx = with_gradients(on_mesh(layer, layouts, dict(ep=2, tp=2)), params, x, dy)
    assert y.dtype == dx.dtype == jnp.bfloat16 and all(g.dtype == np.float32 for g in jax.tree.leaves(grads))
    expected = exact(params, np.float32(x), np.float32(dy), layer.model)
    check(jax.tree.map(np.float64, (y, grads, dx)), expected, error=2**-5)


def test_the_backward_pass_keeps_no_weights():
    """They are at hand: what is kept of them is what was given."""
    layer = mixture(**AUXILIARY)
    _, params = declared(layer)
    seen = []

    def run(params, x):
        _, pull = jax.vjp(lambda params, x: layer.apply({"params": params}, x, jnp.float32(1)), params, x)
        given = {id(leaf) for leaf in jax.tree.leaves(params)}
        seen.extend(leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in given)
        return x

    jax.eval_shape(run, params, arrays()[0])
    rows = ROWS * SEQ * PLACES
    wide = [leaf.shape for leaf in seen if leaf.size >= rows * 8]
    assert sorted(wide) == sorted([(rows, 8)] * 2 + [(ROWS, SEQ, WIDTH)]), wide


def test_chunks_keep_what_comes_in():
    """And nothing of what they compute: the rows of experts exist for one chunk."""
    layer, x = mixture(chunk_tokens=8), arrays()[0]
    _, params = declared(layer)
    kept = jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: layer.apply({"params": p}, x, None), p, x)[1], params, x)
    sizes = [leaf.size for leaf in jax.tree.leaves(kept)]
    weights = [leaf.size for leaf in jax.tree.leaves(params)]
    assert max(size for size in sizes if size not in weights) == x.size
    outs = [
        var.aval.shape for e in equations(lambda p: layer.apply({"params": p}, x, None), params) for var in e.outvars
    ]
    rows = {shape[0] for shape in outs if shape[1:] == (8,) and shape[0] > EXPERTS}
    assert rows and max(rows) <= 8 * PLACES + 8  # of a chunk, filled up to a block


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_wide_products_are_kept_by_their_name(exchange):
    layer, x = mixture(exchange=exchange, **AUXILIARY), arrays()[0]
    _, params = declared(layer)

    def forward(params, x):
        y, pull = jax.vjp(lambda params, x: layer.apply({"params": params}, x, 1 / ROWS), params, x)
        return [y, *jax.tree.leaves(pull)]

    chosen = select(jax.make_jaxpr(forward)(params, x), now=[0], names=saved_parts("attention"))
    _, *kept = jaxpr_as_fun(chosen.make)(*jax.tree.leaves((params, x)))
    assert [leaf.shape for leaf in kept] == 2 * [(ROWS * SEQ * PLACES, 8)]


# ---- what is sent


def sent(layer, sizes, *, simulated=True):
    """What the first device calls forward and backward, {(kind, axis): calls}; weights vary over every axis."""
    layouts, params = declared(layer)
    mesh = abstract_mesh(sizes, simulated=simulated)
    specs = jax.tree.map(lambda layout: layout.spec(mesh), layouts)

    def passes(params, x):
        y, pull = jax.vjp(lambda params, x: layer.apply({"params": params}, x, 0.5), *map(as_varying_tree, (params, x)))
        return as_varying(sum(leaf.sum() for leaf in jax.tree.leaves(pull(y)))[None])

    residual = Layout.parse(layer.residual).spec(mesh)
    mapped = jax.shard_map(passes, mesh=mesh, in_specs=(specs, residual), out_specs=P(mesh.axis_names))
    found = {"forward": Counter(), "backward": Counter()}
    for one in collectives(mapped, params, arrays()[0], rank=dict.fromkeys(sizes, 0), sizes=sizes):
        found[one.direction][one.kind.replace("-", "_"), *one.axes] += one.count
    return found["forward"], found["backward"]


def as_varying_tree(tree):
    return jax.tree.map(as_varying, tree)


def promised(thing, variant="", **facts):
    section = sections(thing)[variant]
    return tuple(numbers(items, facts) for items in section)


@pytest.mark.fast(2)
@pytest.mark.parametrize("residual", [HIDDEN_CUT, SEQ_CUT], ids=["hidden_cut", "seq_cut"])
@pytest.mark.parametrize("router", ["softmax", "shared"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_it_sends_what_its_parts_say(exchange, router, residual):
    layer = mixture(residual, model=ROUTERS[router], exchange=exchange, **AUXILIARY)
    sizes = {"pp": 1, "dp": 1, "cp": 2, "ep": 2, "tp": 2}
    parts = [promised(MoE), promised(EXCHANGES[exchange]), promised(Router, **{"there is a balance loss": True})]
    parts += [promised(GatedMLP, "column_row")] if layer.model.shared_experts else []
    said = tuple(sum(counters, Counter()) for counters in zip(*parts))
    assert sent(layer, sizes, simulated=False) == said


def test_the_stand_in_of_cpus_gathers():
    found = sent(mixture(exchange="ragged"), {"pp": 1, "dp": 1, "ep": 4, "tp": 1})
    said = promised(EXCHANGES["ragged"])[0]
    assert found[0]["all_gather", "ep"] == said["all_gather", "ep"] + said["all_to_all", "ep"]
    assert not any("all_to_all" in key for key in found[0])


# ---- the backward pass in two


@pytest.mark.slow
def test_the_products_of_weights_are_left_for_later():
    """Those of experts are in loops; the counts, which cost no product, come with the gradient of the input."""
    layer = mixture(model=ROUTERS["shared"], **AUXILIARY)
    _, params = declared(layer)
    names = [*named_leaves(params)]

    def gradients(params, x, dy):
        _, pull = jax.vjp(lambda params, x: layer.apply({"params": params}, x, 1 / ROWS), params, x)
        return jax.tree.leaves(pull(dy))

    args = params, *arrays()
    split = split_backward(jax.make_jaxpr(gradients)(*args), wanted=[len(names)], readable=())
    assert [names[at] for at in range(len(names)) if at not in split.deferred] == ["router/bias"]
    counts, dx, *b_residuals = jaxpr_as_fun(split.first)(*jax.tree.leaves(args))
    later = jaxpr_as_fun(split.second)(*b_residuals)
    by_name = dict(zip(names, [None] * len(names))) | {names[at]: x for at, x in zip(split.deferred, later)}
    by_name["router/bias"] = counts
    for found, whole in zip([*by_name.values(), dx], jax.jit(gradients)(*args), strict=True):
        check(np.asarray(found), np.asarray(whole))
