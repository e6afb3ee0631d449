"""What runs on devices: one training step and one evaluation, compiled and pure; and how settings become them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config.sections import GuardConfig
from parallax.config.settings import Settings
from parallax.model.batch import BATCH_ARRAYS
from parallax.model.products import latest_amax
from parallax.pipeline import ShardedModel
from parallax.runtime.errors import ConfigError
from parallax.sharding.compiler import compiler_options
from parallax.sharding.host import is_on_host, rests_on_host, to_device, to_host
from parallax.sharding.layout import map_layouts
from parallax.sharding.mesh import make_mesh
from parallax.sharding.parameter import is_amax
from parallax.training.guard import GuardState, init_guard, judge
from parallax.training.load import counts_of
from parallax.training.low_precision import Blocks, check_blocks, narrowed, widened
from parallax.training.optimizer import global_norm, make_optimizer
from parallax.training.streaming import check_streams, map_kept, update_by_layer

UPDATE = "update"  # the scope of what a step does with its gradients, by which a report knows it in a compiled program


class TrainState(NamedTuple):
    """All that a run is between two steps; the batch and the dropout of a step follow from its number."""

    step: Array  # int32: steps done
    params: Any
    opt_state: Any
    guard: GuardState


def abstract_state(model: ShardedModel, tx: optax.GradientTransformation) -> TrainState:
    """The shapes and shardings of a state.

    Of an optimizer's state, what has the tree of the parameters is cut as `model.plan` cuts these, where the shape is
    the same, too, and so are blocks with their scales; all else is whole on every device. The plan says of both in
    which memory they are.

    Raises ConfigError where the mesh cuts through blocks, or the optimizer cannot work layer by layer.
    """
    whole = NamedSharding(model.mesh, P())

    def place(leaf: Any, sharding: NamedSharding = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def place_kept(kept: Any, param: Any, sharding: NamedSharding) -> Any:
        cut = isinstance(kept, Blocks) or kept.shape == param.shape
        return jax.tree.map(lambda leaf: place(leaf, sharding if cut else whole), kept)

    params = jax.tree.map(place, model.shapes, model.shardings)
    shapes = jax.eval_shape(lambda params: tx.init(widened(params)), model.shapes)
    check_blocks(shapes, model.shardings)
    check_streams(model, shapes)
    opt_state = map_kept(place_kept, place, shapes, params, model.states_shardings)
    guard = jax.tree.map(place, jax.eval_shape(init_guard))
    return TrainState(place(jax.ShapeDtypeStruct((), jnp.int32)), params, opt_state, guard)


def state_shardings(model: ShardedModel, tx: optax.GradientTransformation) -> TrainState:
    """The sharding of every array of a state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, tx))


