"""The compiled, pure functions of training: one training step and one evaluation step; and their construction."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config.sections import FIXED, STREAMS, GuardConfig
from parallax.config.settings import NO_CODE, Settings, check_settings, with_code
from parallax.errors import ConfigError
from parallax.model.batch import BATCH_ARRAYS, GROUPS
from parallax.model.products import latest_amax
from parallax.pipeline import ShardedModel
from parallax.sharding.compiler import RUN_ONCE, Options, compiler_options, copies_what_branches_return
from parallax.sharding.host import is_on_host, rests_on_host, to_device, to_host
from parallax.sharding.layout import named_leaves
from parallax.sharding.mesh import make_mesh
from parallax.sharding.parameter import Role, in_32_bits
from parallax.sharding.plan import ParameterPlan
from parallax.step.expert_load import counts_of
from parallax.step.guard import GuardState, init_guard, judge
from parallax.step.low_precision import Blocks, check_blocks, has_blocks, narrowed, widened
from parallax.step.optimizer import global_norm, make_optimizer
from parallax.step.qk_clip import check_clipped, max_logit_of, with_clipped_heads
from parallax.step.statistics import with_statistics
from parallax.step.streaming import check_streams, map_kept, update_by_layer

UPDATE = "update"  # the scope of the update, which reports read in compiled programs


class TrainState(NamedTuple):
    """The state of a run between two steps; the batch and the dropout of a step depend on its number."""

    step: Array  # int32: number of steps done
    params: Any
    opt_state: Any
    guard: GuardState


def abstract_state(model: ShardedModel, tx: optax.GradientTransformation) -> TrainState:
    """The shapes and shardings of a state.

    Optimizer states with the tree and the shapes of the parameters are sharded like them, by `model.plan`; so are
    blocks with their scales. All other states are whole on every device. The plan says in which memory parameters and
    states are.

    Raises ConfigError if the mesh divides blocks, if the optimizer cannot work layer by layer, or if it keeps states of
    parameters that are not trained.
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
    check_frozen(model, shapes)
    check_clipped(model)
    opt_state = map_kept(place_kept, place, shapes, params, model.states_shardings)
    guard = jax.tree.map(place, jax.eval_shape(init_guard))
    return TrainState(place(jax.ShapeDtypeStruct((), jnp.int32)), params, opt_state, guard)


def check_frozen(model: ShardedModel, opt_state: Any) -> None:
    """Raise ConfigError if an optimizer keeps states of parameters without a gradient; `opt_state` has shapes."""

    def check(kept: Any, row: ParameterPlan) -> Any:
        if not row.spec.is_trained:
            raise ConfigError(
                f"this optimizer keeps states of {row.scope}, which is not trained ({_why_not_trained(row)}); use "
                "make_optimizer, or optax.partition with optax.set_to_zero() where row.spec.is_trained does not hold."
            )
        return kept

    map_kept(check, lambda leaf: leaf, opt_state, model.plan.rows)


def _why_not_trained(row: ParameterPlan) -> str:
    return "it follows from the steps' statistics" if row.spec.is_statistic else "optimizer.frozen"


def state_shardings(model: ShardedModel, tx: optax.GradientTransformation) -> TrainState:
    """The sharding of every array of a state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, tx))


@in_32_bits()
def init_state(model: ShardedModel, tx: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step."""
    params = model.init(seed)
    shardings = state_shardings(model, tx)

    def rest(params: Any) -> TrainState:
        opt_state = in_their_memory(tx.init(widened(jax.tree.map(to_device, params))), shardings.opt_state)
        return TrainState(jnp.int32(0), None, opt_state, init_guard())

    options = RUN_ONCE if model.is_simulated else None
    jitted = jax.jit(rest, out_shardings=shardings._replace(params=None), compiler_options=options)
    return jitted(params)._replace(params=params)


