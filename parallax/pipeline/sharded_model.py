"""ShardedModel: a model sharded over a mesh by layout strings; results are the same on every mesh, up to rounding."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config import sections
from parallax.config.remat import check_residuals_on, recomputed_parts
from parallax.config.sections import AUTO, BLOCKS, EMBEDDING, HEAD
from parallax.model import checks
from parallax.model.batch import BATCH_ARRAYS, checked
from parallax.model.context import Context, training_context
from parallax.model.embedding import EMBEDDINGS
from parallax.model.exchange import SENT_AGAIN
from parallax.model.families import CONTEXTS, FAMILIES
from parallax.model.products import COMPUTE, EIGHT_BIT_PRODUCTS, ROUNDED, apart, rounded_kernels, with_largest_weights
from parallax.model.rope import Rope
from parallax.model.traffic import even_load, exchange_of
from parallax.model.transformer import Parts
from parallax.pipeline.boundary import BatchedHead, EmbedAndHead, LossOnly, MicrobatchHead, Tokens, folds
from parallax.pipeline.buffers import index
from parallax.pipeline.executor import Executor, LayerLoop, LayerStack, Stage
from parallax.pipeline.layer_order import Arrangement, arrangements
from parallax.pipeline.observed import ObservedStage, all_seen, nothing_seen
from parallax.runtime.errors import ConfigError
from parallax.schedules import by_name, gpipe_on
from parallax.sharding import activations
from parallax.sharding.activations import BATCH, BATCH_AXES, CONTEXT_AXIS, EXPERT_AXIS, ROWS, SHARED_ROWS, TOKENS
from parallax.sharding.collectives import all_gather, as_varying, offset, reshard, sum_over
from parallax.sharding.compiler import clears_what_is_overwritten, first_group, relays_what_is_read
from parallax.sharding.frozen import freeze
from parallax.sharding.host import DEVICE, MEMORY_KINDS
from parallax.sharding.layout import Layout
from parallax.sharding.mesh import is_simulated
from parallax.sharding.parameter import stored_as
from parallax.sharding.plan import ParameterPlan, Policies, ShardingPlan
from parallax.sharding.zigzag import context_ranks, own_tokens, to_order

DROPOUT = 0x44524F50  # "DROP": keeps dropout's keys apart from those of the initial values


class ShardedModel:
    """Parameters, loss, gradients and logits of a model on a mesh.

    `mesh` may be a jax.sharding.AbstractMesh: then layouts, shardings and shapes are known, but nothing can run.
    `weights_dtype` is the dtype of parameters between steps, `masters_on` their memory, and `states_on` that of the
    optimizer states; `frozen` parameters are not trained: see OptimizerConfig. A model that `measures` computes 8-bit
    products in the compute dtype, to find their first scales: see parallax/model/products.py.
    Raises ConfigError if a size does not divide over its axes.
    """

    def __init__(
        self,
        model: sections.ModelConfig,
        layout: sections.LayoutConfig,
        pipeline: sections.PipelineConfig,
        data_parallel: sections.DataParallelConfig,
        fsdp: sections.FsdpConfig,
        loss: sections.LossConfig,
        mesh: Any,
        weights_dtype: str = "float32",
        masters_on: str = DEVICE,
        states_on: str = DEVICE,
        measures: bool = False,
        frozen: str = "",
    ):
        if model.kernel == AUTO:  # of rows of any length
            model = dataclasses.replace(model, kernel="xla")
        given = dict(model=model, layout=layout, pipeline=pipeline, data_parallel=data_parallel, fsdp=fsdp, loss=loss)
        kept = dict(weights_dtype=weights_dtype, masters_on=masters_on, states_on=states_on, frozen=frozen)
        self._arguments = {**given, "mesh": mesh, "measures": measures, **kept}
        self.model, self.layout, self.pipeline, self.loss_config = model, layout, pipeline, loss
        self.mesh, self.fsdp, self.data_parallel, self.measures = mesh, fsdp, data_parallel, measures
        self.axis_sizes: dict[str, int] = dict(mesh.shape)
        checks.check_divides(model, self.axis_sizes)
        checks.check_context(model, layout.context, self.axis_sizes)
        checks.check_kernel(model, mesh)
        checks.check_matmul(model, layout, self.axis_sizes)
        self.schedule = by_name(pipeline.schedule, self.axis_sizes["pp"], pipeline.microbatches, pipeline.virtual)
        checks.check_schedule_is_used(pipeline, self.axis_sizes)
        checks.check_stages(model, self.schedule)
        checks.check_remat(model, pipeline.remat)
        checks.check_remat(model, pipeline.residuals_on, "pipeline.residuals_on")
        check_residuals_on(pipeline.residuals_on, pipeline.remat)
        checks.check_masters(model, masters_on)
        self.arrangement = Arrangement(self.schedule.placement, model.kinds)
        self.parts = self._parts(ROWS)
        self.orders = arrangements(self.schedule.placement, model.kinds)
        declared = freeze(stored_as(self.parts.declared(), weights_dtype), frozen)
        self.plan = ShardingPlan(
            declared,
            Policies(data_parallel.policy, data_parallel.by_name),
            model.sizes,
            self.axis_sizes,
            model.dtype,
            orders=self.orders,
            reduce=fsdp.reduce,
            gather=fsdp.gather_dtype,
            products=EIGHT_BIT_PRODUCTS[model.matmul].operand if self._rounds_kernels else None,
            gather_first=partial(first_group, mesh),
            masters_on=masters_on,
            states_on=states_on,
        )
        self._check_prefetch()
        self.layouts, self.shapes = self.plan.at_rest, self.plan.shapes
        checks.check_layouts(model, self.layouts, self.axis_sizes)
        self.shardings = self._shardings(lambda row: row.memory)
        self.states_shardings = self._shardings(lambda row: row.states)  # of each parameter's optimizer states
        self.batch_sharding = NamedSharding(mesh, BATCH.spec(mesh))

    def __repr__(self) -> str:
        return repr(self.plan)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def replace(self, **changes: Any) -> "ShardedModel":
        """The same model with other sections or another mesh, by the names of this class's arguments."""
        return ShardedModel(**{**self._arguments, **changes})

    def init(self, seed: int) -> Any:
        """Initial parameters, drawn in float32; bitwise the same on every mesh."""
        # On CPU, XLA takes about a second per parameter to optimise the random draw, which runs only once.
        options = {"xla_backend_optimization_level": 0} if self._simulated else None

        def declare(key: Array) -> Any:
            drawn = nn.meta.unbox(self.parts.declare(key))
            return jax.tree.map(lambda x, like: x.astype(like.dtype), drawn, self.shapes)

        return jax.jit(declare, out_shardings=self.shardings, compiler_options=options)(jax.random.key(seed))

    def loss_and_grad(self, params: Any, batch: Mapping[str, Array], noise: Array | None = None):
        """(metrics, gradients). Metrics: "loss", the mean cross-entropy in nats over the global batch's labels that are
        not ignored; "tokens", their number; with a z-coefficient "z_loss", which the gradients include.

        `batch` holds int32 arrays [global_batch, seq]: tokens, labels, segments, positions, as model.batch has them;
        labels are -1 where there is nothing to predict. `noise` is int32 [2], (seed, step) of dropout; None disables
        it. Gradients are float32, sharded like their parameters.
        """
        return self.mapped(self._loss_and_grad, (P(), self._specs))(params, self.checked(batch), noise)

    def loss(self, params: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The metrics of `loss_and_grad`, forward only and without dropout."""
        return self.mapped(self._loss, P())(params, self.checked(batch), None)

    def activations(self, params: Any, batch: Mapping[str, Array], noise: Array | None = None) -> Array:
        """Observations of embedding and layers in the forward pass of `loss_and_grad`: see ObservedStage."""
        return self.mapped(self._activations, P())(params, self.checked(batch), noise)

    def logits(
        self, params: Any, tokens: Array, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Logits [global_batch, seq, vocab] in float32 of int32 tokens [global_batch, seq]; forward only.

        Logits of the vocab's padding are included and are -inf. Without `segments` each row is one document; without
        `positions` they count from 0 in each row.
        """
        given = {"tokens": tokens, "segments": segments, "positions": positions}
        given = {name: array for name, array in given.items() if array is not None}
        batch = checked(given, self.model.vocab, names=tuple(given))
        tokens = batch["tokens"]
        self.check_batch(*tokens.shape, microbatches=1)
        self._check_shared_rows(len(tokens))
        counted = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape)
        batch = {"labels": tokens, "segments": jnp.ones_like(tokens), "positions": counted} | batch
        return self.mapped(self._logits, self._logits_layout.spec(self.mesh))(params, batch, None)

    def checked(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The batch's arrays as int32; DataError or ConfigError if they do not fit the model or its mesh."""
        arrays = checked(batch, self.model.vocab)
        self.check_batch(*arrays["tokens"].shape)
        return arrays

    def check_batch(self, global_batch: int, seq: int, microbatches: int | None = None) -> None:
        """Raise ConfigError unless a batch of this shape divides over the mesh and into microbatches."""
        microbatches = microbatches or self.pipeline.microbatches
        (ranks, axes), pp, tp = self._data_ranks, self.axis_sizes["pp"], self.axis_sizes["tp"]
        pieces = ranks * microbatches
        check_multiple("data.global_batch", global_batch, pieces, f"{axes} x pipeline.microbatches={microbatches}")
        if self.schedule.head == "between":
            self._check_shared_rows(global_batch)
        cp = self.axis_sizes.get(CONTEXT_AXIS, 1)
        chunks = 1 if cp == 1 else 2 * cp
        if cp > 1:
            check_multiple("data.seq", seq, chunks, f"2 x mesh.cp={cp}: each context rank has two chunks of a row")
        at_once = f"mesh.cp={cp} x mesh.tp={tp}" if cp > 1 else f"mesh.tp={tp}"
        check_multiple("data.seq", seq, math.lcm(chunks, cp * tp), at_once)
        checks.check_window(self.model, seq)
        checks.check_kernel_seq(self.model, seq, self.layout.context, cp)
        # If the head runs inside the ticks, pipeline ranks share a microbatch's rows, or pieces of them.
        rows = global_batch // pieces
        folded = folds(rows, pp) * tp * cp
        why = f"share the head of a microbatch, which has {rows} rows on a device"
        over = f"{folded}: mesh.pp={pp} ranks and {at_once} {why}"
        check_multiple("data.seq", seq, math.lcm(chunks, folded), over, instead=", or more rows")

    @property
    def _data_ranks(self) -> tuple[int, str]:
        """Number of ranks that shard the batch, and the keys of their axes."""
        sizes = {axis: self.axis_sizes[axis] for axis in BATCH_AXES if axis in self.axis_sizes}
        return math.prod(sizes.values()), " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())

    def _check_prefetch(self) -> None:
        """Raise ConfigError if weights cannot be gathered ahead."""
        if not self.fsdp.prefetch:
            return
        if not any(row.is_gathered_per_use for row in jax.tree.leaves(self.plan.rows[BLOCKS])):
            raise ConfigError(
                f"fsdp.prefetch={self.fsdp.prefetch} gathers a layer ahead, but with data_parallel.policy="
                f"{self.data_parallel.policy!r} no layer is gathered when it runs; use fsdp.prefetch=0, or "
                "data_parallel.policy='zero3'."
            )
        order = self.arrangement
        if order.stage_layers > 1 and not any(run.can_prefetch for each in order.repeats for run in each.runs):
            raise ConfigError(
                f"fsdp.prefetch={self.fsdp.prefetch} gathers the next layer of the same kind, but with "
                f"model.layers_of={self.model.layers_of!r} and {len(order.placement)} pipeline stages no stage has two "
                "layers of one kind after each other; use fsdp.prefetch=0."
            )

    def _check_shared_rows(self, global_batch: int) -> None:
        """Check the batch if embedding and head run outside of the ticks: pipeline and data ranks share its rows."""
        (ranks, axes), pp = self._data_ranks, self.axis_sizes["pp"]
        over = f"{axes} x mesh.pp={pp}, which share embedding and head by rows"
        check_multiple("data.global_batch", global_batch, ranks * pp, over)

    # ---- parameters

    def _parts(self, rows: str) -> Parts:
        family = FAMILIES[self.layout.tensor_parallel]._replace(context=CONTEXTS[self.layout.context])
        form = EMBEDDINGS[self.layout.embedding]
        kv = self.model.kv(self.axis_sizes["tp"])
        residual, chunk = activations.residual_layout(self.layout), self.layout.expert_chunk_tokens
        recomputed = recomputed_parts(self.pipeline.remat) or ()
        # If gate and up or chunks are recomputed, so are the messages for them; and W, which has the products that read
        # tokens, sends only gradients.
        again = "dispatch" in recomputed and "experts" not in recomputed and not chunk and not self.schedule.split
        exchange = SENT_AGAIN if again and self.exchange == "ragged" else self.exchange
        of_mixtures = self.loss_config, exchange, chunk
        return Parts.build(self.model, residual, family, form, kv, rows, *of_mixtures, measures=self.measures)

    @property
    def exchange(self) -> str:
        """How tokens are sent to experts of other ranks: "gather" or "ragged"."""
        ranks = self.axis_sizes.get(EXPERT_AXIS, 1)
        return exchange_of(self.layout.exchange, self.model, ranks, on_cpus=self._simulated)

    @property
    def load(self) -> float:
        """The share of a mixture's rows that is in use if the load of its experts is even."""
        return even_load(self.model, self.axis_sizes.get(EXPERT_AXIS, 1))

    @property
    def carries_residuals(self) -> bool:
        """Whether ticks carry slots of residuals, instead of allocating them in each tick."""
        return self.schedule.keeps_across_ticks or clears_what_is_overwritten(self.mesh)

    @property
    def _simulated(self) -> bool:
        return is_simulated(self.mesh)

    def _shardings(self, memory: Callable[[ParameterPlan], str]) -> Any:
        """The at-rest sharding of each parameter, in the memory that `memory` returns for its row of the plan."""
        place = lambda row: NamedSharding(self.mesh, row.at_rest.spec(self.mesh), memory_kind=MEMORY_KINDS[memory(row)])  # noqa: E731
        return jax.tree.map(place, self.plan.rows)

    @property
    def _specs(self) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    # ---- what runs on each device

    def mapped(self, local: Callable, out_specs: Any) -> Callable:
        specs = (self._specs, BATCH.spec(self.mesh), P())
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=True)

    def _loss_and_grad(self, params, batch, noise):
        executor, boundary_state = self.ready(params, batch, noise)
        boundary, state = executor.boundary, executor.run(boundary_state)
        ended = boundary.finish(state.boundary)
        structure = jax.tree.structure(self.shapes[BLOCKS])
        block_grads = jax.tree.unflatten(structure, state.grads)
        if self._rounds_kernels:
            weights = jax.tree.unflatten(structure, jax.tree.leaves(executor.weights))
            block_grads = with_largest_weights(block_grads, weights, self.plan.scales(BLOCKS), self.model.dtype)
        metrics = self._metrics(ended.loss, boundary.embed_and_head, boundary.tokens)
        return metrics, self.plan.store(ended.grads | {BLOCKS: block_grads})

    def ready(self, params, batch, noise):
        """The executor of a training step, and the first state of its boundary."""
        tokens = self._tokens(batch, noise, self.pipeline.microbatches)
        weight = 1 / jnp.maximum(tokens.count(), 1)
        between = self.schedule.head == "between"
        boundary, rows = (BatchedHead, SHARED_ROWS) if between else (MicrobatchHead, ROWS)
        executor = self._executor(params, tokens, self.schedule, boundary, rows, weight=weight)
        return executor, executor.boundary.start(self.schedule.exit_slots)

    def _loss(self, params, batch, noise):
        executor = self._evaluator(params, batch, noise, Stage)
        boundary = executor.boundary
        return self._metrics(executor.run_forward(boundary.start(1)).boundary, boundary.embed_and_head, boundary.tokens)

    def _activations(self, params, batch, noise):
        executor = self._evaluator(params, batch, noise, ObservedStage)
        return all_seen(executor.run_forward(executor.boundary.start(1), nothing_seen(self.model.layers)).residuals)

    def _evaluator(self, params, batch, noise, stage):
        tokens = self._tokens(batch, noise, self.pipeline.microbatches)
        schedule = gpipe_on(self.schedule.placement, self.pipeline.microbatches)
        return self._executor(params, tokens, schedule, LossOnly, ROWS, stage=stage)

    def _logits(self, params, batch, noise):
        schedule = gpipe_on(self.schedule.placement, 1)
        executor = self._executor(params, self._tokens(batch, None, 1), schedule, BatchedHead, SHARED_ROWS)
        boundary = executor.boundary
        outputs = boundary.from_last(executor.run_forward(boundary.start(1)).boundary.exits)
        if context_ranks() > 1:
            outputs = self._in_order(outputs)
        return boundary.embed_and_head.logits(outputs)

    def _in_order(self, outputs: Array) -> Array:
        """The last layer's outputs in the order of the text."""
        residual = activations.with_rows(activations.residual_layout(self.layout), SHARED_ROWS)
        # If tp shards tokens, too, they are gathered over tp during the permute.
        whole = residual.with_cut("seq", (CONTEXT_AXIS,)).with_cut("d_model", ("tp",))
        outputs = to_order(reshard(f"{residual} -> {whole}", outputs), axis=1)
        return reshard(f"{whole} -> {residual}", outputs)

    def _executor(self, params, tokens, schedule, boundary, rows, *, weight=1.0, stage=Stage):
        """An executor of a schedule on these tokens, with a boundary of this kind; `rows` is the layout of the batch
        dim for the embedding."""
        weights = self.plan.load(jax.tree.map(as_varying, params))
        # Ranks of the pipeline always share the head's rows.
        parts = self._parts(SHARED_ROWS)._replace(embedding=self._parts(rows).embedding)
        ends = {part: weights[part] for part in (EMBEDDING, HEAD)}
        work = EmbedAndHead(parts, self.loss_config, self.plan, ends, tokens.key)
        return Executor(
            schedule,
            self._stage(stage),
            self.parts.by_kind(weights[BLOCKS]),
            partial(self.plan.zero_grads, BLOCKS, weights[BLOCKS]),
            partial(self._context, tokens),
            boundary(work, tokens, weight, schedule.placement[-1]),
            activations.residual_layout(self.layout),
            messages_last=self._simulated,
            carries_residuals=self.carries_residuals,
        )

    def _tokens(self, batch: dict[str, Array], noise: Array | None, microbatches: int) -> Tokens:
        rows = offset(BATCH, "batch", len(batch["tokens"])) + jnp.arange(len(batch["tokens"]))
        own, segments = _in_context_order(batch)
        own["segments"] = segments
        cut = {name: rearrange(x, "(M B) S -> M B S", M=microbatches) for name, x in own.items()}
        key = None
        if noise is not None and self.model.dropout > 0:
            root = jax.random.fold_in(jax.random.key(noise[0]), DROPOUT)
            key = as_varying(jax.random.fold_in(root, noise[1]))
        arrays = (cut[name] for name in BATCH_ARRAYS)
        return Tokens(*arrays, rows.reshape(microbatches, -1), key)

    def _context(self, tokens: Tokens, microbatch: Array) -> Context:
        arrays = tokens.positions, tokens.segments, tokens.rows
        positions, segments, rows = (as_varying(index(x, microbatch)) for x in arrays)
        weight = None
        if "moe" in self.model.kinds:
            shares = math.prod(size for axis, size in self.axis_sizes.items() if axis in BATCH_AXES)
            weight = jnp.float32(1 / (tokens.rows.size * shares))
        return training_context(Rope(self.model), positions, segments, rows, tokens.key, weight)

    def _stage(self, kind: type[Stage]) -> Stage:
        stacks, rounded = [], ROUNDED if self._rounds_kernels else ""
        for block, (name, order) in zip(self.parts.blocks.values(), self.orders.items(), strict=True):
            layer = self.plan.without_frozen(block.apply, name)
            moves = partial(self._gathered, name), self.plan.add_up(name)
            places = order.stage_layers, order.own_layers(), len(stacks)
            stacks.append(LayerStack(layer, *moves, *places, self.plan.keeps_maximum(name), rounded))
        order, turns = self.arrangement, self.arrangement.own_turns() if len(stacks) > 1 else None
        loop = LayerLoop(stacks, order.stage_layers, order.repeats, self.fsdp.prefetch == 1, self._simulated, turns)
        pipeline = self.pipeline
        return kind(loop, pipeline.remat, self.schedule.split, relays_what_is_read(self.mesh), pipeline.residuals_on)

    @property
    def _rounds_kernels(self) -> bool:
        return self.model.matmul != COMPUTE and not self.measures

    def _gathered(self, part: str, weights: Any) -> dict[str, Any]:
        """The collections of a layer, gathered from resident weights; kernels of 8-bit products are sent in 8 bits."""
        if not self._rounds_kernels:
            return {"params": self.plan.use(weights, part)}
        dtype, scales = self.model.dtype, self.plan.scales(part)
        return apart(self.plan.use(rounded_kernels(weights, scales, dtype, self.model.matmul), part), scales, dtype)

    def _metrics(self, loss_sum: Array, ends: EmbedAndHead, tokens: Tokens) -> dict[str, Array]:
        count = tokens.count()
        loss, z_loss = sum_over(loss_sum, ends.loss_axes) / jnp.maximum(count, 1)
        metrics = {"loss": loss, "tokens": count}
        return metrics | {"z_loss": z_loss} if self.loss_config.z_coefficient else metrics

    @property
    def _logits_layout(self) -> Layout:
        form = EMBEDDINGS[self.layout.embedding]
        ids = form.ids(SHARED_ROWS)
        return Layout((*ids.names, "vocab"), (*ids.axes, form.vocab_axes))


def _in_context_order(batch: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
    """The tokens of this context rank, in the order of parallax/sharding/zigzag.py, and the segments of whole rows.

    Communication:
        forward   all_gather of the batch's arrays over cp
        backward  nothing
    """
    if context_ranks() == 1:
        return dict(batch), batch["segments"]
    arrays = Layout.parse(f"entries {TOKENS}")
    whole = all_gather(f"{arrays} -> {arrays.without(CONTEXT_AXIS)}", jnp.stack(list(batch.values())))
    own = own_tokens(whole, axis=2)
    return dict(zip(batch, own)), dict(zip(batch, whole))["segments"]


def check_multiple(key: str, value: int, of: int, over: str, *, instead: str = "") -> None:
    """Raise ConfigError unless a size is a multiple of the number of its pieces."""
    if value % of:
        raise ConfigError(f"{key}={value} does not divide over {over}; use a multiple of {of}{instead}.")
