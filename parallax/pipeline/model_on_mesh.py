"""What is known of a model on a mesh before anything runs: layouts, the schedule, and which layers a rank has."""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config.sections import BLOCKS, COMPUTE, EMBEDDING, HEAD
from parallax.config.settings import NOT_OF_A_MODEL, Settings, code_of
from parallax.errors import ConfigError, divisors
from parallax.model import checks
from parallax.model.batch import GROUPS, check_groups, checked
from parallax.model.context import Context, tables_of_layers
from parallax.model.embedding import EMBEDDINGS
from parallax.model.experts.exchange import SENT_AGAIN
from parallax.model.experts.exchange_costs import even_load, exchange_of, sends_again
from parallax.model.families import CONTEXTS, FAMILIES
from parallax.model.kernels.choice import chosen_kernel
from parallax.model.lora import check_adapted
from parallax.model.products import product_of, scales_of
from parallax.model.transformer import Parts
from parallax.pipeline.embed_and_head import Tokens, folds
from parallax.pipeline.layer_runs import LayerRun, repeats_of
from parallax.schedules import by_name
from parallax.sharding import activations
from parallax.sharding.activations import BATCH, BATCH_AXES, CONTEXT_AXIS, EXPERT_AXIS, ROWS
from parallax.sharding.collectives import as_varying
from parallax.sharding.compiler import (
    clears_what_is_overwritten,
    copies_what_branches_return,
    first_group,
    fuses_norms_into_products,
    has_ragged,
)
from parallax.sharding.host import MEMORY_KINDS
from parallax.sharding.layers_on_ranks import Arrangement, arrangements
from parallax.sharding.mesh import is_simulated
from parallax.sharding.message_order import Accelerators, SimulatedDevices
from parallax.sharding.parameter import freeze, stored_as
from parallax.sharding.plan import ParameterPlan, Policies, ShardingPlan
from parallax.user_code import refuse_saved


