"""Decoding with a key-value cache: new tokens pass through the stages and attend to the cached ones.

Decoding has its own layouts, whatever the model was trained with, because one token cannot be sharded over seq: the
residual stream is whole, kernels are column then row, and the vocab is sharded. A layer then sends one all-reduce for
its attention, one for its MLP, and MLA's latents. Context ranks act as data ranks. Parameters are moved to these
layouts once, before the first token, and gathered over data axes, since otherwise all weights would be sent for every
token.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallax.config.sections import BLOCKS, EMBEDDING, HEAD, ModelConfig
from parallax.inference.layer_sequences import Layer, LayerSequence, layer_sequences
from parallax.model.context import Context, tables_of_layers
from parallax.model.embedding import EMBEDDINGS, logits
from parallax.model.families import FAMILIES
from parallax.model.transformer import Parts
from parallax.sharding.activations import BATCH, BATCH_AXES, CONTEXT_AXIS, ROWS, activation
from parallax.sharding.collectives import (
    all_gather,
    as_varying,
    bound_axis_sizes,
    is_bound,
    max_over,
    offset,
    permute,
    reshard,
    sum_over,
    vary_over_pp,
)
from parallax.sharding.eight_bits import gather_rounded, scale_of
from parallax.sharding.host import to_device
from parallax.sharding.layers_on_ranks import Arrangement, arrangements
from parallax.sharding.layout import Layout
from parallax.sharding.mesh import context_as_data
from parallax.sharding.parameter import layouts_of
from parallax.sharding.plan import DATA_AXES, WITHIN_STAGE, ParameterPlan, largest_entry

RESIDUAL, LOGITS_LAYOUT = activation("d_model"), Layout.parse(activation("vocab/tp"))
FAMILY, FORM = FAMILIES["column_row"], EMBEDDINGS["vocab_parallel"]


class Prompts(NamedTuple):
    """Token ids in rows of one length, and the number of empty slots at the start of each row."""

    ids_BS: Array
    empty_B: Array


class CacheForm(NamedTuple):
    """What caches of layers have in common: entries like those of this kind of layers, and as many slots as a layer's
    window, at most those of a row."""

    kind: str
    length: int


class Caches(struct.PyTreeNode):
    """The caches of a stage's layers: for each place of its sequences the entries of every form that a rank has there.

    Layers have arrays of their own, so that a token is written in place; those of a loop are stacked.
    """

    of_sequences: list[list[dict[CacheForm, dict[str, Array]]]]  # [B, slots, ...] of each name
    slots: int = struct.field(pytree_node=False)  # of a row


class Decoder:
    """Cached decoding on a mesh, for parameters that lie as the `rows` of a ShardedModel's plan say. Matrices that are
    rounded to 8 bits in training are here, too.

    Communication, a new token: per layer two all_reduce over tp of `batch/dp seq d_model` (mla: also one number for
    the latent's norm and an all_gather of the latent); per stage one permute over pp; once the embedding's
    all_reduce and an all_gather of the logits over tp, and the chosen ids over tp and pp.
    """

    def __init__(self, model: ModelConfig, rows: Any, mesh: Mesh):
        # Fused kernels are made for many queries and narrow heads: one query has no large matrix of scores, and heads
        # in MLA's latent space are wider than cudnn supports.
        model = dataclasses.replace(model, kernel="xla")
        # One token cannot be sharded over seq, so context ranks shard rows, like data ranks.
        self.mesh = mesh = context_as_data(mesh)
        self.model, self.rows = model, rows
        self.layouts = jax.tree.map(lambda row: row.at_rest.without(CONTEXT_AXIS), rows)
        self.parts = Parts.build(model, RESIDUAL, FAMILY, FORM, mesh.shape["tp"], ROWS)
        self.wanted = layouts_of(self.parts.declared())
        placement = tuple(range(mesh.shape["pp"]))
        self.arrangement = Arrangement(placement, model.layer_kinds)
        self.orders = list(arrangements(placement, model.layer_kinds).values())
        self.sequences = layer_sequences(self.arrangement, model.windows)

    def write(
        self, params: Any, prompts: Prompts, key: Array, pick: Callable, *, tokens: int, ends: tuple[int, ...]
    ) -> Array:
        """Generate up to `tokens` ids after each row, int32 [B, tokens]; what follows one of `ends` has no meaning.

        `pick(key, logits [B, V], rows [B], positions [B])` chooses the ids that follow the text at `positions` in rows
        of the global batch.
        """
        local = partial(self._write, pick=pick, tokens=tokens, ends=ends)
        specs = jax.tree.map(lambda layout: layout.spec(self.mesh), self.layouts)
        rows = Layout.parse(ROWS).spec(self.mesh)
        in_specs = (specs, Prompts(rows, rows), P())
        return self._mapped(local, in_specs, rows)(params, prompts, key)

    def begin(
        self, params: Any, prompts: Prompts, key: Array, pick: Callable, *, tokens: int, ends: tuple[int, ...]
    ) -> tuple[Any, "DecodeState"]:
        """The weights as decoding reads them, and the state after the prompts, with the first of `tokens` ids: what
        `go_on` takes."""

        def local(params, prompts, key):
            weights = self.weights(params)
            state = self._first(partial(self._following, weights, key, pick), prompts, tokens, ends)
            return _to_outside(weights), state._replace(caches=_to_outside(state.caches))

        specs = jax.tree.map(lambda layout: layout.spec(self.mesh), self.layouts)
        rows = Layout.parse(ROWS).spec(self.mesh)
        return self._mapped(local, (specs, Prompts(rows, rows), P()), (self._kept, self._state))(params, prompts, key)

    def go_on(
        self, weights: Any, state: "DecodeState", key: Array, until: Array, pick: Callable, *, ends: tuple[int, ...]
    ) -> "DecodeState":
        """The state with `until` ids after each row, or fewer if all rows have ended."""

        def local(weights, state, key, until):
            choose = partial(self._following, _from_outside(weights), key, pick)
            state = self._further(choose, state._replace(caches=_from_outside(state.caches)), until, ends)
            return state._replace(caches=_to_outside(state.caches))

        return self._mapped(local, (self._kept, self._state, P(), P()), self._state)(weights, state, key, until)

    def _mapped(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A function on each device. On one device no axis is bound, so nothing is sent, and nothing waits."""
        if self.mesh.size == 1:
            return local
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    @property
    def _kept(self) -> P:
        """How what each device keeps for itself lies: see `_to_outside`."""
        return P(self.mesh.axis_names)

    @property
    def _state(self) -> "DecodeState":
        rows = Layout.parse(ROWS).spec(self.mesh)
        return DecodeState(rows, rows, self._kept, P(), P())

    # ---- what runs on each device

    def _write(self, params, prompts, key, *, pick, tokens, ends):
        weights = self.weights(params)
        choose = partial(self._following, weights, key, pick)
        start = self._first(choose, prompts, tokens, ends)
        return self._further(choose, start, tokens, ends).ids_BN

    def _first(self, choose, prompts, tokens, ends):
        """The state after the prompts, with the first of `tokens` ids."""
        batch, prompt = prompts.ids_BS.shape
        first_B, caches = choose(prompts, self.caches(batch, prompt + tokens), 0)
        ids_BN = as_varying(jnp.zeros((batch, tokens), jnp.int32), BATCH_AXES)
        return _append(DecodeState(ids_BN, prompts.empty_B, caches, jnp.int32(0), True), first_B, ends)

    def _further(self, choose, state, until, ends):
        """The state with `until` ids, or fewer if all rows have ended."""
        prompt = state.caches.slots - state.ids_BN.shape[1]

        def step(state):
            ids_B = lax.dynamic_index_in_dim(state.ids_BN, state.count - 1, axis=1, keepdims=False)
            new = Prompts(ids_B[:, None], state.empty_B)
            next_B, caches = choose(new, state.caches, prompt + state.count - 1)
            # A row that has ended repeats its end.
            return _append(state._replace(caches=caches), jnp.where(_are_in(ends, ids_B), ids_B, next_B), ends)

        def is_running(state: DecodeState) -> Array:
            return (state.count < until) & state.running

        return lax.while_loop(is_running, step, state)

    def _following(self, weights, key, pick, new, caches, cursor):
        """The ids after new ones, the same on all tp and pp ranks, and the caches with the new ones."""
        batch, length = new.ids_BS.shape
        rows_B = offset(BATCH, "batch", batch) + jnp.arange(batch)
        x, caches = self.advance(weights, caches, new, cursor)
        positions_B = cursor + length - 1 - new.empty_B

        def choose() -> Array:
            return _once(pick(key, self._last_logits(weights, x), rows_B, positions_B))

        return self.on_every_stage(choose), caches

    def advance(self, weights: Any, caches: Caches, new: Prompts, cursor: Array | int) -> tuple[Array, Caches]:
        """The last stage's output for new tokens, on the first stage, and the caches with these tokens."""
        context = self._context(new, cursor, caches.slots)
        x = self.parts.embedding.apply({"params": weights[EMBEDDING]}, new.ids_BS, context.rows_B, None)

        def through(x, caches):
            of_sequences = []
            for sequence, of_places in zip(self.sequences, caches.of_sequences, strict=True):
                x, of_places = self._through(sequence, weights[BLOCKS], x, of_places, context, caches.slots)
                of_sequences.append(of_places)
            return x, caches.replace(of_sequences=of_sequences)

        x, ranks = as_varying(x), self.mesh.shape["pp"]
        if ranks == 1:
            return through(x, caches)

        def tick(carry, turn):
            mine = turn == lax.axis_index("pp")
            x, caches = lax.cond(mine, through, lambda *same: same, *carry)
            return (permute(RESIDUAL, x, axis="pp"), caches), None

        carry, _ = lax.scan(tick, (x, caches), jnp.arange(ranks))
        return carry

    def _through(
        self, sequence: LayerSequence, blocks: Any, x: Array, of_places: list[dict], context: Context, slots: int
    ) -> tuple[Array, list[dict]]:
        """What the layers of a sequence make of new tokens, and their caches with these."""

        def once(time: Array | int, of_time: Callable, x: Array, of_places: list[dict]) -> tuple[Array, list[dict]]:
            written = []
            for place, (of_ranks, cache) in enumerate(zip(sequence.places, of_places, strict=True)):
                here = self._context_in(context, sequence.place(place, time))
                weights = {layer: partial(of_time, blocks[layer.kind][layer.indices]) for layer in of_ranks if layer}
                x, cache = self._layer(of_ranks, weights, x, cache, here, slots)
                written.append(cache)
            return x, written

        if sequence.times == 1:
            return once(0, lambda weights: weights, x, of_places)
        cursor = context.mask.cursor if x.shape[1] == 1 else None

        def turn(time: Array, carry: tuple[Array, list[dict]]) -> tuple[Array, list[dict]]:
            of_time, (x, stacks) = partial(_of_time, time=time), carry
            x, written = once(time, of_time, x, of_time(stacks))
            put = partial(_with_entries, time=time, cursor=cursor)
            pairs = zip(stacks, written, strict=True)
            return x, [{form: put(form, stack[form], entries[form]) for form in stack} for stack, entries in pairs]

        return lax.fori_loop(0, sequence.times, turn, (x, of_places))

    def _context_in(self, context: Context, place: Array | int) -> Context:
        """The context of the layer in a place of this stage, from that of all layers."""
        if not self.model.settings_of_layers.differ:
            return context
        ranks = self.mesh.shape["pp"]
        numbers = self.arrangement.own_layers() if ranks > 1 else jnp.arange(self.model.layers)
        return context.of_layer(self.model, numbers[place])

    def _layer(
        self, of_ranks: list[Layer | None], weights: dict, x: Array, cache: dict, context: Context, slots: int
    ) -> tuple[Array, dict]:
        """What this rank's layer in a place makes of new tokens. A place without a layer leaves x as it is."""

        def run(layer: Layer, x: Array, cache: dict) -> tuple[Array, dict]:
            here, form = context.of_kind(self.model, layer.kind), self.form(layer, slots)
            block = self.parts.blocks[layer.kind]
            x, entries = block.apply({"params": weights[layer]()}, x, here, cache[form], method="decode")
            return as_varying(x), cache | {form: jax.tree.map(as_varying, entries)}

        layers = list(dict.fromkeys(of_ranks))
        runs = [partial(run, layer) if layer else lambda *same: same for layer in layers]
        if len(runs) == 1:
            return runs[0](x, cache)
        which = jnp.asarray([layers.index(layer) for layer in of_ranks])[lax.axis_index("pp")]
        return lax.switch(which, runs, x, cache)

    def _context(self, new: Prompts, cursor: Array | int, slots: int) -> Context:
        """Context in which new tokens attend to slots up to theirs, and prompts to themselves alone. Empty slots are a
        segment, which no token reads."""
        slot_S = cursor + jnp.arange(new.ids_BS.shape[1])
        positions_BS = jnp.maximum(slot_S[None, :] - new.empty_B[:, None], 0)
        read = slots - 1  # of the tokens of a text, the last is written only
        tables, rows_B = tables_of_layers(self.model, positions_BS, read, new.empty_B), jnp.arange(len(new.ids_BS))
        is_prompt = isinstance(cursor, int) and cursor == 0
        slot_T = slot_S if is_prompt else jnp.arange(slots)
        filled_BT = (slot_T[None, :] >= new.empty_B[:, None]).astype(jnp.int32)
        cursor = None if is_prompt else cursor
        return Context.of_model(self.model, tables, rows_B, None, filled_BT, cursor=cursor)

    def caches(self, batch: int, slots: int) -> Caches:
        """Empty caches of this stage's layers for rows of `slots` tokens, in the compute dtype."""
        bound = bound_axis_sizes()
        rows = batch * math.prod(bound.get(axis, 1) for axis in BATCH_AXES)

        def entries(form: CacheForm, times: int) -> dict[str, Array]:
            block, sizes = self.parts.blocks[form.kind], self.model.of_block(form.kind).sizes
            sizes = {**sizes, "batch": rows, "kv_seq": form.length}
            layouts = block.apply({}, method="cache_layouts")
            shapes = {name: Layout.parse(layout).local_shape(sizes, bound) for name, layout in layouts.items()}
            stacked = (times,) if times > 1 else ()
            return {name: as_varying(jnp.zeros((*stacked, *shape), self.model.dtype)) for name, shape in shapes.items()}

        def of_place(of_ranks: list[Layer | None], times: int) -> dict[CacheForm, dict[str, Array]]:
            forms = {self.form(layer, slots) for layer in of_ranks if layer}
            return {form: entries(form, times) for form in sorted(forms)}

        of_sequences = [[of_place(of_ranks, each.times) for of_ranks in each.places] for each in self.sequences]
        return Caches(of_sequences, slots)

    def form(self, layer: Layer, slots: int) -> CacheForm:
        """The form of a layer's cache for rows of `slots` tokens."""
        return CacheForm(self.cached_as[layer.kind], min(layer.window or slots, slots))

    @functools.cached_property
    def cached_as(self) -> dict[str, str]:
        """For each kind of layers the first one with caches of the same shapes."""
        first: dict[tuple, str] = {}
        return {kind: first.setdefault(block.shapes_of_heads, kind) for kind, block in self.model.blocks.items()}

    def head(self, weights: Any, x: Array) -> Array:
        """Logits [B, S, V] in float32, sharded over the vocab."""
        table = weights[EMBEDDING if self.model.tied else HEAD]["table"]
        hidden = self.parts.head.apply({"params": weights[HEAD]}, x)
        model, form = self.model, self.parts.head.logit_form
        return logits(FORM, ROWS, hidden, table.astype(model.dtype), model.vocab, form)

    def _last_logits(self, weights: Any, x: Array) -> Array:
        """Logits [B, V] of the last token, with the whole vocab."""
        logits_B1V = self.head(weights, x[:, -1:])
        return all_gather(f"{LOGITS_LAYOUT} -> {LOGITS_LAYOUT.without('tp')}", logits_B1V)[:, 0]

    def on_every_stage(self, make: Callable[[], Array]) -> Array:
        """The result of `make`, which runs only on the first stage, sent to all stages."""
        like = jax.eval_shape(make)
        zeros = as_varying(jnp.zeros(like.shape, like.dtype), jax.typeof(like).mat.varying)
        if self.mesh.shape["pp"] == 1:
            return sum_over(make(), ["pp"])
        on_first = lax.cond(lax.axis_index("pp") == 0, lambda: vary_over_pp(make()), lambda: vary_over_pp(zeros))
        return sum_over(on_first, ["pp"])

    def weights(self, params: Any) -> Any:
        """Parameters in the layouts of decoding, layers apart or in the stack of a loop, kernels cast to the compute
        dtype or rounded to 8 bits before they are sent."""

        def moved(row: ParameterPlan, stored: Layout, wanted: Layout, weight: Array) -> Array:
            # Tables are sharded over pp, too; layers stay on their ranks.
            whole = stored.without(*(axis for axis in (*DATA_AXES, "pp") if axis not in wanted.used_axes()))
            if row.rounded_to:
                weight = weight.astype(self.model.dtype)
                scale = scale_of(max_over(largest_entry(row.spec, stored, weight), WITHIN_STAGE), row.rounded_to)
                move = f"{stored} -> {whole}"
                (weight,) = gather_rounded((move,), row.rounded_to, lambda axes: 1, [weight], [scale])
            elif whole != stored:
                weight = all_gather(f"{stored} -> {whole}", weight.astype(self.model.dtype))
            return reshard(f"{whole} -> {wanted}", weight)

        params = jax.tree.map(to_device, params)
        # One stage per rank, whatever the schedule in training.
        kinds = zip(self.orders, *map(self.parts.by_kind, (params[BLOCKS], self.layouts[BLOCKS])), strict=True)
        staged = [leaf for order, tree, stored in kinds for leaf in order.moved(*map(jax.tree.leaves, (stored, tree)))]
        staged = jax.tree.unflatten(jax.tree.structure(params[BLOCKS]), staged)

        def in_stages(layout: Layout) -> Layout:
            return layout.without("pp").with_cut("layers", ("pp",))

        layouts = self.layouts | {BLOCKS: jax.tree.map(in_stages, self.layouts[BLOCKS])}
        weights = jax.tree.map(moved, self.rows, layouts, self.wanted, {**params, BLOCKS: staged})
        stacks = dict(zip(self.parts.blocks, self.parts.by_kind(weights[BLOCKS]), strict=True))
        blocks = {kind: {} for kind in stacks}
        for layer in itertools.chain.from_iterable(sequence.layers for sequence in self.sequences):
            blocks[layer.kind][layer.indices] = _taken(stacks[layer.kind], layer.indices)
        return weights | {BLOCKS: blocks}


def _taken(stack: Any, indices: tuple[int, ...]) -> Any:
    """A layer of a stack, or a stack of those that a loop runs. A slice in the loop of tokens would be a copy for each
    of them."""
    first, *others = indices
    if not others:
        return jax.tree.map(lambda weight: weight[first], stack)
    return jax.tree.map(lambda weight: weight[first : others[-1] + 1 : others[0] - first], stack)


def _of_time(stacks: Any, time: Array) -> Any:
    """The arrays of one repetition."""
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, time, keepdims=False), stacks)


