"""Sends tokens to the ranks that hold their experts, and results back: two forms with equal results."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.experts.exchange_costs import usual_rows
from parallax.model.experts.experts import USUAL_LOAD, HeldExperts, Rows, collect, dispatch, sort_rows
from parallax.model.experts.grouped import grouped_sums
from parallax.sharding.activations import EXPERT_AXIS, activation
from parallax.sharding.collectives import (
    all_gather,
    as_varying,
    bound_axis_sizes,
    is_bound,
    reshard,
    varying_axes,
)
from parallax.sharding.layout import Layout
from parallax.sharding.platform import platform_traced

Beside = Callable[[Array | None], Array]  # what is computed while rows travel; its argument is for `ordered`


def gather_exchange(
    experts: HeldExperts, residual: str, x: Array, weights: Array, ids: Array, beside: Beside | None = None
) -> Array:
    """Every rank gets the tokens of all ranks, [B, S, ...]; partial sums are scattered to the residual's layout. The
    result of `beside` is added.

    Communication:
        forward   all_gather of x, weights and ids over ep;
                  reduce_scatter of the result over tp; reduce_scatter of the result over ep
        backward  all_gather of the gradient over ep; all_gather of the gradient over tp;
                  reduce_scatter of the gradient of x and the gradient of weights over ep
    """
    x, weights, ids = _gathered("d_model", x), _gathered("entries", weights), _gathered("entries", ids)
    y = experts(x, _flat(weights), _flat(ids))
    # First over tp, whose links are the fastest.
    made, mine = Layout.parse(activation("d_model")).without(EXPERT_AXIS), Layout.parse(residual)
    scattered = mine.without(EXPERT_AXIS).with_partial(EXPERT_AXIS)
    y = reshard(f"{made.with_partial(EXPERT_AXIS, 'tp')} -> {scattered}", y)
    y = reshard(f"{scattered} -> {mine}", y)
    return y + beside(None) if beside else y


def ragged_exchange(
    experts: HeldExperts,
    residual: str,
    x: Array,
    weights: Array,
    ids: Array,
    beside: Beside | None = None,
    again: bool = False,
) -> Array:
    """A rank gets one row for each choice of one of its experts, and the results are sent back.

    The all-to-alls are ragged: each rank sends each other rank as many rows as it has for it, in units of 8, which are
    whole tiles of TPUs. A rank has room for a quarter more than its share of all rows, `usual_rows`, in two rounds if
    these are many: the rows of one travel while those of the other are multiplied. If any rank would get more, the
    remaining rows are sent in further rounds. So none is ever dropped, and only time depends on the load.

    The result of `beside` is added. Compilers compute it while the last results travel, and its gradient while the
    first rows do: the first products of the backward pass are computed after that.

    With `again` received tokens have no name to be saved by: the backward pass sends x once more, the rows of a round
    after the products of the round before. Recomputed, all would be sent before its first products.

    Communication:
        forward   all_gather of the counts with the weights over ep; all_to_all of x and the result over ep;
                  reduce_scatter of the result over tp
        backward  all_gather of the gradient over tp; all_gather of the gradient of weights over ep;
                  all_to_all of the gradient and the gradient of x over ep
    """
    if not is_bound(EXPERT_AXIS):
        return gather_exchange(experts, residual, x, weights, ids, beside)
    ranks, shape, (tokens, places) = lax.axis_size(EXPERT_AXIS), x.shape, _flat(ids).shape
    axes = frozenset([EXPERT_AXIS]).union(*map(varying_axes, jax.tree.leaves((x, weights, ids, experts))))
    flat = _flat(x), _flat(weights), _flat(ids), experts
    x, weights, ids, experts = jax.tree.map(lambda array: as_varying(array, axes), flat)
    rows = sort_rows(ids, ranks * experts.count, most=places, unit=UNIT)
    counts_PE, sent_weights = _announced(rows.sizes_E // UNIT, _weights(weights, rows), axes)
    most = ranks * (tokens * min(places, experts.count) // UNIT + experts.count)
    usual = -(-usual_rows(ranks * ids.size, UNIT * most, ranks) // UNIT)
    # Collectives in branches could deadlock on simulated devices.
    room = Room((most,) if platform_traced() == "cpu" else usual_rounds(usual), most, again)
    sent = rows, counts_PE, sent_weights
    later, token = _begun(room, x, weights, experts, *sent)
    other = beside(token) if beside else None
    y = _computed(room, later, *jax.tree.map(lax.stop_gradient, (x, experts)), *sent).reshape(shape)
    y = reshard(f"{activation('d_model')} +tp -> {residual}", y)
    return y if other is None else y + other


EXCHANGES = {"gather": gather_exchange, "ragged": ragged_exchange}
SENT_AGAIN = "ragged again"
EXCHANGE_FORMS = EXCHANGES | {SENT_AGAIN: functools.partial(ragged_exchange, again=True)}

SENT = "exchange.sent"  # the scope of exchanges to the experts' ranks; others go back
UNIT = 8  # rows: each expert's rows of a rank are sent as a multiple
LEAST_UNITS = 2048  # that are sent in two rounds
UNITS_STEP = 64  # of the first round, so that its rows fill blocks of kernels


class Room(NamedTuple):
    """The number of units for which a rank has room in each round of a usual load, and the most units that may arrive.
    Further rounds have the room of the last one. With `again`, what arrives is not saved."""

    rounds: tuple[int, ...]
    most: int
    again: bool = False

    @property
    def usual(self) -> int:
        return sum(self.rounds)

    def usual_ways(self, counts_PE: Array) -> list["Round"]:
        """What each round of a usual load sends."""
        starts = itertools.accumulate(self.rounds, initial=0)
        return [round_of(counts_PE, start, units) for start, units in zip(starts, self.rounds)]

    def further_way(self, counts_PE: Array, number: Array) -> "Round":
        """What further round `number` sends, counted from 0."""
        return round_of(counts_PE, self.usual + number * self.rounds[-1], self.rounds[-1])


def usual_rounds(units: int) -> tuple[int, ...]:
    """The units of each round. Of two the first has a quarter: nothing hides its rows' way, and its products hide the
    way of the others.

    >>> usual_rounds(2000), usual_rounds(15360)
    ((2000,), (3840, 11520))
    """
    if units < LEAST_UNITS:
        return (units,)
    first = units // 4 // UNITS_STEP * UNITS_STEP or 1
    return first, units - first


class Round(NamedTuple):
    """The slices of units that one round sends, for each expert and each sending rank, [E, P]."""

    size: Array
    source: Array  # start of a slice among the sending rank's units, which are sorted by expert
    place: Array  # its start on the expert's rank, whose units are sorted by expert, then by rank

    def of_rank(self, rank: Array) -> "Round":
        """The slices for the experts of `rank`, from each rank: [P, experts of a rank]."""
        own = len(self.size) // self.size.shape[1]
        return Round(*(lax.dynamic_slice_in_dim(array, rank * own, own).T for array in self))


def round_of(counts_PE: Array, start: Array | int, units: int) -> Round:
    """The slices sent in a round, if rank p has `counts_PE[p, e]` units for expert e, and each rank has received
    `start` units and receives up to `units` more. No communication.

    >>> counts = jnp.array([[3, 1], [2, 2]])
    >>> [round_of(counts, start, 4).size.tolist() for start in (0, 4)]
    [[[3, 1], [1, 2]], [[0, 1], [0, 0]]]
    """
    ranks, experts = counts_PE.shape
    counts_EP = counts_PE.T
    place = _before(counts_EP.reshape(ranks, experts)).reshape(experts, ranks) - start
    first, last = (jnp.clip(edge - place, 0, counts_EP) for edge in (0, units))
    return Round(last - first, _before(counts_PE).T + first, place + first)


def most_received(counts_PE: Array) -> Array:
    """The number of units of the rank that receives most."""
    return counts_PE.sum(axis=0).reshape(len(counts_PE), -1).sum(axis=1).max()


def _before(counts: Array) -> Array:
    """Exclusive cumulative sum along each row."""
    return jnp.cumsum(counts, axis=1) - counts


@jax.custom_vjp
def ordered(x: Array, token: Array | None) -> Array:
    """`x`, which is read by what is computed beside an exchange. In the backward pass its gradient is computed before
    the first products of experts."""
    return x


ordered.defvjp(
    lambda x, token: (x, token),
    lambda token, dx: (dx, None if token is None else as_varying(_probe(dx).astype(token.dtype), varying_axes(token))),
)


def _probe(x: Array) -> Array:
    return x.reshape(-1)[0]


# The backward pass of an exchange, in two functions. That of `_computed` only passes on what was saved, as "gradients"
# of placeholders that `_begun` made; that of `_begun` computes. What is computed beside them is called between the two,
# so the gradient of its input is known in the second one, and products can wait for it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _begun(room: Room, *arrays: Any) -> tuple["Later", Array]:
    return _prepared(room, *arrays)[0]


def _prepared(room: Room, x_ND: Array, weights_NK: Array, experts: HeldExperts, *sent: Any) -> tuple[Any, Any]:
    wide = experts.gate.kernels
    blank = lambda dtype, *shape: as_varying(jnp.zeros(shape, dtype), varying_axes(x_ND))  # noqa: E731
    arrived = [
        Arrived(
            blank(x_ND.dtype, 0 if room.again else units * UNIT, x_ND.shape[1]),
            blank(weights_NK.dtype, units * UNIT, 1),
            *(blank(wide.dtype, units * UNIT, wide.shape[2]) for _ in ("gate", "up")),
        )
        for units in room.rounds
    ]
    later = Later(blank(x_ND.dtype, *x_ND.shape), arrived)
    saved = x_ND, weights_NK, experts, *sent, experts.gate.most(x_ND)
    return (later, blank(jnp.float32)), saved


class Later(NamedTuple):
    """The result of `_computed` and what it saves: as gradients, that of the result and what was saved."""

    y_ND: Array
    arrived: list["Arrived"]


# It saves, by name, the received rows and the two products of the usual rounds. Nothing else is saved; further rounds
# are recomputed.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _computed(room: Room, *arrays: Any) -> Array:
    return _forward(room, *arrays)[0]


def _forward(
    room: Room,
    later: Later,
    x_ND: Array,
    experts: HeldExperts,
    rows: Rows,
    counts: Array,
    sent_weights: Array,
) -> tuple[Array, list["Arrived"]]:
    def run(way: Round, units: int, y: Array, *how: Any) -> tuple[Array, Arrived]:
        arrived, hidden = _arrived(way, units, x_ND, sent_weights, experts, rows, *how)
        result = experts.down.times(experts.down.input(hidden), _sizes(way))
        return _returned(_in_units(result), way, y), arrived

    def further(number: Array, y: Array) -> Array:
        return run(room.further_way(counts, number), room.rounds[-1], y)[0]

    def name(x: Array, part: str) -> Array:
        return x if room.again and part == "dispatch" else checkpoint_name(x, part)

    y, arrived, earlier = _unset(x_ND, len(rows.choice_R) // UNIT), [], None
    for way, units, blank in zip(room.usual_ways(counts), room.rounds, later.arrived):
        y, own = run(way, units, y, name, earlier)
        arrived.append(own._replace(x=blank.x) if room.again else own)
        earlier = _probe(own.x)
    return _remaining_rounds(room, counts, further, y, lambda y: _summed(y, rows)), arrived


class Arrived(NamedTuple):
    """The rows that a rank receives in a round, and their products with gate and up: [rows, ...]."""

    x: Array
    weights: Array
    gate: Array
    up: Array


def _arrived(
    way: Round,
    units: int,
    x_ND: Array,
    sent_weights: Array,
    experts: HeldExperts,
    rows: Rows,
    name: Callable = lambda x, _: x,
    earlier: Array | None = None,
) -> tuple[Arrived, Array]:
    """What arrives in a round, sent after `earlier`, and the input of down."""
    at, _ = _arrivals(way, units, len(rows.choice_R) // UNIT)
    weights = _as_rows(sent_weights.at[at].get(mode="clip"))
    x = name(_as_rows(_sent(_in_units(dispatch(x_ND, rows)), way, units, earlier)), "dispatch")
    gate, up, hidden = experts.gated(experts.gate.input(x), weights, _sizes(way))
    return Arrived(x, weights, name(gate, "experts"), name(up, "experts")), hidden


def _passed_on(room: Room, arrived: list[Arrived], dy_ND: Array) -> tuple[Any, ...]:
    return Later(dy_ND, arrived), *(None for _ in range(5))


_computed.defvjp(_forward, _passed_on)


def _backward(room: Room, saved: tuple[Any, ...], found: tuple[Later, Array]) -> tuple[Any, ...]:
    (dy_ND, arrived), earlier = found
    x_ND, weights_NK, experts, rows, counts, sent_weights, of_x = saved
    gate, up, down = experts

    def gradients(way: Round, arrived: Arrived, sizes_E: Array, sent_after: Array | None = None) -> tuple[Array, ...]:
        """Gradients of the two products and of the weights, the gated result, and the gradient of what was sent back,
        which is sent after `sent_after`."""
        dy = _as_rows(_sent(_in_units(dispatch(dy_ND, rows)), way, len(arrived.weights) // UNIT, sent_after))
        factors = arrived.gate, arrived.up, arrived.weights
        return *experts.gated_gradients(down.gradient(dy), *factors, sizes_E), dy

    def recomputed(number: Array) -> tuple[Round, Arrived, tuple[Array, ...]]:
        way = room.further_way(counts, number)
        arrived, _ = _arrived(way, room.rounds[-1], x_ND, sent_weights, experts, rows)
        return way, arrived, gradients(way, arrived, _sizes(way))

    def of_tokens(way: Round, found: tuple[Array, ...], sums: tuple[Array, Array, list]) -> tuple[Array, Array, list]:
        d_gate, d_up, d_weights, hidden, _ = found
        dx_R, dweights_R, most = sums
        dx, *other = experts.input_gradients(d_gate, d_up, _sizes(way))
        dx = sum(other, dx.astype(jnp.float32)).astype(dx.dtype)
        pairs = (gate, d_gate), (up, d_up), (down, hidden)
        latest = [one.most(array, _sizes(way)) for one, array in pairs]
        d_weights = _in_units(d_weights)
        dweights_R = _taken(d_weights, *_own_results(way, len(dx_R), len(d_weights)), dweights_R)
        return _returned(_in_units(dx), way, dx_R), dweights_R, jax.tree.map(jnp.maximum, most or latest, latest)

    def of_kernels(way: Round, x: Array, found: tuple[Array, ...], sums: list) -> list[Array]:
        d_gate, d_up, _, hidden, dy = found
        pairs = (x, d_gate), (x, d_up), (hidden, dy)
        return [grouped_sums(*pair, _sizes(way), others) for pair, others in zip(pairs, sums)]

    def more_of_tokens(number: Array, sums: tuple[Array, Array, list]) -> tuple[Array, Array, list]:
        way, _, found = recomputed(number)
        return of_tokens(way, found, sums)

    def tokens(way: Round, arrived: Arrived, kernels: list) -> Array:
        if not room.again:
            return arrived.x
        before = None if kernels[0] is None else sum(map(_probe, kernels))
        return _as_rows(_sent(_in_units(dispatch(x_ND, rows)), way, len(arrived.weights) // UNIT, before))

    # The first products come after those of shared experts, which hide the way of the first rows; gradients of the
    # results of other rounds are sent after the first products, which hide theirs.
    ways, founds = room.usual_ways(counts), []
    for way, own in zip(ways, arrived):
        order = (_sizes(way), _probe(founds[0][0])) if founds else (_only_after(_sizes(way), earlier), None)
        founds.append(gradients(way, own, *order))
    sums = (*(_unset(array, len(rows.choice_R) // UNIT) for array in (x_ND, weights_NK[:, :1])), [])
    kernels = [None] * len(experts)
    for way, own, found in zip(ways, arrived, founds):
        sums = of_tokens(way, found, sums)
        kernels = of_kernels(way, tokens(way, own, kernels), found, kernels)
    end = lambda sums: (_summed(sums[0], rows), _summed(sums[1], rows.of_choices()), sums[2])  # noqa: E731
    dx, dweights, of_rows = _remaining_rounds(room, counts, more_of_tokens, sums, end)

    def more_of_kernels(number: Array, sums: list) -> list[Array]:
        way, own, found = recomputed(number)
        return of_kernels(way, own.x, found, sums)

    kernels = _remaining_rounds(room, counts, more_of_kernels, kernels, lambda kernels: kernels)
    of_d_gate, of_d_up, of_hidden = of_rows
    most = (of_x, of_d_gate), (of_x, of_d_up), (of_hidden, down.most(dy_ND))
    return dx, dweights.reshape(weights_NK.shape), experts.with_gradients(kernels, most), None, None, None


_begun.defvjp(_prepared, _backward)


def _remaining_rounds(
    room: Room, counts: Array, run: Callable[[Array, Any], Any], state: Any, end: Callable[[Any], Any]
) -> Any:
    """Result of `end` on the state after the further rounds; a usual load needs none."""
    if room.usual >= room.most:
        return end(state)
    left = most_received(counts) - room.usual
    with jax.named_scope(USUAL_LOAD):
        # `end` runs inside the branch: a branch that returns its input copies it.
        further = lambda: end(lax.fori_loop(0, -(-left // room.rounds[-1]), run, state))  # noqa: E731
        return lax.cond(left <= 0, lambda: end(state), further)


def _weights(weights_NK: Array, rows: Rows) -> Array:
    """The weight of each row that is sent, in units; 0 for rows of no choice."""
    weights_RI = dispatch(lax.stop_gradient(weights_NK).reshape(-1, 1), rows.of_choices())
    return _in_units(jnp.where((rows.choice_R < weights_NK.size)[:, None], weights_RI, 0))


def _announced(counts_E: Array, weights: Array, axes: frozenset[str]) -> tuple[Array, Array]:
    """The counts and the weights that all ranks send: one gather, since rows are sent by the counts. A gather of the
    weights alone would wait behind the rows, and the first products for it.

    Communication:
        forward   all_gather of the counts with the weights over ep
        backward  nothing
    """
    own = jnp.concatenate([counts_E, lax.bitcast_convert_type(weights, jnp.int32).reshape(-1)])
    found = as_varying(all_gather("rows/ep columns -> rows columns", own[None]), axes)
    counts_PE, of_all = found[:, : len(counts_E)], found[:, len(counts_E) :]
    return counts_PE, lax.bitcast_convert_type(of_all, weights.dtype).reshape(-1, *weights.shape[1:])


def _summed(y: Array, rows: Rows) -> Array:
    """The sum of each token's rows, [N, D]."""
    return collect(_as_rows(y), rows)


