"""The ragged exchange, in an order by hand: rows travel while others are multiplied.

docs/ep.md has a picture of one exchange, step by step. parallax/model/experts/exchange.py says what goes in and out,
and has the same as plain code. Here rows are sorted by expert and sent in slices, by rounds: `Slices` says which,
`_send` and `send_back` send them, and `ExchangedRows` has what both passes know. The vjp is in two functions,
`_placeholders` and `_exchange`, so that the backward pass can wait for the gradient of shared experts between them.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.experts.exchange_costs import ROOM_OVER_EVEN, usual_rows
from parallax.model.experts.experts import USUAL_LOAD, HeldExperts, KernelSums
from parallax.model.experts.rows import Rows, collect, dispatch, sort_rows
from parallax.sharding.activations import EXPERT_AXIS
from parallax.sharding.collectives import as_varying, varying_axes
from parallax.sharding.platform import platform_traced

RankGroups = list[list[int]] | None  # of expert ranks; None: all are one group

SENT = "exchange.sent"  # the scope of exchanges to the experts' ranks; others go back
UNIT_ROWS = 8  # each expert's rows of a rank are sent as a multiple
LEAST_UNITS = 2048  # that are sent in two rounds
UNITS_STEP = 64  # of the first round, so that its rows fill blocks of kernels


def sums_of_rows(
    experts: HeldExperts,
    x_ND: Array,
    weights_NK: Array,
    ids_NK: Array,
    shared_experts: Callable[[Array], Array] | None,
    send_again: bool,
    hosts: int = 1,
) -> tuple[Array, Array | None]:
    """For each token the sum of its experts' outputs times their weights, a partial sum over tp, and what the shared
    experts compute. See `ragged_exchange`.

    With several `hosts` the ranks of one send to each other alone. Tokens are those that came to it, `ids_NK` numbers
    the experts of the host, and other numbers are no choices: under an even load one in `hosts` is a choice.
    """
    ranks, (tokens, choices) = lax.axis_size(EXPERT_AXIS) // hosts, ids_NK.shape
    x_ND, weights_NK, ids_NK, experts = alike_over_ranks(x_ND, weights_NK, ids_NK, experts)
    rows = sort_rows(ids_NK, ranks * experts.count, most=choices, unit=UNIT_ROWS)
    counts_PE, sent_weights = _announced(rows.sizes_E // UNIT_ROWS, _weights(weights_NK, rows), ranks)
    most = ranks * (tokens * min(choices, experts.count) // UNIT_ROWS + experts.count)
    usual = -(-usual_rows(ranks * ids_NK.size // hosts, UNIT_ROWS * most, ranks) // UNIT_ROWS)
    # Collectives in branches could deadlock on simulated devices.
    sizes = BufferSizes((most,) if platform_traced() == "cpu" else usual_rounds(usual), most, send_again)
    if hosts > 1 and platform_traced() != "cpu":  # each host may send all its tokens to this one
        sent = usual_sent(ids_NK.size // hosts, len(rows.choice_R) // UNIT_ROWS, ranks * experts.count)
        sizes = sizes._replace(sent=sent)
    saved, token = _placeholders(sizes, weights_NK, ExchangedRows(x_ND, experts, rows, counts_PE, sent_weights))
    shared = shared_experts(token) if shared_experts else None
    x_ND, experts = jax.tree.map(lax.stop_gradient, (x_ND, experts))
    return _exchange(sizes, saved, ExchangedRows(x_ND, experts, rows, counts_PE, sent_weights)), shared


def alike_over_ranks(*given: Any) -> tuple[Any, ...]:
    """Arrays or trees, all varying over ep and over the axes over which any of them varies."""
    axes = frozenset([EXPERT_AXIS]).union(*map(varying_axes, jax.tree.leaves(given)))
    return jax.tree.map(lambda array: as_varying(array, axes), given)


class BufferSizes(NamedTuple):
    """The number of units for which a rank has room in each round of a usual load, and the most units that may arrive.
    Further rounds have the room of the last one. With `send_again`, what arrives is not saved. Of its own units a rank
    sends at most the first `sent` in the rounds of a usual load, None: all."""

    rounds: tuple[int, ...]
    most: int
    send_again: bool = False
    sent: int | None = None

    @property
    def usual(self) -> int:
        return sum(self.rounds)

    @property
    def has_further(self) -> bool:
        """Whether more may be sent than in a usual load."""
        return self.usual < self.most or self.sent is not None

    def usual_slices(self, counts_PE: Array) -> list["Slices"]:
        """What each round of a usual load sends."""
        starts, counts_PE = itertools.accumulate(self.rounds, initial=0), self._first(counts_PE)
        return [slices_of(counts_PE, start, units) for start, units in zip(starts, self.rounds)]

    def further_slices(self, counts_PE: Array, number: Array) -> "Slices":
        """What further round `number` sends, counted from 0."""
        if self.sent is None:
            return slices_of(counts_PE, self.usual + number * self.rounds[-1], self.rounds[-1])
        left_PE = self._left(counts_PE)
        slices = slices_of(left_PE, number * self.rounds[-1], self.rounds[-1])
        skipped_PE = _before(counts_PE) + counts_PE - left_PE - _before(left_PE)
        return slices._replace(source=slices.source + skipped_PE.T)

    def further_units(self, counts_PE: Array) -> Array:
        """The units that go in further rounds to the rank that receives most in them; none or less in a usual load."""
        if self.sent is None:
            return most_received(counts_PE) - self.usual
        return most_received(self._left(counts_PE))

    def _first(self, counts_PE: Array) -> Array:
        return counts_PE if self.sent is None else jnp.clip(self.sent - _before(counts_PE), 0, counts_PE)

    def _left(self, counts_PE: Array) -> Array:
        """Units of each rank for each expert that the rounds of a usual load do not send, the last ones."""
        return counts_PE - slices_of(self._first(counts_PE), 0, self.usual).size.T


def usual_rounds(units: int) -> tuple[int, ...]:
    """The units of each round. Of two the first has a quarter: nothing hides its rows' messages, and its products hide
    those of the others.

    >>> usual_rounds(2000), usual_rounds(15360)
    ((2000,), (3840, 11520))
    """
    if units < LEAST_UNITS:
        return (units,)
    first = units // 4 // UNITS_STEP * UNITS_STEP or 1
    return first, units - first


def usual_sent(choices: int, units: int, experts: int) -> int | None:
    """Of the units that a rank may have to send, those of a usual load, in which so many `choices` are of these experts
    and each expert has a unit that is not full; None if there are no more.

    >>> usual_sent(1024, 300, 8), usual_sent(1024, 160, 8)
    (168, None)
    """
    usual = -(-int(ROOM_OVER_EVEN * choices) // UNIT_ROWS) + experts
    return usual if usual < units else None


class Slices(NamedTuple):
    """The slices of units that one round sends, for each expert and each sending rank, [E, P]. The P ranks are all
    expert ranks, or groups of them: see `group_rank`."""

    size: Array
    source: Array  # start of a slice among the sending rank's units, which are sorted by expert
    place: Array  # its start on the expert's rank, whose units are sorted by expert, then by rank

    def to_rank(self, rank: Array) -> "Slices":
        """The slices for the experts of `rank`, from each rank: [P, experts of a rank]."""
        experts = len(self.size) // self.size.shape[1]
        return Slices(*(lax.dynamic_slice_in_dim(array, rank * experts, experts).T for array in self))

    def rows_of_experts(self) -> Array:
        """Number of rows that each of this rank's experts gets."""
        return UNIT_ROWS * self.to_rank(group_rank(self.size.shape[1])).size.sum(axis=0)

    def reverse(self) -> "Slices":
        """The slices that bring results back, as if these were sent; each rank has one expert."""
        return Slices(self.size.T, self.place.T, self.source.T)