@in_32_bits()
def with_first_scales(model: ShardedModel, params: Any, batch: dict[str, Array], seed: int) -> Any:
    """Parameters with the first scales of 8-bit products, from a pass over this batch in which these products are
    computed in the compute dtype; unchanged for a model without such products."""
    shardings = named_leaves(model.shardings)
    out = {name: shardings[name] for name, row in model.plan.statistics.items() if row.spec.role == Role.MAXIMA}
    if not out:
        return params
    measuring = model.replace(measures=True)

    def measured(params: Any, batch: dict[str, Array]) -> dict[str, Array]:
        noise = jnp.array([seed, 0], jnp.int32)
        *_, statistics = measuring.loss_grads_and_statistics(params, batch, noise)
        # If all values in the batch were 0, as gradients may be, any scale is suitable.
        return {name: latest_amax(statistics[name], jnp.ones_like(statistics[name])) for name in out}

    jitted = jax.jit(measured, out_shardings=out, compiler_options=options_of(model))
    leaves = named_leaves(params) | jitted(params, batch)
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def in_their_memory(tree: Any, shardings: Any) -> Any:
    """Traced arrays with the host memory type where these shardings have it: arguments of a program that is compiled
    ahead are in host memory, but their types do not say so."""

    def move(x: Array, sharding: NamedSharding) -> Array:
        return to_host(x) if rests_on_host(sharding) and not is_on_host(x) else x

    return jax.tree.map(move, tree, shardings)