def init_state(model: ShardedModel, tx: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step."""
    params = model.init(seed)
    shardings = state_shardings(model, tx)

    def init(params: Any) -> Any:
        return in_their_memory(tx.init(widened(jax.tree.map(to_device, params))), shardings.opt_state)

    opt_state = jax.jit(init, out_shardings=shardings.opt_state)(params)
    step, guard = jax.device_put((jnp.int32(0), init_guard()), (shardings.step, shardings.guard))
    return TrainState(step, params, opt_state, guard)


def with_first_scales(model: ShardedModel, params: Any, batch: dict[str, Array], seed: int) -> Any:
    """Parameters whose 8-bit products have the scales that a pass over this batch gives, in which they are made in the
    compute dtype; of a model without such products, as they are."""
    leaves, structure = jax.tree.flatten(params)
    layouts, shardings = jax.tree.leaves(model.layouts), jax.tree.leaves(model.shardings)
    places = [at for at, layout in enumerate(layouts) if is_amax(layout)]
    if not places:
        return params
    measuring = model.replace(measures=True)

    def measured(params: Any, batch: dict[str, Array]) -> list[Array]:
        _, grads = measuring.loss_and_grad(params, batch, jnp.array([seed, 0], jnp.int32))
        # Where all of the batch gave 0, as a gradient may, any scale will do.
        found = [jax.tree.leaves(grads)[at] for at in places]
        return [latest_amax(amax, jnp.ones_like(amax)) for amax in found]

    out = [shardings[at] for at in places]
    jitted = jax.jit(measured, out_shardings=out, compiler_options=compiler_options(model.mesh))
    for at, amax in zip(places, jitted(params, batch), strict=True):
        leaves[at] = amax
    return jax.tree.unflatten(structure, leaves)


def in_their_memory(tree: Any, shardings: Any) -> Any:
    """Traced arrays, those in host memory that have these shardings: arguments of a program that is compiled ahead are
    there, but have not the type."""
    move = lambda x, sharding: to_host(x) if rests_on_host(sharding) and not is_on_host(x) else x  # noqa: E731
    return jax.tree.map(move, tree, shardings)


class TrainStep:
    """`(state, batch) -> (state, metrics)`, jitted; the state is donated.

    Metrics are float32 scalars on device: loss, tokens, grad_norm; skipped, 1 if the guard let nothing change;
    skipped_steps, how many of all steps were; in_a_row, how many of the latest were not finite; of a model with experts
    expert_counts, an array: see `counts_of`. A batch is as parallax.model.batch has it, or a DataError; `take` does the
    same without a look at its values. `seed` is that of
    dropout, `guard` see `judge`. `batch_shape` is (global_batch, seq) of the batch that it was last traced for, None
    before.
    """

    def __init__(
        self, model: ShardedModel, tx: optax.GradientTransformation, seed: int, guard: GuardConfig | None = None
    ):
        self.model, self.tx, self.seed, self.guard = model, tx, seed, guard
        self.batch_shape: tuple[int, int] | None = None
        self.shardings, whole = state_shardings(model, tx), NamedSharding(model.mesh, P())
        self._jitted = jax.jit(
            self.train_step,
            donate_argnums=0,
            out_shardings=(self.shardings, whole),
            compiler_options=compiler_options(model.mesh),
        )

    def __call__(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        return self.take(state, self.model.checked(batch))

    def take(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """The step on a batch of a reader, which has looked at its values: nothing is read back from the devices."""
        return self._jitted(state, batch)

    def __repr__(self) -> str:
        return f"TrainStep of {repr(self.model).splitlines()[0]}"

    def init(self, batch: dict[str, Array] | None = None) -> TrainState:
        """The state before the first step; its parameters are those of the seed. Products in 8 bits have the scales
        that `batch`, as the first, gives; ConfigError where it is missing."""
        state = init_state(self.model, self.tx, self.seed)
        if batch is not None:
            params = with_first_scales(self.model, state.params, self.model.checked(batch), self.seed)
            return state._replace(params=params)
        if any(map(is_amax, jax.tree.leaves(self.model.layouts))):
            raise ConfigError(
                f"model.matmul={self.model.model.matmul!r} takes its first scales from a batch; "
                "call TrainStep.init(batch) with the first one."
            )
        return state

    def lower(self, global_batch: int, seq: int) -> jax.stages.Lowered:
        """The step for batches of this shape, ready to be compiled."""
        array = jax.ShapeDtypeStruct((global_batch, seq), jnp.int32, sharding=self.model.batch_sharding)
        return self._jitted.lower(abstract_state(self.model, self.tx), dict.fromkeys(BATCH_ARRAYS, array))

    def train_step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """What is jitted."""
        self.batch_shape = batch["tokens"].shape
        state = in_their_memory(state, self.shardings)
        noise = jnp.stack([jnp.int32(self.seed), state.step])
        metrics, grads = self.model.loss_and_grad(state.params, batch, noise)
        with jax.named_scope(UPDATE):
            metrics |= {"grad_norm": self.grad_norm(grads)}
            passes, guard = judge(self.guard, state.guard, metrics)
            update, kept = functools.partial(self.update, noise=noise), (state.params, state.opt_state)
            # A branch: where the old state and the new are chosen between element by element, XLA keeps both.
            params, opt_state = jax.lax.cond(passes, update, lambda *kept: kept[:2], *kept, grads, metrics["grad_norm"])
            counts = {"skipped": ~passes, "skipped_steps": guard.skipped, "in_a_row": guard.in_a_row}
            metrics |= {name: count.astype(jnp.float32) for name, count in counts.items()}
            metrics |= counts_of(self.model, grads)
        return TrainState(state.step + 1, params, opt_state, guard), metrics

    def grad_norm(self, grads: Any) -> Array:
        """The norm of the whole gradient, in the local view."""
        model, norm = self.model, functools.partial(global_norm, layouts=self.model.layouts)
        specs = map_layouts(lambda layout: layout.spec(model.mesh), model.layouts)
        return jax.shard_map(norm, mesh=model.mesh, in_specs=(specs,), out_specs=P(), check_vma=True)(grads)

    def update(
        self, params: Any, opt_state: Any, grads: Any, grad_norm: Array, noise: Array | None = None
    ) -> tuple[Any, Any]:
        """Parameters and optimizer state after a gradient of this norm, which is not measured again.

        What is kept in fewer bits than float32 is rounded by `noise`, int32 [2], (seed, step).
        """
        tx = optax.with_extra_args_support(self.tx)

        def update(params: Any, opt_state: Any, grads: Any, layers: Array | None = None) -> tuple[Any, Any]:
            wide = widened(params)
            updates, opt_state = tx.update(grads, opt_state, wide, grad_norm=grad_norm, noise=noise, layers=layers)
            return narrowed(optax.apply_updates(wide, updates), params, noise, layers), opt_state

        with jax.sharding.use_abstract_mesh(self.model.mesh.abstract_mesh):  # Muon's products are in its local view
            if self.model.plan.uses_host:
                params, opt_state = in_their_memory((params, opt_state), self.shardings[1:3])
                updated, opt_state = update_by_layer(update, self.model, params, opt_state, grads)
            else:
                updated, opt_state = update(params, opt_state, grads)
        latest = lambda layout, new, old, grad: latest_amax(grad, old) if is_amax(layout) else new  # noqa: E731
        return map_layouts(latest, self.model.layouts, updated, params, grads), opt_state


def make_train_step(
    model: ShardedModel, tx: optax.GradientTransformation, seed: int, guard: GuardConfig | None = None
) -> TrainStep:
    """One training step of a model with an optimizer; see TrainStep."""
    return TrainStep(model, tx, seed, guard)


def make_eval_step(model: ShardedModel) -> Callable:
    """`(params, batch) -> metrics`, jitted: loss and tokens, forward only; a batch is as model.batch has it."""
    jitted = jax.jit(model.loss, compiler_options=compiler_options(model.mesh))
    return lambda params, batch: jitted(params, model.checked(batch))


# ---- what settings describe, put together on a mesh


def model_of(settings: Settings, mesh: Any = None) -> ShardedModel:
    """The model on a mesh, which may be abstract; a ParallaxError where it does not fit.

    Without a mesh, on that of the settings, over all devices that are here.
    """
    mesh = make_mesh(settings.mesh) if mesh is None else mesh
    sections = settings.model, settings.layout, settings.pipeline, settings.data_parallel, settings.fsdp, settings.loss
    optimizer = settings.optimizer
    return ShardedModel(*sections, mesh, optimizer.weights_dtype, optimizer.masters_on, optimizer.states_on)


def model_and_optimizer(settings: Settings, mesh: Any = None) -> tuple[ShardedModel, optax.GradientTransformation]:
    """Both; a ParallaxError where they do not fit the mesh, the batch or the steps."""
    model = model_of(settings, mesh)
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return model, make_optimizer(settings.optimizer, settings.train.steps, model.layouts)


def step_of(settings: Settings, mesh: Any = None) -> TrainStep:
    """The step that training with these settings takes, with its guard: `(state, batch) -> (state, metrics)`.

    Without a mesh, on that of the settings, over all devices that are here. Errors as of `model_and_optimizer`.
    """
    return make_train_step(*model_and_optimizer(settings, mesh), settings.train.seed, settings.guard)