def _sizes(way: Round) -> Array:
    """Number of rows of each of this rank's experts."""
    return UNIT * way.of_rank(lax.axis_index(EXPERT_AXIS)).size.sum(axis=0)


def _only_after(sizes_E: Array, earlier: Array) -> Array:
    """The sizes, but only after `earlier` has been computed, as `collectives.after`."""
    return jnp.where(jnp.isnan(earlier), 0, sizes_E)


def _in_units(x_RD: Array) -> Array:
    """Rows as units, [U, 8, D]. On TPU rows of [R, D] share tiles with seven others, so that moving one would rewrite
    them; a unit has tiles of its own, and this changes nothing in memory."""
    return x_RD.reshape(-1, UNIT, x_RD.shape[1])


def _as_rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[2])


def _unset(like_ND: Array, units: int) -> Array:
    """An uninitialised buffer for units; each will be written or is never read."""
    return as_varying(lax.empty((units, UNIT, like_ND.shape[-1]), like_ND.dtype), varying_axes(like_ND))


def _sent(x: Array, way: Round, room: int, earlier: Array | None = None) -> Array:
    """The received units, sorted by expert: [room, ...]; units after them are undefined. They are sent after `earlier`.

    Communication:
        forward   all_to_all of x over ep
        backward  nothing
    """
    if platform_traced() == "cpu":
        return _taken(x, *_arrivals(way, room, len(x)))
    me = lax.axis_index(EXPERT_AXIS)
    sent, got = (array[:, me] for array in way), (array.reshape(-1) for array in way.of_rank(me))
    (size, source, place), (got_size, _, _) = sent, got
    received = _unset(x, room)
    if earlier is not None:
        received = received.at[0, 0, 0].set(earlier.astype(x.dtype))  # what comes is written over it
    with jax.named_scope(SENT):
        return _all_to_all(x, received, source, size, place, got_size)