class TrainStep:
    """`(state, batch) -> (state, metrics)`, jitted; the state is donated.

    Metrics are float32 scalars on device: loss, tokens, grad_norm; skipped, 1 if the guard skipped the step;
    skipped_steps, the number of all skipped steps; in_a_row, the number of consecutive non-finite steps. A model with
    experts has expert_counts, an array: see `counts_of`; one with model.qk_clip has attention/max_logit. With a batch
    that has groups, as those of a mixture have the sources, there are the arrays group_losses and group_tokens: see
    ShardedModel.loss. A batch must be as in parallax.model.batch (DataError); `take` does the same without checking its
    values. `seed` is that of dropout; for `guard` see `judge`. `batch_shape` is (global_batch, seq) of the batches that
    it is made for, which reports read; None if that is not known. `groups` is the number of groups of its batches.
    """

    def __init__(
        self,
        model: ShardedModel,
        tx: optax.GradientTransformation,
        seed: int,
        guard: GuardConfig | None = None,
        batch_shape: tuple[int, int] | None = None,
        groups: int = 0,
    ):
        self.model, self.tx, self.seed, self.guard, self.batch_shape = model, tx, seed, guard, batch_shape
        self.groups = groups
        self.shardings, whole = state_shardings(model, tx), NamedSharding(model.mesh, P())
        self._jitted = jax.jit(
            self.train_step,
            donate_argnums=0,
            out_shardings=(self.shardings, whole),
            compiler_options=options_of(model),
        )

    def __call__(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        return self.take(state, self.model.checked(batch))

    @in_32_bits()
    def take(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """The step on a batch of a reader, which has checked its values: nothing is read back from the devices."""
        return self._jitted(state, batch)

    def __repr__(self) -> str:
        return f"TrainStep of {repr(self.model).splitlines()[0]}"

    def init(self, batch: dict[str, Array] | None = None) -> TrainState:
        """The state before the first step; parameters depend on the seed. The first scales of 8-bit products come from
        `batch`, the first one; ConfigError if it is missing."""
        state = init_state(self.model, self.tx, self.seed)
        if batch is not None:
            params = with_first_scales(self.model, state.params, self.model.checked(batch), self.seed)
            return state._replace(params=params)
        if any(row.spec.role == Role.MAXIMA for row in self.model.plan.statistics.values()):
            raise ConfigError(
                f"model.matmul={self.model.config.matmul!r} takes its first scales from a batch; "
                "call TrainStep.init(batch) with the first one."
            )
        return state

    @in_32_bits()
    def trace(self, global_batch: int, seq: int) -> jax.stages.Traced:
        """The traced step for batches of this shape; a first step of this shape is not traced again."""
        self.model.check_batch(global_batch, seq)
        array = jax.ShapeDtypeStruct((global_batch, seq), jnp.int32, sharding=self.model.batch_sharding)
        names = (*BATCH_ARRAYS, GROUPS) if self.groups else BATCH_ARRAYS
        return self._jitted.trace(abstract_state(self.model, self.tx), dict.fromkeys(names, array))

    @in_32_bits()
    def lower(self, global_batch: int, seq: int) -> jax.stages.Lowered:
        """The lowered step for batches of this shape."""
        return self.trace(global_batch, seq).lower()

    def train_step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """The function that is jitted."""
        state = in_their_memory(state, self.shardings)
        noise = jnp.stack([jnp.int32(self.seed), state.step])
        of_groups = {"groups": self.groups} if GROUPS in batch else {}
        metrics, grads, statistics = self.model.loss_grads_and_statistics(state.params, batch, noise, **of_groups)
        with jax.named_scope(UPDATE):
            metrics |= {"grad_norm": self.grad_norm(grads, statistics)}
            # Sent before the update's branch, which may send: simulated devices meet messages as they are written.
            largest = max_logit_of(self.model, statistics)
            passes, guard = judge(self.guard, state.guard, metrics)
            update, kept = functools.partial(self.update, noise=noise), (state.params, state.opt_state)
            given = grads, statistics, metrics["grad_norm"]
            in_loop = copies_what_branches_return(self.model.mesh)
            params, opt_state = updated_if(passes, update, kept, given, in_loop=in_loop)
            counts = {"skipped": ~passes, "skipped_steps": guard.skipped, "in_a_row": guard.in_a_row}
            metrics |= {name: count.astype(jnp.float32) for name, count in counts.items()}
            metrics |= counts_of(self.model, statistics) | largest
        return TrainState(state.step + 1, params, opt_state, guard), metrics

    def grad_norm(self, grads: Any, statistics: Mapping[str, Array]) -> Array:
        """The norm of the whole gradient, in the local view; not finite if a maximum is not. Counts always are."""
        plan, mesh = self.model.plan, self.model.mesh
        maxima = {name: row for name, row in plan.statistics.items() if row.spec.role == Role.MAXIMA}
        rows, given = (plan.rows, maxima), (grads, {name: statistics[name] for name in maxima})
        norm, specs = functools.partial(global_norm, rows=rows), jax.tree.map(lambda row: row.at_rest.spec(mesh), rows)
        return jax.shard_map(norm, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=True)(given)

    def update(
        self,
        params: Any,
        opt_state: Any,
        grads: Any,
        statistics: Mapping[str, Array],
        grad_norm: Array,
        noise: Array | None = None,
    ) -> tuple[Any, Any]:
        """Parameters and optimizer state after the update with a gradient of this norm, which is not recomputed.

        Arrays in fewer bits than float32 are rounded with `noise`, int32 [2], (seed, step).
        """
        tx, rows = optax.with_extra_args_support(self.tx), self.model.plan.rows

        def update(params: Any, opt_state: Any, grads: Any, layers: Array | None = None) -> tuple[Any, Any]:
            wide, grads = widened(params), jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
            given = dict(grad_norm=grad_norm, noise=noise, layers=layers)
            updates, opt_state = tx.update(grads, opt_state, wide, **given)
            old, wide, updates = (_trained(rows, tree) for tree in (params, wide, updates))
            new = narrowed(optax.apply_updates(wide, updates), old, noise, layers)
            return jax.tree.map(lambda _, old, new: old if new is None else new, rows, params, new), opt_state

        with jax.sharding.use_abstract_mesh(self.model.mesh.abstract_mesh):  # Muon's products are in its local view
            if self.model.plan.uses_host or self.model.plan.grads_on_host or has_blocks(opt_state):
                shardings = self.shardings[1:3]
                params, opt_state = in_their_memory((params, opt_state), shardings)
                updated, opt_state = update_by_layer(update, self.model, params, opt_state, grads, shardings)
            else:
                updated, opt_state = update(params, opt_state, grads)
        rate = self.model.settings.optimizer.balance_rate
        updated = with_statistics(self.model.plan.statistics, updated, statistics, rate)
        return with_clipped_heads(self.model, updated, statistics, noise), opt_state


def updated_if(passes: Array, update: Callable, kept: tuple[Any, Any], given: tuple, *, in_loop: bool) -> Any:
    """Parameters and optimizer state, updated with what is given if the step passes.

    A branch, since with an elementwise choice between the old and the new state XLA would keep both. `in_loop` is for
    where it would copy what a branch returns: a loop of at most one turn.
    """
    if not in_loop:
        return jax.lax.cond(passes, update, lambda *kept: kept[:2], *kept, *given)

    def turn(state: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        return jnp.zeros_like(passes), *update(*state[1:], *given)

    return jax.lax.while_loop(lambda state: state[0], turn, (passes, *kept))[1:]


def _trained(rows: Any, tree: Any) -> Any:
    """A tree of arrays for parameters, without those that have no gradient."""
    return jax.tree.map(lambda row, x: x if row.spec.is_trained else None, rows, tree)


def make_eval_step(model: ShardedModel, *, groups: int = 0) -> Callable:
    """`(params, batch) -> metrics`, jitted: loss and tokens, forward only; a batch is as model.batch has it. With
    `groups`, their sums are among the metrics: see ShardedModel.loss."""
    return _jitted_on(model, functools.partial(model.loss, groups=groups))


def make_position_step(model: ShardedModel) -> Callable:
    """The same with the sums by position in the window: the groups are those of `first_positions`."""

    def loss_by_position(params: Any, batch: dict[str, Array]) -> dict[str, Array]:
        shape = batch["tokens"].shape
        firsts = jnp.array(first_positions(shape[1]))
        group_S = jnp.searchsorted(firsts, jnp.arange(shape[1]), side="right") - 1
        groups = jnp.broadcast_to(group_S.astype(jnp.int32), shape)
        return model.loss(params, {**batch, GROUPS: groups}, groups=len(firsts))

    return _jitted_on(model, loss_by_position)


def first_positions(seq: int) -> list[int]:
    """The first position of each group of positions in windows of `seq` tokens: 0, and powers of two.

    >>> first_positions(10)
    [0, 1, 2, 4, 8]
    """
    return [0, *(1 << power for power in range((seq - 1).bit_length()))]


def options_of(model: ShardedModel) -> Options:
    """Compiler options for programs of this model on its mesh."""
    config, has_streams = model.config, model.layout.tensor_parallel == STREAMS
    said = dict(has_fixed_ranges=config.matmul_scales == FIXED, has_mixtures=config.has_mixtures)
    return compiler_options(model.mesh, config.matmul, has_streams=has_streams, **said)


def _jitted_on(model: ShardedModel, function: Callable) -> Callable:
    """A function of parameters and a batch, jitted; the batch is checked before."""
    jitted = jax.jit(function, compiler_options=options_of(model))
    return in_32_bits()(lambda params, batch: jitted(params, model.checked(batch)))


# ---- construction from settings


def model_of(settings: Settings, mesh: Any = None, *, code: Mapping[str, Any] = NO_CODE) -> ShardedModel:
    """The model on a mesh, which may be abstract; a ParallaxError if it does not fit.

    Without a mesh, on that of the settings, over all devices that are here. `code` has classes and functions of your
    own for keys of the settings, as {"model.mlp": SquaredMLP}.
    """
    check_settings(settings)
    settings = with_code(settings, code)
    return ShardedModel(settings, make_mesh(settings.mesh) if mesh is None else mesh)


def optimizer_of(model: ShardedModel) -> optax.GradientTransformation:
    """The optimizer of a model's settings; ConfigError if it does not fit the steps."""
    return make_optimizer(model.settings.optimizer, model.settings.train.steps, model.plan.rows)


def step_of(settings: Settings, mesh: Any = None, *, code: Mapping[str, Any] = NO_CODE) -> TrainStep:
    """The training step of these settings, with its guard: `(state, batch) -> (state, metrics)`.

    Without a mesh, on that of the settings, over all devices that are here. For `code` see `model_of`. Raises a
    ParallaxError if the settings do not fit the mesh, the batch or the steps.
    """
    model, shape = model_of(settings, mesh, code=code), (settings.data.global_batch, settings.data.seq)
    model.check_batch(*shape)
    groups = settings.data.loss_groups
    return TrainStep(model, optimizer_of(model), settings.train.seed, settings.guard, shape, groups)