def slices_of(counts_PE: Array, start: Array | int, units: int) -> Slices:
    """The slices sent in a round, if rank p has `counts_PE[p, e]` units for expert e, and each rank has received
    `start` units and receives up to `units` more. No communication.

    >>> counts = jnp.array([[3, 1], [2, 2]])
    >>> [slices_of(counts, start, 4).size.tolist() for start in (0, 4)]
    [[[3, 1], [1, 2]], [[0, 1], [0, 0]]]
    """
    ranks, experts = counts_PE.shape
    counts_EP = counts_PE.T
    place = _before(counts_EP.reshape(ranks, experts)).reshape(experts, ranks) - start
    first, last = (jnp.clip(edge - place, 0, counts_EP) for edge in (0, units))
    return Slices(last - first, _before(counts_PE).T + first, place + first)


def most_received(counts_PE: Array) -> Array:
    """The number of units of the rank that receives most."""
    return counts_PE.sum(axis=0).reshape(len(counts_PE), -1).sum(axis=1).max()


def _before(counts: Array) -> Array:
    """Exclusive cumulative sum along each row."""
    return jnp.cumsum(counts, axis=1) - counts


# ---- order


@jax.custom_vjp
def ordered(x: Array, token: Array | None) -> Array:
    """`x`, which is read by shared experts. In the backward pass its gradient is computed before the first products of
    experts."""
    return x


