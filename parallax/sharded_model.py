"""ShardedModel: a model, cut over a mesh as its strings say; the mathematics is the model's, on every mesh."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.collectives import all_gather, as_varying, offset, reduce_scatter, sum_over
from parallax.errors import ConfigError, divisors
from parallax.layers.context import Context, training_context
from parallax.layers.parameter import layouts_of
from parallax.loss import LossConfig
from parallax.mesh import AXES
from parallax.model import LayoutConfig, ModelConfig, Parts
from parallax.notation import Layout, map_layouts
from parallax.pipeline import Executor, PipelineConfig, Stage
from parallax.pipeline.ends import InsideEnds, SpreadEnds, Tokens, Work
from parallax.schedules import by_name, gpipe

BATCH = Layout.parse("batch/dp seq")
DROPOUT = 0x44524F50  # "DROP": keeps dropout's keys apart from those of the initial values
SPREAD = "batch/dp/pp"  # rows of the batch where pipeline ranks share embedding and head


class ShardedModel:
    """Parameters, loss, gradients and logits of a model on a mesh.

    `mesh` may be a jax.sharding.AbstractMesh: then layouts, shardings and shapes are known, and nothing runs.
    Raises ConfigError or NotationError when a size does not divide over its axes.
    """

    def __init__(self, model: ModelConfig, layout: LayoutConfig, pipeline: PipelineConfig, loss: LossConfig, mesh: Any):
        self.model, self.layout, self.pipeline, self.loss_config = model, layout, pipeline, loss
        self.mesh = mesh
        self.axis_sizes: dict[str, int] = {axis: mesh.shape[axis] for axis in AXES}
        check_divides(model, self.axis_sizes)
        check_kernel(model, mesh)
        self.schedule = by_name(pipeline.schedule, self.axis_sizes["pp"], pipeline.microbatches)
        declared = jax.eval_shape(self._declare, jax.random.key(0))
        self.layouts = layouts_of(declared)
        self.shapes = nn.meta.unbox(declared)
        self.shardings = jax.tree.map(lambda layout: NamedSharding(mesh, layout.spec()), self.layouts)
        self.batch_sharding = NamedSharding(mesh, BATCH.spec())
        self._check_layouts()

    def init(self, seed: int) -> Any:
        """Initial parameters in float32; bitwise the same on every mesh."""
        # On CPU, XLA takes about a second a parameter to optimise the random draw, which runs once.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        declare = jax.jit(
            lambda key: nn.meta.unbox(self._declare(key)), out_shardings=self.shardings, compiler_options=options
        )
        return declare(jax.random.key(seed))

    def loss_and_grad(self, params: Any, batch: Mapping[str, Array], noise: Array | None = None):
        """(metrics, gradients). Metrics: "loss", the mean cross-entropy in nats over the global batch's labels that are
        not ignored; "tokens", their number; with a z-coefficient "z_loss", which the gradients include.

        `batch` holds int32 arrays [global_batch, seq]: tokens, labels, segments, positions. `noise` is
        int32 [2], (seed, step) of dropout; None drops nothing. Gradients are float32, cut as their parameters.
        """
        self.check_batch(*batch["tokens"].shape)
        return self._mapped(self._loss_and_grad, (P(), self._specs))(params, dict(batch), noise)

    def loss(self, params: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The metrics of `loss_and_grad`, forward only and without dropout."""
        self.check_batch(*batch["tokens"].shape)
        return self._mapped(self._loss, P())(params, dict(batch), None)

    def logits(
        self, params: Any, tokens: Array, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Logits [global_batch, seq, vocab] in float32 of int32 tokens [global_batch, seq]; forward only.

        Without `segments` each row is one document; without `positions` they count from 0 in each row.
        """
        self.check_batch(*tokens.shape, microbatches=1)
        segments = jnp.ones_like(tokens) if segments is None else segments
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape)
        batch = {"tokens": tokens, "labels": tokens, "segments": segments, "positions": positions}
        return self._mapped(self._logits, self._logits_layout.spec())(params, batch, None)

    def check_batch(self, global_batch: int, seq: int, microbatches: int | None = None) -> None:
        """Raise ConfigError unless a batch of this shape can be cut over the mesh and into microbatches."""
        sizes, microbatches = self.axis_sizes, microbatches or self.pipeline.microbatches
        pieces = sizes["dp"] * microbatches
        if global_batch % pieces:
            raise ConfigError(
                f"data.global_batch={global_batch} does not divide over mesh.dp={sizes['dp']} x "
                f"pipeline.microbatches={microbatches}; use a multiple of {pieces}."
            )
        if self.schedule.head == "between" and global_batch % (sizes["dp"] * sizes["pp"]):
            raise ConfigError(
                f"data.global_batch={global_batch} does not divide over mesh.dp={sizes['dp']} x mesh.pp={sizes['pp']}, "
                f"which share embedding and head by rows; use a multiple of {sizes['dp'] * sizes['pp']}."
            )
        if seq % sizes["tp"]:
            raise ConfigError(
                f"data.seq={seq} does not divide over mesh.tp={sizes['tp']}; use a multiple of {sizes['tp']}."
            )

    # ---- parameters

    def _parts(self, rows: str, *, gathered: bool) -> Parts:
        family, form = self.layout.family, self.layout.form
        if gathered:
            family, form = family.gathered(), form.without_fsdp()
        kv = self.model.kv(self.axis_sizes["tp"])
        return Parts.build(self.model, self.layout.residual, family, form, kv, rows)

    def _declare(self, key: Array) -> Any:
        return self._parts("batch/dp", gathered=False).declare(key)

    def _check_layouts(self) -> None:
        map_layouts(lambda layout: layout.local_shape(self.model.sizes, self.axis_sizes), self.layouts)

    @property
    def _specs(self) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    # ---- what runs on each device

    def _mapped(self, local: Callable, out_specs: Any) -> Callable:
        specs = (self._specs, BATCH.spec(), P())
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=True)

    def _loss_and_grad(self, params, batch, noise):
        tokens = self._tokens(batch, noise, self.pipeline.microbatches)
        weight = 1 / jnp.maximum(tokens.count(), 1)
        weights = jax.tree.map(as_varying, params)
        blocks, stage = self._stage(weights["blocks"])
        spread = self.schedule.head == "between"
        work = self._work(SPREAD if spread else "batch/dp", weights, tokens.key)
        ends = (SpreadEnds if spread else InsideEnds)(work, tokens, weight)
        context = partial(self._context, tokens)
        executor = Executor(self.schedule, stage, blocks, context, ends, self.layout.residual)
        state = executor.run(ends.start() if spread else ends.start(self.schedule.slots))
        ended = ends.finish(state.ends) if spread else state.ends
        grads = self._sum_grads(ended.grads | {"blocks": self._scatter_step(state.grads)})
        return self._metrics(ended.loss, work, tokens), grads

    def _loss(self, params, batch, noise):
        y, ends, tokens = self._forward(params, batch, self.pipeline.microbatches)
        return self._metrics(ends.work.head_loss(y, ends.own_labels()), ends.work, tokens)

    def _logits(self, params, batch, noise):
        y, ends, _ = self._forward(params, batch, 1)
        return ends.work.logits(y)

    def _forward(self, params, batch, microbatches):
        """This rank's rows of the last stage's outputs."""
        tokens = self._tokens(batch, None, microbatches)
        weights = jax.tree.map(as_varying, params)
        blocks, stage = self._stage(weights["blocks"])
        ends = SpreadEnds(self._work(SPREAD, weights, None), tokens, jnp.float32(1))
        schedule = gpipe(self.axis_sizes["pp"], microbatches)
        executor = Executor(schedule, stage, blocks, partial(self._context, tokens), ends, self.layout.residual)
        return ends.from_last(executor.run_forward(ends.start()).exits), ends, tokens

    def _tokens(self, batch: dict[str, Array], noise: Array | None, microbatches: int) -> Tokens:
        cut = {name: array.reshape(microbatches, -1, array.shape[-1]) for name, array in batch.items()}
        rows = offset(BATCH, "batch", len(batch["tokens"])) + jnp.arange(len(batch["tokens"]))
        key = None
        if noise is not None and self.model.dropout > 0:
            root = jax.random.fold_in(jax.random.key(noise[0]), DROPOUT)
            key = as_varying(jax.random.fold_in(root, noise[1]))
        arrays = (cut[name] for name in ("tokens", "labels", "segments", "positions"))
        return Tokens(*arrays, rows.reshape(microbatches, -1), key)

    def _context(self, tokens: Tokens, microbatch: Array) -> Context:
        at = lambda x: as_varying(jax.lax.dynamic_index_in_dim(x, microbatch, keepdims=False))  # noqa: E731
        layers = self.model.layers // self.axis_sizes["pp"]
        first = as_varying(jax.lax.axis_index("pp") * layers)
        positions, segments, rows = map(at, (tokens.positions, tokens.segments, tokens.rows))
        return training_context(self.model.rope, positions, segments, rows, tokens.key, first)

    # ---- FSDP: what is stored, what is gathered

    def _stage(self, blocks: Any) -> tuple[Any, Stage]:
        block = self._parts(SPREAD, gathered=True).block
        layer = lambda weights, x, context: block.apply({"params": weights}, x, context)  # noqa: E731
        if self.pipeline.gather == "step":
            same = lambda weights: weights  # noqa: E731
            return self._gather(self.layouts["blocks"], blocks), Stage(layer, same, same, self.pipeline.remat)
        one = map_layouts(_of_one_layer, self.layouts["blocks"])
        return blocks, Stage(layer, partial(self._gather, one), partial(scatter, one), self.pipeline.remat)

    def _scatter_step(self, grads: Any) -> Any:
        return scatter(self.layouts["blocks"], grads) if self.pipeline.gather == "step" else grads

    def _work(self, rows: str, weights: Any, key: Array | None) -> Work:
        ends = {part: weights[part] for part in ("embedding", "head")}
        return Work(
            self._parts(rows, gathered=True),
            self.loss_config,
            {part: partial(self._gather, self.layouts[part]) for part in ends},
            {part: partial(scatter, self.layouts[part]) for part in ends},
            ends,
            key,
        )

    def _gather(self, layouts: Any, weights: Any) -> Any:
        """Weights gathered over dp, in the compute dtype: cast first, so that fewer bytes are sent."""

        def gathered(layout: Layout, weight: Array) -> Array:
            whole = layout.without("dp")
            return weight if whole == layout else all_gather(f"{layout} -> {whole}", weight.astype(self.model.dtype))

        return map_layouts(gathered, layouts, weights)

    def _sum_grads(self, grads: Any) -> Any:
        """Gradients of parameters that several ranks hold, summed over them once, after all microbatches."""

        def summed(layout: Layout, grad: Array) -> Array:
            return sum_over(grad, [axis for axis in AXES if axis not in layout.used_axes()])

        return map_layouts(summed, self.layouts, grads)

    def _metrics(self, loss_sum: Array, work: Work, tokens: Tokens) -> dict[str, Array]:
        count = tokens.count()
        loss, z_loss = sum_over(loss_sum, work.loss_axes) / jnp.maximum(count, 1)
        metrics = {"loss": loss, "tokens": count}
        return metrics | {"z_loss": z_loss} if self.loss_config.z_coefficient else metrics

    @property
    def _logits_layout(self) -> Layout:
        form = self.layout.form
        ids = form.ids(SPREAD)
        return Layout((*ids.names, "vocab"), (*ids.axes, form.vocab_axes))


def scatter(layouts: Any, grads: Any) -> Any:
    """Gradients of gathered weights, reduce-scattered over dp in float32 to what is stored."""

    def scattered(layout: Layout, grad: Array) -> Array:
        return reduce_scatter(f"{layout.without('dp')} -> {layout}", grad.astype(jnp.float32))

    return map_layouts(scattered, layouts, grads)


def check_divides(model: ModelConfig, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError where a model's counts do not divide over the mesh."""
    if model.vocab < 2:
        raise ConfigError(f"model.vocab={model.vocab} must be 2 or more; 0 is for train.py, which asks the tokenizer.")
    for key, axis in (("layers", "pp"), ("heads", "tp"), ("d_ff", "tp"), ("d_model", "tp"), ("vocab", "tp")):
        size, ranks = getattr(model, key), axis_sizes[axis]
        if size % ranks:
            near = -(-size // ranks) * ranks
            legal = ", ".join(map(str, divisors(size)))
            raise ConfigError(
                f"model.{key}={size} does not divide over mesh.{axis}={ranks}; "
                f"use {axis} in {{{legal}}} or {key}={near}."
            )
    if model.attention == "gqa" and model.kv_heads % axis_sizes["tp"] and axis_sizes["tp"] % model.kv_heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads} and mesh.tp={axis_sizes['tp']}: one must divide the other; "
            f"use kv_heads in {{{', '.join(map(str, divisors(axis_sizes['tp'])))}}} or a multiple of tp."
        )


def check_kernel(model: ModelConfig, mesh: Any) -> None:
    """Raise ConfigError where the mesh's devices do not have the attention kernel."""
    if model.kernel != "cudnn":
        return
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"model.kernel='cudnn' needs model.dtype='bfloat16', not {model.dtype!r}; or use kernel='xla'."
        )
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else "gpu"
    if platform != "gpu":
        raise ConfigError(f"model.kernel='cudnn' needs GPUs, the mesh has devices of {platform!r}; use kernel='xla'.")


def _of_one_layer(layout: Layout) -> Layout:
    return Layout(layout.names[1:], layout.axes[1:])