def _returned(y: Array, way: Round, others: Array) -> Array:
    """Send results back and write them into `others` at the positions of the rows that were sent.

    Communication:
        forward   all_to_all of y over ep
        backward  nothing
    """
    if platform_traced() == "cpu":
        return _taken(y, *_own_results(way, len(others), len(y)), others)
    me = lax.axis_index(EXPERT_AXIS)
    size, source, place = (array.reshape(-1) for array in way.of_rank(me))
    return _all_to_all(y, others, place, size, source, way.size[:, me])


def _all_to_all(x: Array, output: Array, begins: Array, sizes: Array, places: Array, got: Array) -> Array:
    return lax.ragged_all_to_all(x, output, begins, sizes, places, got, axis_name=EXPERT_AXIS)


def _taken(x: Array, at: Array, is_there: Array, others: Array | None = None) -> Array:
    """The same for narrow rows, and for all rows on CPUs, where XLA has no ragged all-to-all: units of all ranks are
    gathered, and each rank takes those at indices `at`, or units of `others` where `is_there` is false.

    Communication:
        forward   all_gather of x over ep
        backward  nothing
    """
    found = lax.all_gather(x, EXPERT_AXIS, tiled=True).at[at].get(mode="clip")
    return found if others is None else jnp.where(is_there.reshape(-1, *(1 for _ in x.shape[1:])), found, others)