def _ordered_forward(x: Array, token: Array | None) -> tuple[Array, Array | None]:
    return x, token


def _ordered_backward(token: Array | None, dx: Array) -> tuple[Array, Array | None]:
    return dx, None if token is None else as_varying(_probe(dx).astype(token.dtype), varying_axes(token))


ordered.defvjp(_ordered_forward, _ordered_backward)


def _probe(x: Array) -> Array:
    """An entry, which is known when `x` is."""
    return x.reshape(-1)[0]


def _only_after(sizes_E: Array, earlier: Array) -> Array:
    """The sizes, but only after `earlier` has been computed, as `collectives.after`."""
    return jnp.where(jnp.isnan(earlier), 0, sizes_E)


# ---- both passes


class ReceivedRows(NamedTuple):
    """The rows that a rank receives in a round, and their products with gate and up: [rows, ...]."""

    x: Array
    weights: Array
    gate: Array
    up: Array


class SavedForBackward(NamedTuple):
    """The result of `_exchange` and what it saves, as zeros; as gradients, that of the result and what was saved."""

    y_ND: Array
    received: list[ReceivedRows]


class RowGradients(NamedTuple):
    """Of a round: gradients of the products with gate and up and of the weights, the input of down, recomputed, and the
    gradient of its product."""

    gate: Array
    up: Array
    weights: Array
    hidden: Array
    y: Array


