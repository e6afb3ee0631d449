"""Every collective sends what its pattern says, forward and backward, on each axis; NumPy says what that is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.numpy_collectives import (
    SIZES,
    along,
    exchanged,
    forward_of,
    gathered,
    kept,
    on_mesh,
    pieces_of,
    scattered,
    transpose,
)
from support.tiny_model import mesh_of
from support.traced_equations import equations

from parallax.config.sections import AXES
from parallax.errors import NotationError
from parallax.model.products import ProductInput
from parallax.sharding.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    as_varying,
    cut,
    exchange_and_add,
    is_bound,
    max_over,
    offset,
    permute,
    reduce_scatter,
    reshard,
    sum_over,
)
from parallax.sharding.einsum import einsum
from parallax.sharding.layout import Layout


def check(function, shape, *oracles):
    """The collective equals the oracles one after another, forward and backward."""

    def oracle(pieces):
        for one in oracles:
            pieces = one(pieces)
        return pieces

    pieces = pieces_of(shape)
    y, dx, weights = on_mesh(function, pieces)
    np.testing.assert_allclose(y, oracle(pieces), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dx, transpose(oracle, pieces.shape, weights), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_collects_pieces(axis, dim):
    pattern = [f"seq/{axis} d_ff -> seq d_ff", f"seq d_ff/{axis} -> seq d_ff"][dim]
    check(lambda x: all_gather(pattern, x), (2, 3), along(axis, gathered(dim)))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_adds_and_keeps_its_own(axis, dim):
    pattern = [f"seq d_ff -> seq/{axis} d_ff", f"seq d_ff +{axis} -> seq d_ff/{axis}"][dim]
    check(lambda x: reduce_scatter(pattern, x), (2, 2), along(axis, scattered(dim)))


@pytest.mark.parametrize("ranks", [1, 8])
def test_compiled_for_cpus_no_gather_and_no_scatter_transposes_the_residual_stream(ranks):
    def twice(x):
        return reduce_scatter("batch seq d_model -> batch seq d_model/tp", jnp.sin(gather(jnp.sin(x))))

    gather, spec = (lambda x: all_gather("batch seq d_model/tp -> batch seq d_model", x)), P(None, None, "tp")
    step = jax.jit(jax.shard_map(twice, mesh=mesh_of(1, 1, ranks), in_specs=spec, out_specs=spec))
    compiled = step.lower(jax.ShapeDtypeStruct((2, 8, 32), jnp.float32)).compile().as_text()
    layouts = {layout for layout in re.findall(r"f32\[[\d,]*\]\{([\d,]+)\}", compiled) if layout.count(",") > 1}
    assert layouts and all(layout[0] == str(layout.count(",")) for layout in layouts)  # the last dim is the fastest


@pytest.mark.parametrize("first", [2, 4, 8])
def test_a_gather_in_two_steps_is_the_gather(first):
    mesh, x = mesh_of(1, 8, 1), jnp.arange(48.0).reshape(16, 3)

    def both(x):
        results = []
        for steps in (1, first):
            whole, pull = jax.vjp(
                functools.partial(all_gather, "seq/dp d_ff -> seq d_ff", first=lambda _, n=steps: n), x
            )
            results += [whole[None], *pull(jax.lax.pcast(jnp.arange(48.0).reshape(16, 3), "dp", to="varying"))]
        return results

    results = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(x)
    (at_once, in_steps), gradients = results[::2], results[1::2]
    np.testing.assert_array_equal(at_once, np.stack([x] * 8))
    np.testing.assert_array_equal(in_steps, at_once)
    np.testing.assert_array_equal(*gradients)
    assert gradients[0].any()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dim", [0, 1])
def test_exchange_and_add_adds_and_keeps_its_own(axis, dim):
    pattern = [f"seq d_ff -> seq/{axis} d_ff", f"seq d_ff +{axis} -> seq d_ff/{axis}"][dim]
    check(lambda x: exchange_and_add(pattern, x), (2, 2), along(axis, scattered(dim)))


def test_what_is_exchanged_in_bfloat16_is_rounded_once():
    """One large summand and many small ones: a sum that is rounded on its way loses them."""
    pieces = jnp.concatenate([jnp.full((1, 8), 256.0), jnp.full((7, 8), 0.75)]).astype("bfloat16")
    add = lambda x: exchange_and_add("seq d_ff -> seq d_ff/dp", x)  # noqa: E731
    total = jax.shard_map(add, mesh=mesh_of(1, 8, 1), in_specs=P("dp"), out_specs=P(None, "dp"), check_vma=True)(pieces)
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(total, np.full((1, 8), 256 + 7 * 0.75))
    assert float(jnp.bfloat16(256) + jnp.bfloat16(0.75)) == 256


@pytest.mark.parametrize("axis", AXES)
def test_all_reduce_adds(axis):
    summed = along(axis, lambda pieces: [sum(pieces)] * len(pieces))
    check(lambda x: all_reduce(f"seq +{axis} -> seq", x), (3,), summed)
    check(lambda x: sum_over(x, [axis]), (3,), summed)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
def test_all_to_all_moves_an_axis(axis, dims):
    names = [["seq", "heads"], ["seq", "heads"]]
    for side, dim in zip(names, dims):
        side[dim] += f"/{axis}"
    pattern = " -> ".join(map(" ".join, names))
    check(lambda x: all_to_all(pattern, x), (2, 2), along(axis, exchanged(*dims)))


@pytest.mark.parametrize("axis", AXES)
def test_cut_keeps_its_own_piece(axis):
    check(lambda x: cut(f"seq d_ff -> seq d_ff/{axis}", x), (2, 4), along(axis, kept(1)))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("shift", [1, -1])
def test_permute_passes_pieces_on(axis, shift):
    rolled = along(axis, lambda pieces: [pieces[(rank - shift) % len(pieces)] for rank in range(len(pieces))])
    check(lambda x: permute("seq d_ff", x, axis=axis, shift=shift), (2, 1), rolled)


def test_permute_goes_round_more_than_two_ranks():
    pieces = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)
    y, dx, weights = on_mesh(lambda x: permute("seq", x, axis="pp", shift=1), pieces, sizes=(4, 1, 1))
    assert y.ravel().tolist() == [3, 0, 1, 2]
    np.testing.assert_array_equal(dx.ravel(), np.roll(weights.ravel(), -1))


@pytest.mark.parametrize("dim", [0, 1])
def test_axes_that_cut_one_dim_are_one_collective(dim):
    """Gathered, scattered and exchanged at once, the major axis first, as a PartitionSpec has them."""
    names = ["d_model", "d_ff"]
    cut_names = [f"{name}/tp/dp" if at == dim else name for at, name in enumerate(names)]
    whole, cut_layout = " ".join(names), " ".join(cut_names)
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    mesh, spec = mesh_of(2, 2, 2), Layout.parse(cut_layout).spec()
    on_mesh = lambda f, inside, outside: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=inside, out_specs=outside))  # noqa: E731
    gather = on_mesh(
        lambda x: reduce_scatter(f"{whole} -> {cut_layout}", all_gather(f"{cut_layout} -> {whole}", x)), spec, spec
    )
    np.testing.assert_allclose(gather(x), 4 * x, rtol=1e-6)
    exchange = on_mesh(
        lambda x: exchange_and_add(f"{whole} -> {cut_layout}", all_gather(f"{cut_layout} -> {whole}", x)), spec, spec
    )
    np.testing.assert_allclose(exchange(x), 4 * x, rtol=1e-6)
    for run, kinds in ((gather, {"all_gather", "reduce_scatter"}), (exchange, {"all_gather", "all_to_all"})):
        sent = [(e.primitive.name, e.params["axis_name"]) for e in equations(run, x) if "axis_name" in e.params]
        sent = [(name, axes) for name, axes in sent if name.removesuffix("_invariant") in kinds]
        assert len(sent) == 2 and all(axes == ("tp", "dp") for _, axes in sent)


def test_a_dim_cut_over_two_axes_is_gathered_from_the_inside():
    inner, outer = along("tp", gathered(0)), along("dp", gathered(0))
    check(lambda x: all_gather("d_ff/dp/tp -> d_ff", x), (2,), inner, outer)
    check(lambda x: all_gather("d_ff/dp/tp -> d_ff/dp", x), (2,), inner)


def test_a_dim_is_scattered_and_cut_over_two_axes_from_the_outside():
    check(lambda x: reduce_scatter("d_ff -> d_ff/dp/tp", x), (4,), along("dp", scattered(0)), along("tp", scattered(0)))
    check(lambda x: reduce_scatter("d_ff/dp -> d_ff/dp/tp", x), (2,), along("tp", scattered(0)))
    check(lambda x: cut("d_ff -> d_ff/dp/tp", x), (4,), along("dp", kept(0)), along("tp", kept(0)))


@pytest.mark.parametrize(
    ("pattern", "shape", "oracles"),
    [
        ("seq d_ff +tp -> seq d_ff/tp", (2, 2), [along("tp", scattered(1))]),
        ("seq d_ff +tp -> seq d_ff", (2, 2), [along("tp", lambda p: [sum(p)] * 2)]),
        ("seq d_ff +dp +tp -> seq/dp d_ff/tp", (2, 2), [along("dp", scattered(0)), along("tp", scattered(1))]),
        ("seq/tp d_ff -> seq d_ff/tp", (2, 2), [along("tp", exchanged(0, 1))]),
        ("seq/tp d_ff -> seq d_ff", (2, 2), [along("tp", gathered(0))]),
        ("seq d_ff -> seq d_ff/tp", (2, 2), [along("tp", kept(1))]),
        ("seq/tp d_ff -> seq d_ff", (2, 2), [along("tp", gathered(0))]),
        ("seq/dp d_ff/tp -> seq/dp d_ff/tp", (2, 2), []),
        ("seq/dp d_ff/tp -> seq d_ff", (1, 2), [along("dp", gathered(0)), along("tp", gathered(1))]),
    ],
)
def test_reshard_goes_from_layout_to_layout(pattern, shape, oracles):
    check(lambda x: reshard(pattern, x), shape, *oracles)


@pytest.mark.parametrize("axis", AXES)
def test_an_einsum_over_a_cut_dim_leaves_partial_sums(axis):
    w = np.random.default_rng(2).normal(size=(2, 3)).astype(np.float32)
    pattern = f"seq d_ff/{axis}, d_ff/{axis} d_model -> seq d_model +{axis}"
    check(lambda x: einsum(pattern, x, jnp.asarray(w)), (2, 2), lambda pieces: pieces @ w)


def test_einsum_sums_in_the_dtype_it_is_given():
    x = jnp.full((1, 4), 1.001, jnp.bfloat16)
    assert einsum("seq d_ff, d_ff d_model -> seq d_model", x, x.T, dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("axis", AXES)
def test_the_gradient_of_a_replicated_value_is_summed_over_its_copies(axis):
    """Every rank reads the whole value: its gradient adds what all of them make of it, and is replicated again."""
    whole, size = np.arange(4, dtype=np.float32), 2
    weights = np.random.default_rng(1).normal(size=(size, 4)).astype(np.float32)

    def local(x, weights):
        return jax.grad(lambda x: sum_over(jnp.sum(as_varying(x, [axis]) * weights[0]), [axis]))(x)

    run = jax.shard_map(local, mesh=mesh_of(*SIZES), in_specs=(P(), P(axis)), out_specs=P(), check_vma=True)
    np.testing.assert_allclose(jax.jit(run)(whole, weights), weights.sum(0), rtol=1e-6)


@pytest.mark.parametrize("axis", AXES)
def test_the_gradient_of_a_replicated_value_that_is_cut_is_whole_again(axis):
    whole, weights = np.arange(4, dtype=np.float32), np.random.default_rng(1).normal(size=4).astype(np.float32)

    def local(x, weights):
        own = lambda x: cut(f"d_ff -> d_ff/{axis}", x)  # noqa: E731
        return jax.grad(lambda x: sum_over(jnp.sum(own(x) * weights), [axis]))(x)

    run = jax.shard_map(local, mesh=mesh_of(*SIZES), in_specs=(P(), P(axis)), out_specs=P(), check_vma=True)
    np.testing.assert_allclose(jax.jit(run)(whole, weights), weights, rtol=1e-6)


def test_the_largest_over_an_axis():
    pieces = pieces_of((2,))
    y = jax.jit(lambda p: forward_of(lambda x: max_over(x, ["dp", "tp"]), p, SIZES))(pieces)
    np.testing.assert_array_equal(y, np.broadcast_to(pieces.max((1, 2), keepdims=True), pieces.shape))


def test_offsets_number_the_entries_of_a_dim_in_order():
    layout = Layout.parse("d_ff/tp/dp d_model")
    y = jax.jit(lambda p: forward_of(lambda x: x + offset(layout, "d_ff", 3), p, SIZES))(np.zeros(SIZES, np.int32))
    # tp cuts first: its first half holds entries 0 to 5, of which dp's first half holds 0 to 2.
    assert y[0].tolist() == y[1].tolist() == [[0, 6], [3, 9]]
    assert offset(layout, "d_ff", 3) == 0


MOVES = {
    "all_gather": lambda x: all_gather("seq/dp d_ff/tp -> seq d_ff", x),
    "reduce_scatter": lambda x: reduce_scatter("seq d_ff -> seq/dp d_ff/tp", x),
    "exchange_and_add": lambda x: exchange_and_add("seq d_ff -> seq/dp d_ff/tp", x),
    "all_reduce": lambda x: all_reduce("seq d_ff +dp +tp -> seq d_ff", x),
    "all_to_all": lambda x: all_to_all("seq/tp d_ff -> seq d_ff/tp", x),
    "cut": lambda x: cut("seq d_ff -> seq/dp d_ff/tp", x),
    "reshard": lambda x: reshard("seq/tp d_ff +dp -> seq d_ff/tp", x),
    "permute": lambda x: permute("seq d_ff", x, axis="pp"),
    "sum_over": lambda x: sum_over(x, AXES),
    "max_over": lambda x: max_over(x, AXES),
    "as_varying": as_varying,
}


@pytest.mark.parametrize("name", MOVES)
def test_with_no_axis_bound_a_collective_is_nothing(name):
    x = jnp.arange(15.0).reshape(3, 5)  # sizes that would divide over no axis
    assert MOVES[name](x) is x
    assert not any(map(is_bound, AXES))


@pytest.mark.parametrize("name", [name for name in MOVES if name != "max_over"])
def test_over_axes_of_one_rank_a_collective_changes_nothing(name):
    pieces = np.arange(15, dtype=np.float32).reshape(1, 1, 1, 3, 5)
    y, dx, weights = on_mesh(MOVES[name], pieces, sizes=(1, 1, 1))
    np.testing.assert_array_equal(y, pieces)
    np.testing.assert_array_equal(dx, weights)


@pytest.mark.parametrize(
    ("function", "pattern", "message"),
    [
        (all_gather, "d_ff/tp/dp seq -> d_ff/dp seq", "only the last axes of a dim can be gathered; d_ff needs"),
        (all_gather, "d_ff seq -> d_ff/tp seq", "only the last axes of a dim can be gathered; d_ff needs"),
        (reduce_scatter, "d_ff/tp seq -> d_ff seq", "a dim is scattered after the axes that shard it; d_ff is not"),
        (reduce_scatter, "d_ff/tp seq -> d_ff/dp/tp seq", "a dim is scattered after the axes that shard it"),
        (exchange_and_add, "d_ff/tp seq -> d_ff seq", "a dim is scattered after the axes that shard it; d_ff is not"),
        (all_reduce, "d_ff/tp seq -> d_ff seq", "an all-reduce does not change how dims are sharded"),
        (all_to_all, "d_ff/tp seq/dp -> d_ff/dp seq/tp", "an all-to-all moves exactly one axis"),
        (all_to_all, "d_ff/tp seq -> d_ff seq", "an all-to-all moves exactly one axis"),
        (all_to_all, "d_ff seq -> d_ff seq", "an all-to-all moves exactly one axis"),
        (all_to_all, "d_ff/tp/dp seq -> d_ff/dp seq/tp", "tp must be the last axis of both dims"),
        (cut, "d_ff/tp seq -> d_ff seq", "a dim is sharded after the axes that shard it already; d_ff is not"),
        (cut, "d_ff -> d_ff/tp", "'d_ff' has 1 dims, the array has 2: (3, 4)"),
        (einsum, "d_ff seq", "write 'operand, operand -> result'"),
        (einsum, "d_ff/tp seq -> seq", "the result is 'seq +tp', not 'seq'"),
        (einsum, "d_ff/tp seq -> seq +dp", "the result is 'seq +tp', not 'seq +dp'"),
        (einsum, "d_ff seq -> vocab", "the result's 'vocab' is in no operand; they have d_ff, seq"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused_with_a_reason(function, pattern, message):
    with pytest.raises(NotationError) as caught:
        function(pattern, jnp.ones((3, 4)))
    assert message in str(caught.value)


def test_what_is_no_array_is_refused_by_a_sentence_that_says_how_to_have_one():
    x, kernel = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    pattern = "batch/dp seq d_model, d_model d_ff/tp -> batch/dp seq d_ff/tp"
    message = r"'batch/dp seq d_model' is given a ProductInput, not an array; .* parallax.model.dense.unrounded\(x\)"
    with pytest.raises(NotationError, match=message):
        einsum(pattern, ProductInput(x, None, None), kernel)
    with pytest.raises(NotationError, match="'d_model d_ff/tp' is given a NoneType, not an array; "):
        einsum(pattern, x, None)
    with pytest.raises(NotationError, match="'d_ff seq' is given a list, not an array; "):
        reshard("d_ff seq -> d_ff seq", [1.0])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 6), (5, 3)), "on a device d_model is 6 in 'batch d_model' and 5 in 'd_model d_ff/tp'"),
        (((2, 1), (5, 3)), "on a device d_model is 1 in 'batch d_model' and 5 in 'd_model d_ff/tp'"),
        (((2, 6),), "it has 2 operands, but 1 arrays are given"),
        (((2, 6), (6, 3), (3,)), "it has 2 operands, but 3 arrays are given"),
    ],
)
def test_an_einsum_of_arrays_that_do_not_fit_names_their_dims(shapes, message):
    pattern = "batch d_model, d_model d_ff/tp -> batch d_ff/tp"
    with pytest.raises(NotationError) as error:
        einsum(pattern, *map(jnp.ones, shapes))
    assert str(error.value) == f"{pattern!r}: {message}."


def test_an_einsum_of_operands_that_are_cut_otherwise_is_refused():
    with pytest.raises(
        NotationError, match="d_ff is sharded over tp in one operand and over nothing in 'd_ff d_model'"
    ):
        einsum("seq d_ff/tp, d_ff d_model -> seq d_model", jnp.ones((2, 3)), jnp.ones((3, 2)))


def test_a_permute_along_an_axis_that_cuts_is_refused():
    with pytest.raises(NotationError, match="permute over tp: 'seq/tp' is sharded over it; permute whole pieces only"):
        permute("seq/tp", jnp.ones(2), axis="tp")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: cut("d_ff -> d_ff/tp", x),
        lambda x: reduce_scatter("d_ff -> d_ff/tp", x),
        lambda x: all_to_all("d_ff seq/tp -> d_ff/tp seq", x[:, None]),
    ],
)
def test_a_local_size_that_does_not_divide_is_refused_with_both_numbers(function):
    with pytest.raises(NotationError, match="a local d_ff of 3 does not divide over tp=2"):
        on_mesh(function, np.ones((*SIZES, 3), np.float32))
