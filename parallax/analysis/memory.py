"""Bytes on each device, by component, from a trace of the step that a device runs."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallax.analysis.budget.constants import without_constants
from parallax.analysis.budget.flow import DATA, WEIGHTS
from parallax.analysis.budget.live import Run
from parallax.analysis.budget.order import with_copies
from parallax.analysis.budget.program import Op, Program, Value, flat
from parallax.analysis.budget.written import ACCELERATOR, CPU
from parallax.config.settings import Settings
from parallax.model.batch import BATCH_ARRAYS
from parallax.pipeline.sharded_model import ShardedModel
from parallax.runtime.jaxprs import called
from parallax.sharding.mesh import is_simulated
from parallax.training.optimizer import make_optimizer
from parallax.training.step import abstract_state


class Memory(NamedTuple):
    """Bytes on each device at the moment of a step when they are most: the sum is the predicted peak.

    `gradients` are summed over microbatches, and those of a layer on their way there. `gathered_weights` are copies in
    the compute dtype: collected over dp, of a layer at a time or of all once a step, sent to the ranks that run them,
    or in another order of dims. `saved_activations` are what forward keeps for backward, as many microbatches as the
    schedule has slots; `pipeline_buffers` messages, and what enters the first stage and leaves the last.
    `working_activations` are those of the layer, or with remat="stage" of the stage, that is at work, made again or
    not, and their gradients; `logits` those of a chunk of tokens, and their gradients.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    gathered_weights: int
    saved_activations: int
    pipeline_buffers: int
    working_activations: int
    logits: int
    other: int

    @property
    def peak(self) -> int:
        return sum(self)


def memory(model: ShardedModel, opt_state: Any, *, global_batch: int, seq: int) -> Memory:
    """What a step holds, computed before it runs; `opt_state` is a tree of ShapeDtypeStruct with shardings.

    The compiler is taken to be XLA's for CPU where the mesh is of CPU devices, else one for accelerators. The update
    of the parameters is taken to be in place, and so never to hold more than the passes did.
    """
    program, params, carried = _traced(model, global_batch, seq)
    compiler = CPU if is_simulated(model.mesh) else ACCELERATOR
    program = without_constants(program)
    if compiler.copies:
        program = with_copies(program)
    kept = {shape for shape, name in carried if name == "saved_activations" and not model.schedule.keeps_across_ticks}
    run = Run(compiler, partial(_component, model, kept), partial(_carried, carried))
    run.heap.take(bytes_on_device(opt_state, jax.tree.map(lambda leaf: leaf.sharding, opt_state)), "optimizer")
    inputs = [run.heap.take(value.bytes, "parameters") for value in program.inputs[:params]]
    inputs += [run.heap.take(value.bytes, "batch") for value in program.inputs[params:]]
    made_of = [WEIGHTS] * params + [DATA] * (len(inputs) - params)
    gradients = set(range(len(program.outputs) - params, len(program.outputs)))
    run.run(program, inputs, made_of, gradients=gradients)
    return Memory(**{name: run.heap.at_peak[name] for name in Memory._fields})


def _traced(model: ShardedModel, global_batch: int, seq: int) -> tuple[Program, int, list[tuple]]:
    """Loss and gradients as one device runs them; the number of parameters, which come first and, as gradients, last;
    shape and component of what the loops over ticks carry."""
    carried: list[tuple] = []

    def start(params, batch, noise):
        executor, ends_state, _ = model.ready(params, batch, noise)
        state = jax.tree_util.tree_leaves_with_path(executor.start(ends_state))
        carried.extend((leaf.shape, _component_of_state(jax.tree_util.keystr(path))) for path, leaf in state)
        return jnp.float32(0)

    batch = dict.fromkeys(BATCH_ARRAYS, jax.ShapeDtypeStruct((global_batch, seq), jnp.int32))
    args = model.shapes, batch, jax.ShapeDtypeStruct((2,), jnp.int32)
    jax.eval_shape(model.mapped(start, P()), *args)
    traced = jax.make_jaxpr(model.loss_and_grad)(*args).jaxpr
    (mapped,) = (equation for equation in traced.eqns if equation.primitive.name == "shard_map")
    program = flat(called(mapped))
    local = dict(zip(mapped.invars, program.inputs, strict=True))
    program.inputs = [local[var] if var in local else Value.of(var.aval) for var in traced.invars]
    return program, len(jax.tree.leaves(model.shapes)), carried


def _component_of_state(path: str) -> str:
    if "grads" in path:
        return "gradients"
    if path.endswith(".loss"):
        return "other"
    return "saved_activations" if path.startswith(".kept") else "pipeline_buffers"


def _carried(state: list[tuple], op: Op) -> list[str] | None:
    """The components of what a loop over ticks carries, which is the state or, in a part of the ticks, some of it."""
    names, rest = [], iter(state)
    for value in op.outs[: op.loop.carried]:
        names.append(next((name for shape, name in rest if shape == value.shape), None))
    return None if None in names else names


def _component(model: ShardedModel, kept: set[tuple], value: Value, made_of: int, is_gradient: bool) -> str:
    if value.shape in kept:  # in a tick whose passes keep nothing for others
        return "saved_activations"
    if is_gradient:
        return "gradients"
    if made_of != DATA:
        return "gathered_weights" if made_of == WEIGHTS else "other"
    vocab = model.model.padded_vocab
    columns = {vocab, vocab // model.axis_sizes["tp"]}
    return "logits" if len(value.shape) == 2 and value.shape[1] in columns else "working_activations"


def predicted_memory(model: ShardedModel, settings: Settings) -> Memory:
    """Bytes on each device, by component."""
    tx = make_optimizer(settings.optimizer, settings.train.steps, model.layouts)
    data = settings.data
    return memory(model, abstract_state(model, tx).opt_state, global_batch=data.global_batch, seq=data.seq)


def bytes_on_device(shapes: Any, shardings: Any) -> int:
    """Bytes of each device's pieces of a tree of arrays."""
    pieces = jax.tree.map(lambda x, sharding: math.prod(sharding.shard_shape(x.shape)), shapes, shardings)
    sizes = jax.tree.map(lambda x, piece: piece * x.dtype.itemsize, shapes, pieces)
    return sum(jax.tree.leaves(sizes))