class ExchangedRows(NamedTuple):
    """What both passes know: this rank's tokens, its experts, the rows that it sends, how many units each rank sends to
    each expert, and the weights that all ranks send."""

    x_ND: Array
    experts: HeldExperts
    rows: Rows
    counts_PE: Array
    sent_weights: Array

    @property
    def units(self) -> int:
        """The number of units for which this rank has places: all that it may send, or those of a usual load."""
        return len(self.rows.choice_R) // UNIT_ROWS

    def of_usual_load(self, sizes: BufferSizes) -> "ExchangedRows":
        """The same for the rounds of a usual load, with places for the rows that these send."""
        if sizes.sent is None:
            return self
        return self._replace(rows=self.rows._replace(choice_R=self.rows.choice_R[: sizes.sent * UNIT_ROWS]))

    def send(self, array_ND: Array, slices: Slices, units: int, earlier: Array | None = None) -> Array:
        """The rows of a round, of tokens or of their gradients, sent after `earlier`."""
        return _as_rows(_send(_in_units(dispatch(array_ND, self.rows)), slices, units, earlier))

    def receive(
        self, slices: Slices, units: int, name: Callable | None = None, earlier: Array | None = None
    ) -> tuple[ReceivedRows, Array]:
        """What arrives in a round, sent after `earlier`, and the input of down; `name` names what may be saved."""
        name = name or (lambda array, _: array)
        index, _ = _arrivals(slices, units, len(self.sent_weights) // len(self.counts_PE))
        weights = _as_rows(self.sent_weights.at[index].get(mode="clip"))
        x = name(self.send(self.x_ND, slices, units, earlier), "dispatch")
        gate, up, hidden = self.experts.gated(self.experts.gate.input(x), weights, slices.rows_of_experts())
        return ReceivedRows(x, weights, name(gate, "experts"), name(up, "experts")), hidden

    def gradients(
        self, slices: Slices, received: ReceivedRows, dy_ND: Array, sizes_E: Array, earlier: Array | None = None
    ) -> RowGradients:
        """Gradients of a round, whose results' gradient is sent after `earlier`."""
        dy = self.send(dy_ND, slices, len(received.weights) // UNIT_ROWS, earlier)
        saved = received.gate, received.up, received.weights
        return RowGradients(*self.experts.gated_gradients(self.experts.down.gradient(dy), *saved, sizes_E), dy)

    def add_to_tokens(
        self, slices: Slices, of_rows: RowGradients, sums: tuple[Array, Array, list]
    ) -> tuple[Array, Array, list]:
        """The rows' gradients of tokens and of weights, sent back, and the largest magnitudes of the products."""
        (gate, up, down), sizes_E, (dx_R, dweights_R, most) = self.experts, slices.rows_of_experts(), sums
        dx, *other = self.experts.input_gradients(of_rows.gate, of_rows.up, sizes_E)
        dx = sum(other, dx.astype(jnp.float32)).astype(dx.dtype)
        pairs = (gate, of_rows.gate), (up, of_rows.up), (down, of_rows.hidden)
        latest = [kernels.most(array, sizes_E) for kernels, array in pairs]
        d_weights = _in_units(of_rows.weights)
        index, is_sent = _results(slices, len(dx_R), len(d_weights))
        dweights_R = _taken(d_weights, slices, index, is_sent, dweights_R)
        dx_R = send_back(_in_units(dx), slices, dx_R)
        return dx_R, dweights_R, jax.tree.map(jnp.maximum, most or latest, latest)

    def add_to_kernels(
        self, slices: Slices, x: Array, of_rows: RowGradients, sums: list[KernelSums | None]
    ) -> list[KernelSums]:
        """Gradients of the kernels of gate, up and down, added to those of earlier rounds."""
        pairs = (x, of_rows.gate), (x, of_rows.up), (of_rows.hidden, of_rows.y)
        given = zip(self.experts, pairs, sums, strict=True)
        return [held.sums(*pair, slices.rows_of_experts(), earlier) for held, pair, earlier in given]


# The vjp of an exchange, in two functions. The forward pass is that of `_exchange`, the backward pass that of
# `_placeholders`. Forward `_placeholders` makes zeros; backward `_exchange` passes on what it saved, as "gradients" of
# these. Shared experts are called between the two, so the gradient of their input is known before the backward pass,
# and products can wait for it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _placeholders(sizes: BufferSizes, weights_NK: Array, given: ExchangedRows) -> tuple[SavedForBackward, Array]:
    return _placeholders_forward(sizes, weights_NK, given)[0]


def _placeholders_forward(sizes: BufferSizes, weights_NK: Array, given: ExchangedRows) -> tuple[Any, Any]:
    x_ND, wide = given.x_ND, given.experts.gate.kernels

    def zeros(dtype: Any, *shape: int) -> Array:
        return as_varying(jnp.zeros(shape, dtype), varying_axes(x_ND))

    received = [
        ReceivedRows(
            zeros(x_ND.dtype, 0 if sizes.send_again else units * UNIT_ROWS, x_ND.shape[1]),
            zeros(weights_NK.dtype, units * UNIT_ROWS, 1),
            zeros(wide.dtype, units * UNIT_ROWS, wide.shape[2]),
            zeros(wide.dtype, units * UNIT_ROWS, wide.shape[2]),
        )
        for units in sizes.rounds
    ]
    saved = SavedForBackward(zeros(x_ND.dtype, *x_ND.shape), received)
    return (saved, zeros(jnp.float32)), (weights_NK, given, given.experts.gate.most(x_ND))


# It saves, by name, the received rows and the two products of the usual rounds. Nothing else is saved; further rounds
# are recomputed.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(sizes: BufferSizes, saved: SavedForBackward, given: ExchangedRows) -> Array:
    return _exchange_forward(sizes, saved, given)[0]


def _exchange_forward(
    sizes: BufferSizes, saved: SavedForBackward, given: ExchangedRows
) -> tuple[Array, list[ReceivedRows]]:
    down, few = given.experts.down, given.of_usual_load(sizes)

    def run(
        given: ExchangedRows, slices: Slices, units: int, y: Array, *name_and_earlier: Any
    ) -> tuple[Array, ReceivedRows]:
        rows, hidden = given.receive(slices, units, *name_and_earlier)
        result = down.times(down.input(hidden), slices.rows_of_experts())
        return send_back(_in_units(result), slices, y), rows

    def further(number: Array, y: Array) -> Array:
        return run(given, sizes.further_slices(given.counts_PE, number), sizes.rounds[-1], y)[0]

    def name(x: Array, part: str) -> Array:
        return x if sizes.send_again and part == "dispatch" else checkpoint_name(x, part)

    y, received, earlier = _unset(given.x_ND, few.units), [], None
    for slices, units, empty in zip(sizes.usual_slices(given.counts_PE), sizes.rounds, saved.received):
        y, rows = run(few, slices, units, y, name, earlier)
        received.append(rows._replace(x=empty.x) if sizes.send_again else rows)
        earlier = _probe(rows.x)
    grown = functools.partial(_with_places, units=given.units)
    return _remaining_rounds(sizes, given, lambda: y, further, lambda y: _summed(y, given.rows), grown), received


def _exchange_backward(sizes: BufferSizes, received: list[ReceivedRows], dy_ND: Array) -> tuple[Any, ...]:
    return SavedForBackward(dy_ND, received), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _placeholders_backward(
    sizes: BufferSizes, saved: Any, cotangents: tuple[SavedForBackward, Array]
) -> tuple[Array, Any]:
    (dy_ND, received), earlier = cotangents
    weights_NK, given, of_x = saved
    few = given.of_usual_load(sizes)
    rounds = sizes.usual_slices(given.counts_PE)

    # The first products come after those of shared experts, which hide the messages of the first rows; gradients of the
    # results of other rounds are sent after the first products, which hide theirs.
    gradients = []
    for slices, rows in zip(rounds, received):
        sizes_E = slices.rows_of_experts()
        order = (sizes_E, _probe(gradients[0].gate)) if gradients else (_only_after(sizes_E, earlier), None)
        gradients.append(few.gradients(slices, rows, dy_ND, *order))

    sums = (*(_unset(array, few.units) for array in (given.x_ND, weights_NK[:, :1])), [])
    kernels, is_alone = [None] * len(given.experts), len(rounds) == 1
    for slices, rows, of_round in zip(rounds, received, gradients):
        sums, x = few.add_to_tokens(slices, of_round, sums), rows.x
        if sizes.send_again:
            before = None if kernels[0] is None else sum(_probe(sums.kernels) for sums in kernels)
            x = few.send(given.x_ND, slices, len(rows.weights) // UNIT_ROWS, before)
        add_round = functools.partial(given.add_to_kernels, slices, x, of_round)
        kernels = kernels if is_alone else add_round(kernels)

    # Alone, a round is multiplied inside the branch. Of two rounds the second one adds to what would be copied there.
    def sums_of_kernels() -> list[KernelSums]:
        return add_round(kernels) if is_alone else kernels

    def recomputed(number: Array) -> tuple[Slices, ReceivedRows, RowGradients]:
        slices = sizes.further_slices(given.counts_PE, number)
        rows, _ = given.receive(slices, sizes.rounds[-1])
        return slices, rows, given.gradients(slices, rows, dy_ND, slices.rows_of_experts())

    def further_tokens(number: Array, sums: tuple[Array, Array, list]) -> tuple[Array, Array, list]:
        slices, _, of_round = recomputed(number)
        return given.add_to_tokens(slices, of_round, sums)

    def further_kernels(number: Array, sums: list) -> list[KernelSums]:
        slices, rows, of_round = recomputed(number)
        return given.add_to_kernels(slices, rows.x, of_round, sums)

    def of_tokens(sums: tuple[Array, Array, list]) -> tuple[Array, Array, list]:
        return _summed(sums[0], given.rows), _summed(sums[1], given.rows.of_choices()), sums[2]

    def grown(sums: tuple[Array, Array, list]) -> tuple[Array, Array, list]:
        return *(_with_places(array, given.units) for array in sums[:2]), sums[2]

    dx, dweights, largest = _remaining_rounds(sizes, given, lambda: sums, further_tokens, of_tokens, grown)
    kernels = _remaining_rounds(sizes, given, sums_of_kernels, further_kernels, lambda kernels: kernels)
    of_d_gate, of_d_up, of_hidden = largest
    most = (of_x, of_d_gate), (of_x, of_d_up), (of_hidden, given.experts.down.most(dy_ND))
    d_experts = given.experts.with_gradients(kernels, most)
    return dweights.reshape(weights_NK.shape), ExchangedRows(dx, d_experts, None, None, None)


_placeholders.defvjp(_placeholders_forward, _placeholders_backward)


def _remaining_rounds(
    sizes: BufferSizes,
    given: ExchangedRows,
    begin: Callable[[], Any],
    run: Callable[[Array, Any], Any],
    end: Callable[[Any], Any],
    grown: Callable[[Any], Any] = lambda state: state,
) -> Any:
    """Result of `end` on the state of `begin` after the further rounds, with places for all rows if it is `grown`; a
    usual load needs none."""
    if not sizes.has_further:
        return end(begin())
    left = sizes.further_units(given.counts_PE)
    with jax.named_scope(USUAL_LOAD):
        # `begin` or `end` computes something inside the branch: a branch that returns its input copies it.
        return lax.cond(
            left <= 0,
            lambda: end(begin()),
            lambda: end(lax.fori_loop(0, -(-left // sizes.rounds[-1]), run, grown(begin()))),
        )


# ---- rows, units and messages


def _weights(weights_NK: Array, rows: Rows) -> Array:
    """The weight of each row that is sent, in units; 0 for rows of no choice."""
    weights_R1 = dispatch(lax.stop_gradient(weights_NK).reshape(-1, 1), rows.of_choices())
    return _in_units(jnp.where((rows.choice_R < weights_NK.size)[:, None], weights_R1, 0))


def _announced(counts_E: Array, weights: Array, ranks: int) -> tuple[Array, Array]:
    """The counts and the weights that all `ranks` of a group send: one gather, since rows are sent by the counts. A
    gather of the weights alone would wait behind the rows, and the first products for it.

    Communication:
        forward   all_gather of the counts with the weights over ep
        backward  nothing
    """
    of_this_rank = jnp.concatenate([counts_E, lax.bitcast_convert_type(weights, jnp.int32).reshape(-1)])
    of_all = as_varying(gather_group(of_this_rank[None], ranks), varying_axes(weights))
    counts_PE, weights_of_all = of_all[:, : len(counts_E)], of_all[:, len(counts_E) :]
    return counts_PE, lax.bitcast_convert_type(weights_of_all, weights.dtype).reshape(-1, *weights.shape[1:])


def _summed(y: Array, rows: Rows) -> Array:
    """The sum of each token's rows, [N, D]."""
    return collect(_as_rows(y), rows)


def _in_units(x_RD: Array) -> Array:
    """Rows as units, [U, 8, D]. On TPU rows of [R, D] share tiles with seven others, so that moving one would rewrite
    them; a unit has tiles of its own, and this changes nothing in memory."""
    return x_RD.reshape(-1, UNIT_ROWS, x_RD.shape[1])


def _as_rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[2])


def _unset(like_ND: Array, units: int) -> Array:
    """An uninitialised buffer for units; each will be written or is never read."""
    return as_varying(lax.empty((units, UNIT_ROWS, like_ND.shape[-1]), like_ND.dtype), varying_axes(like_ND))


def _with_places(x: Array, units: int) -> Array:
    """Units with places for more of them behind."""
    return x if len(x) == units else jnp.concatenate([x, _unset(x, units - len(x))])


def _send(x: Array, slices: Slices, units: int, earlier: Array | None = None) -> Array:
    """The received units, sorted by expert: [units, ...]; those after them are undefined. They are sent after
    `earlier`.

    Communication:
        forward   all_to_all of x over ep
        backward  nothing
    """
    if platform_traced() == "cpu":
        return _taken(x, slices, *_arrivals(slices, units, len(x)))
    rank = group_rank(slices.size.shape[1])
    sent, arriving = (array[:, rank] for array in slices), (array.reshape(-1) for array in slices.to_rank(rank))
    (size, source, place), (arriving_size, _, _) = sent, arriving
    received = _unset(x, units)
    if earlier is not None:
        received = received.at[0, 0, 0].set(earlier.astype(x.dtype))  # what comes is written over it
    with jax.named_scope(SENT):
        return _all_to_all(x, received, source, size, place, arriving_size, _groups(slices.size.shape[1]))


def send_back(y: Array, slices: Slices, others: Array, apart: int = 1) -> Array:
    """Send results back and write them into `others` at the positions of the rows that were sent. Ranks of a group are
    `apart` from each other.

    Communication:
        forward   all_to_all of y over ep
        backward  nothing
    """
    if platform_traced() == "cpu":
        return _taken(y, slices, *_results(slices, len(others), len(y), apart), others, apart)
    rank = group_rank(slices.size.shape[1], apart)
    size, source, place = (array.reshape(-1) for array in slices.to_rank(rank))
    groups = _groups(slices.size.shape[1], apart)
    return _all_to_all(y, others, place, size, source, slices.size[:, rank], groups)


def _all_to_all(
    x: Array, output: Array, begins: Array, sizes: Array, places: Array, arriving: Array, groups: RankGroups
) -> Array:
    slices = begins, sizes, places, arriving
    return lax.ragged_all_to_all(x, output, *slices, axis_name=EXPERT_AXIS, axis_index_groups=groups)


def gather_group(x: Array, ranks: int, apart: int = 1) -> Array:
    """The arrays of this rank's group, one after the other.

    Communication:
        forward   all_gather of x over ep
        backward  the transposes
    """
    return lax.all_gather(x, EXPERT_AXIS, tiled=True, axis_index_groups=_groups(ranks, apart))


def _groups(ranks: int, apart: int = 1) -> RankGroups:
    """The groups of `ranks` expert ranks, which are `apart` from each other; None if all are one group."""
    every = lax.axis_size(EXPERT_AXIS)
    if ranks == every:
        return None
    return [[*range(first, first + ranks * apart, apart)] for first in range(every) if first // apart % ranks == 0]


def group_rank(ranks: int, apart: int = 1) -> Array:
    """This rank's number in its group."""
    rank = lax.axis_index(EXPERT_AXIS)
    return rank if ranks == lax.axis_size(EXPERT_AXIS) else rank // apart % ranks


def _taken(
    x: Array, slices: Slices, index: Array, is_there: Array, others: Array | None = None, apart: int = 1
) -> Array:
    """The same for narrow rows, and for all rows on CPUs, where XLA has no ragged all-to-all: units of all ranks are
    gathered, and each rank takes those at `index`, or units of `others` where `is_there` is false.

    Communication:
        forward   all_gather of x over ep
        backward  nothing
    """
    taken = gather_group(x, slices.size.shape[1], apart).at[index].get(mode="clip")
    return taken if others is None else jnp.where(is_there.reshape(-1, *(1 for _ in x.shape[1:])), taken, others)


def _arrivals(slices: Slices, room: int, units: int) -> tuple[Array, Array]:
    """For each of `room` units received in a round, its index among the `units` of each rank, and whether it exists."""
    unit, ranks = jnp.arange(room), slices.size.shape[1]
    size, source, place = (array.T.reshape(-1) for array in slices.to_rank(group_rank(ranks)))
    of_unit = _slice_of(unit, place + size)
    return of_unit % ranks * units + source[of_unit] + unit - place[of_unit], unit < (place + size)[-1]


def _results(slices: Slices, units: int, room: int, apart: int = 1) -> tuple[Array, Array]:
    """For each of this rank's `units`, the index of its result among the `room` units of each rank, and whether it was
    sent."""
    unit, (experts, ranks) = jnp.arange(units), slices.size.shape
    size, source, place = (array[:, group_rank(ranks, apart)] for array in slices)
    of_unit = _slice_of(unit, source + size)
    is_sent = (unit >= source[of_unit]) & (unit < (source + size)[of_unit])
    return of_unit // (experts // ranks) * room + place[of_unit] + unit - source[of_unit], is_sent


def _slice_of(unit: Array, ends: Array) -> Array:
    """The first slice that ends after a unit, or the last slice of all."""
    return jnp.minimum(jnp.searchsorted(ends, unit, side="right", method="compare_all"), len(ends) - 1)
