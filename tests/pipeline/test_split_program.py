"""A divided program computes what the whole one does: beside jax.vjp, on a layer of products, a norm and a branch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from parallax.errors import ConfigError
from parallax.jaxprs import within
from parallax.pipeline.split_program import PRODUCTS, select, split_backward

ROWS, WIDTH = 3, 4


def layer(weights, x):
    """Two products, the first in a function of its own, a scale, and a product in a branch."""
    hidden = checkpoint_name(jax.jit(lambda w, x: x @ w)(weights["up"], x), "ffn")
    y = checkpoint_name(jnp.tanh(hidden) * weights["scale"][None], "swiglu") @ weights["down"]
    return x + jax.lax.cond(y.sum() > 0, lambda w: y @ w, lambda w: y @ w.T, weights["last"])


@functools.cache
def arrays():
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in ("down", "last", "up")}
    weights["scale"] = rng.normal(size=WIDTH).astype(np.float32)
    x, dy = rng.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return weights, x, dy


def gradients(weights, x, dy):
    """The simple form: those of the weights, in the order of their names, and that of x."""
    return jax.tree.leaves(jax.vjp(layer, weights, x)[1](dy))


def products(program):
    return sum(each.primitive.name in PRODUCTS for top in program.eqns for each in (top, *within(top)))


@pytest.mark.parametrize("readable", [(), (4,)], ids=["nothing is read again", "x is read again"])
def test_both_halves_of_a_backward_pass_give_the_gradients_of_jax_vjp(readable):
    given, names = jax.tree.leaves(arrays()), ["down", "last", "scale", "up", "x"]
    whole = jax.make_jaxpr(gradients)(*arrays())
    split = split_backward(whole, wanted=[names.index("x")], readable=readable)
    # The branch gives the gradients of its weight and of its input together; a scale's gradient is a sum.
    assert [names[place] for place in split.deferred] == ["down", "up"] and split.reads == readable
    last, scale, dx, *b_residuals = jaxpr_as_fun(split.first)(*given)
    later = jaxpr_as_fun(split.second)(*(given[place] for place in split.reads), *b_residuals)
    now = {names.index(name): grad for name, grad in dict(last=last, scale=scale, x=dx).items()}
    found = dict(zip(split.deferred, later)) | now
    for place, expected in enumerate(gradients(*arrays())):
        np.testing.assert_allclose(found[place], expected, rtol=1e-6, atol=1e-6)
    assert products(split.first) and products(split.second)
    assert products(split.first) + products(split.second) == products(whole)  # none is computed twice


@pytest.mark.parametrize(("names", "kept"), [((), ()), (("ffn",), ("ffn",)), (("ffn", "swiglu"), ("ffn", "swiglu"))])
def test_a_forward_pass_and_what_recomputes_the_rest_give_the_vjp_of_jax(names, kept):
    weights, x, dy = arrays()

    def forward(weights, x):
        y, pull = jax.vjp(layer, weights, x)
        return [y, *jax.tree.leaves(pull)]

    given = jax.tree.leaves((weights, x))
    chosen = select(jax.make_jaxpr(forward)(weights, x), now=[0], names=names)
    assert chosen.names == kept
    y, *saved = jaxpr_as_fun(chosen.make)(*given)
    np.testing.assert_allclose(y, layer(weights, x), rtol=1e-6)
    residuals = jaxpr_as_fun(chosen.recompute)(*given, *saved)
    pull = jax.tree.unflatten(jax.tree.structure(jax.vjp(layer, weights, x)[1]), residuals)
    for one, other in zip(jax.tree.leaves(pull(dy)), gradients(weights, x, dy), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_name_that_remat_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="'fnn'\\) in a layer: pipeline.remat has no such part"):
        select(jax.make_jaxpr(lambda x: [x, checkpoint_name(x, "fnn")])(1.0), now=[0], names=())