def _with_entries(form: CacheForm, stacks: dict, entries: dict, *, time: Array, cursor: Array | None) -> dict:
    """Stacks of caches with the entries of one repetition. With a cursor only its token is new, and of a cache of
    tokens only its slot is written."""

    def put(stack: Array, entries: Array) -> Array:
        if cursor is None or stack.shape[-2] != form.length:
            return lax.dynamic_update_index_in_dim(stack, entries, time, axis=0)
        slot = cursor % form.length
        new = lax.dynamic_slice_in_dim(entries, slot, 1, axis=-2)
        return lax.dynamic_update_slice(stack, new[None], (time, *[0] * (stack.ndim - 3), slot, 0))

    return jax.tree.map(put, stacks, entries)


def _to_outside(tree: Any) -> Any:
    """What a device keeps for itself between two programs: pieces of arrays with a dim for all devices."""
    return jax.tree.map(lambda leaf: as_varying(leaf)[None], tree)


def _from_outside(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


class DecodeState(NamedTuple):
    """The state carried from token to token."""

    ids_BN: Array
    empty_B: Array  # empty slots at the start of each row
    caches: Caches
    count: Array  # ids written
    running: Array | bool  # whether any row of the global batch has not ended


def _append(state: DecodeState, next_B: Array, ends: tuple[int, ...]) -> DecodeState:
    ids_BN = lax.dynamic_update_slice_in_dim(state.ids_BN, next_B[:, None], state.count, axis=1)
    running = sum_over(jnp.any(~_are_in(ends, next_B)).astype(jnp.int32), BATCH_AXES) > 0
    return state._replace(ids_BN=ids_BN, count=state.count + 1, running=running)


def _are_in(ends: tuple[int, ...], ids_B: Array) -> Array:
    return jnp.isin(ids_B, jnp.array(ends, jnp.int32))


def _once(ids_B: Array) -> Array:
    """Ids, which are the same on all tp ranks, as a value that does not vary over tp."""
    if not is_bound("tp"):
        return ids_B
    return sum_over(jnp.where(lax.axis_index("tp") == 0, ids_B, 0), ["tp"])