class ModelOnMesh:
    """The static facts of a model on a mesh, which all that runs on a device reads.

    `mesh` may be a jax.sharding.AbstractMesh: then layouts, shardings and shapes are known, but nothing can run.
    A model that `measures` computes 8-bit products in the compute dtype, to find their first scales: see
    parallax/model/products.py. Raises ConfigError if a size does not divide over its axes.
    """

    def __init__(self, settings: Settings, mesh: Any, *, measures: bool = False):
        refuse_saved({key: code for key, code in code_of(settings).items() if not key.startswith(NOT_OF_A_MODEL)})
        self.settings, self.mesh, self.measures = settings, mesh, measures
        self.is_simulated = is_simulated(mesh)
        self.axis_sizes: dict[str, int] = dict(mesh.shape)
        self.devices = SimulatedDevices(self._layers_may_send_in_loops) if self.is_simulated else Accelerators()
        device = checks.device_of(mesh)
        platform, kind = (device.platform, device.device_kind) if device else ("", "")
        kernel = chosen_kernel(settings, self.axis_sizes, platform, kind)
        self.config = model = dataclasses.replace(settings.model, kernel=kernel)
        layout, pipeline, optimizer = settings.layout, settings.pipeline, settings.optimizer
        self.layout, self.pipeline, self.loss_config = layout, pipeline, settings.loss
        self.fsdp, self.data_parallel = settings.fsdp, settings.data_parallel
        self.schedule = by_name(pipeline.schedule, self.axis_sizes["pp"], pipeline.microbatches, pipeline.virtual)
        checks.check_on_mesh(model, settings, mesh, self.schedule)
        self.arrangement = Arrangement(self.schedule.placement, model.layer_kinds)
        self.repeats = repeats_of(self.arrangement)
        context_form = CONTEXTS[layout.context]._replace(order=layout.order)
        family = FAMILIES[layout.tensor_parallel]._replace(context=context_form, norms_apart=self.norms_apart)
        form, tp = EMBEDDINGS[layout.embedding], self.axis_sizes["tp"]
        options = dict(loss=settings.loss, exchange=self._exchange_form, measures=measures)
        options |= {"exchange_hosts": self.exchange_hosts, "expert_chunk_tokens": layout.expert_chunk_tokens}
        self.parts = Parts.build(model, self.residual, family, form, tp, ROWS, **options)
        self.orders = arrangements(self.schedule.placement, model.layer_kinds)
        # Whether kernels of 8-bit products are rounded once for all uses, and sent in 8 bits.
        self.rounds_kernels = model.matmul != COMPUTE and not measures and bool(scales_of(model.matmul_form))
        declared = freeze(self.parts.declared(), optimizer.frozen)
        check_adapted(declared, model)
        of_frozen = ("bfloat16" if model.stored_base else model.lora_base) if model.lora_rank else ""
        declared = stored_as(declared, optimizer.weights_dtype, of_frozen)
        self.plan = ShardingPlan(
            declared,
            Policies(self.data_parallel.policy, self.data_parallel.by_name),
            model.sizes,
            self.axis_sizes,
            model.dtype,
            orders=self.orders,
            products=product_of(model.matmul_form).operand if self.rounds_kernels else None,
            gather_first=partial(first_group, mesh),
            fsdp=self.fsdp,
            optimizer=optimizer,
            pipeline=pipeline,
        )
        self._check_prefetch()
        checks.check_plan(model, settings, self.plan, EMBEDDING if self.parts.head.tied else HEAD)
        self.layouts, self.shapes = self.plan.at_rest, self.plan.shapes
        self.shardings = jax.tree.map(lambda row: self._sharding(row, row.memory), self.plan.rows)
        # Of each parameter's optimizer states.
        self.states_shardings = jax.tree.map(lambda row: self._sharding(row, row.states), self.plan.rows)
        self.batch_sharding = NamedSharding(mesh, BATCH.spec(mesh))
        # Arguments of `jax.shard_map` for a function of (params, batch, noise) in local view.
        specs = jax.tree.map(lambda sharding: sharding.spec, self.shardings)
        self.on_mesh = dict(mesh=mesh, in_specs=(specs, self.batch_sharding.spec, P()), check_vma=True)

    def checked(self, batch: Mapping[str, Array], groups: int = 0) -> dict[str, Array]:
        """The batch's arrays as int32; DataError or ConfigError if they do not fit the model, its mesh, or so many
        groups."""
        arrays = checked(batch, self.config.vocab, optional=(GROUPS,))
        if groups:
            check_groups(arrays, groups)
        self.check_batch(*arrays["tokens"].shape)
        return arrays

    def check_batch(self, global_batch: int, seq: int, microbatches: int | None = None) -> None:
        """Raise ConfigError unless a batch of this shape divides over the mesh and into microbatches."""
        microbatches = microbatches or self.pipeline.microbatches
        (ranks, axes), pp, tp = self._data_ranks, self.axis_sizes["pp"], self.axis_sizes["tp"]
        pieces = ranks * microbatches
        over, fewer = f"{axes} x pipeline.microbatches={microbatches}", ""
        if global_batch % pieces and not global_batch % ranks:
            fewer = f", or pipeline.microbatches in {{{', '.join(map(str, divisors(global_batch // ranks)))}}}"
        check_multiple("data.global_batch", global_batch, pieces, over, instead=fewer)
        if self.schedule.head == "between":
            self._check_shared_rows(global_batch)
        cp = self.axis_sizes.get(CONTEXT_AXIS, 1)
        chunks = 1 if cp == 1 else 2 * cp
        if cp > 1:
            check_multiple("data.seq", seq, chunks, f"2 x mesh.cp={cp}: each context rank has two chunks of a row")
        at_once = f"mesh.cp={cp} x mesh.tp={tp}" if cp > 1 else f"mesh.tp={tp}"
        check_multiple("data.seq", seq, math.lcm(chunks, cp * tp), at_once)
        checks.check_products_of_tokens(self.config, seq, cp, global_batch * seq // pieces // cp)
        checks.check_kernel_seq(self.config, seq, self.layout.context, cp)
        # If the head runs inside the ticks, pipeline ranks share a microbatch's rows, or pieces of them.
        rows = global_batch // pieces
        folded = folds(rows, pp) * tp * cp
        why = f"share the head of a microbatch, which has {rows} rows on a device"
        over = f"{folded}: mesh.pp={pp} ranks and {at_once} {why}"
        check_multiple("data.seq", seq, math.lcm(chunks, folded), over, instead=", or more rows")

    @property
    def _layers_may_send_in_loops(self) -> bool:
        """Whether a layer may have a loop or a branch that sends: a ring, windows by layer, chunks, or code of a
        user's own."""
        model, layout = self.settings.model, self.settings.layout
        windows = {settings.sliding_window for settings in model.settings_of_layers.settings}
        hops = self.axis_sizes.get(CONTEXT_AXIS, 1) > 1 and (layout.context == "ring" or len(windows) > 1)
        return hops or layout.expert_chunk_tokens > 0 or any(key.startswith("model.") for key in code_of(self.settings))

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
        if order.stage_layers > 1 and not any(self.prefetches(run) for each in self.repeats for run in each.runs):
            raise ConfigError(
                f"fsdp.prefetch={self.fsdp.prefetch} gathers the next layer of the same kind, but with "
                f"model.layers_of={self.config.layers_of!r} and {len(order.placement)} pipeline stages no stage has "
                "two layers of one kind after each other; use fsdp.prefetch=0."
            )

    def _check_shared_rows(self, global_batch: int) -> None:
        """Check the batch if embedding and head run outside of the ticks: pipeline and data ranks share its rows."""
        (ranks, axes), pp = self._data_ranks, self.axis_sizes["pp"]
        over = f"{axes} x mesh.pp={pp}, which share embedding and head by rows"
        check_multiple("data.global_batch", global_batch, ranks * pp, over)

    # ---- parameters

    @property
    def exchange(self) -> str:
        """How tokens are sent to experts of other ranks: "gather" or "ragged"."""
        ranks = self.axis_sizes.get(EXPERT_AXIS, 1)
        return exchange_of(self.layout.exchange, self.config, ranks, ragged=has_ragged(self.mesh))

    @property
    def exchange_hosts(self) -> int:
        """The number of hosts to each of which a token is sent once; 1 if it is sent to each rank."""
        return self.layout.exchange_hosts if self.axis_sizes.get(EXPERT_AXIS, 1) > 1 else 1

    @property
    def _exchange_form(self) -> str:
        """The same, or SENT_AGAIN if the backward pass sends tokens once more."""
        again = sends_again(self.exchange, self.pipeline.remat, self.layout, split=self.schedule.split)
        return SENT_AGAIN if again else self.exchange

    @cached_property
    def share_of_rows(self) -> float:
        """The share of a mixture's rows that is in use if the load of its experts is even."""
        return even_load(self.config, self.axis_sizes.get(EXPERT_AXIS, 1))

    @property
    def carries_residuals(self) -> bool:
        """Whether ticks carry slots of residuals, instead of allocating them in each tick."""
        return self.schedule.keeps_across_ticks or clears_what_is_overwritten(self.mesh)

    @property
    def changes_in_loops(self) -> bool:
        """Whether, in training, ranks of pp change slots and sums in loops of at most one turn, instead of in branches.
        A forward pass alone has none of them, and may be differentiated."""
        return copies_what_branches_return(self.mesh)

    @property
    def norms_apart(self) -> bool:
        """Whether norms are apart from the products that read them in the backward pass."""
        of_one_layer = self.arrangement.stage_layers == 1
        return self.schedule.keeps_across_ticks and of_one_layer and fuses_norms_into_products(self.mesh)

    def prefetches(self, run: LayerRun) -> bool:
        """Whether the next layer of a run is gathered while one computes."""
        return self.fsdp.prefetch > 0 and run.can_prefetch

    def _sharding(self, row: ParameterPlan, memory: str) -> NamedSharding:
        """The at-rest sharding of a parameter, in this memory."""
        return NamedSharding(self.mesh, row.at_rest.spec(self.mesh), memory_kind=MEMORY_KINDS[memory])

    @property
    def residual(self) -> str:
        """The layout of the residual stream, and of messages between stages."""
        return activations.residual_layout(self.layout)

    def context(self, tokens: Tokens, microbatch: Array) -> Context:
        """What layers read of a microbatch besides its residual stream."""
        arrays = tokens.positions, tokens.segments, tokens.rows
        of_microbatch = (lax.dynamic_index_in_dim(x, microbatch, keepdims=False) for x in arrays)
        positions, segments, rows = map(as_varying, of_microbatch)
        weight = None
        if self.config.has_mixtures:
            shares, _ = self._data_ranks
            weight = jnp.float32(1 / (tokens.rows.size * shares))
        tables = tables_of_layers(self.config, positions, segments.shape[-1])
        settings = dict(row_weight=weight, order=self.layout.order)
        return Context.of_model(self.config, tables, rows, tokens.key, segments, **settings)


def check_multiple(key: str, value: int, of: int, over: str, *, instead: str = "") -> None:
    """Raise ConfigError unless a size is a multiple of the number of its pieces."""
    if value % of:
        raise ConfigError(f"{key}={value} does not divide over {over}; use a multiple of {of}{instead}.")