def _arrivals(way: Round, room: int, units: int) -> tuple[Array, Array]:
    """For each unit received in a round, its index among the units of all ranks, and whether it exists."""
    size, source, place = (array.T.reshape(-1) for array in way.of_rank(lax.axis_index(EXPERT_AXIS)))
    unit, ranks = jnp.arange(room), way.size.shape[1]
    at = _slice_of(unit, place + size)
    return at % ranks * units + source[at] + unit - place[at], unit < (place + size)[-1]


def _own_results(way: Round, units: int, room: int) -> tuple[Array, Array]:
    """For each unit of this rank, the index of its result among those of all ranks, and whether it was sent."""
    size, source, place = (array[:, lax.axis_index(EXPERT_AXIS)] for array in way)
    unit, (experts, ranks) = jnp.arange(units), way.size.shape
    at = _slice_of(unit, source + size)
    is_sent = (unit >= source[at]) & (unit < (source + size)[at])
    return at // (experts // ranks) * room + place[at] + unit - source[at], is_sent


def _slice_of(unit: Array, ends: Array) -> Array:
    """The first slice that ends after a unit, or the last slice of all."""
    return jnp.minimum(jnp.searchsorted(ends, unit, side="right", method="compare_all"), len(ends) - 1)


def _gathered(dims: str, x: Array) -> Array:
    mine = Layout.parse(activation(dims))
    gathered = all_gather(f"{mine} -> {mine.without(EXPERT_AXIS)}", x)
    # With a name it would be saved in addition to x if nothing is sent.
    return checkpoint_name(gathered, "dispatch") if bound_axis_sizes().get(EXPERT_AXIS, 1) > 1 else gathered


def _flat(x_BSD: Array) -> Array:
    return x_BSD.reshape(-1, x_BSD.shape[-1])
