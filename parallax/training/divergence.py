"""Skipped steps: reports, a search for the first non-finite value, and the end of a run with too many of them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.checkpoint.arrays import flatten
from parallax.config.sections import BLOCKS, EMBEDDING, HEAD
from parallax.config.settings import Settings
from parallax.data import MixedReader, Reader
from parallax.display.tables import text_table
from parallax.errors import EXIT_NUMBERS, ParallaxError, first_few
from parallax.pipeline import ShardedModel
from parallax.processes.job import set_phase
from parallax.sharding.host import to_device
from parallax.sharding.plan import ParameterPlan
from parallax.step.optimizer import global_norm
from parallax.storage.run_files import RunFiles
from parallax.training.build import model_of_shape
from parallax.training.logger import RunLogger

SHOWN_RANGES = 8


class DivergenceError(ParallaxError):
    """Loss, gradient or parameters are no longer finite."""

    exit_status = EXIT_NUMBERS


class Diagnosis(NamedTuple):
    """Measurements of one step. Arrays are [..., 2]: the number of non-finite entries, and the largest of the others
    or, for gradients, the norm. Arrays of blocks have a leading dim of the model's layers, with zeros for layers
    without such an array. The load of experts and scales of 8-bit products, which have no gradient, are left out."""

    loss: float
    grad_norm: float
    parameters: dict[str, np.ndarray]
    activations: np.ndarray  # of the embedding, then each layer
    gradients: dict[str, np.ndarray]

    @property
    def first(self) -> str | None:
        """The first non-finite value in the order of a step's computation; None if all are finite."""
        layers = np.flatnonzero(self.activations[:, 0])
        places = [f"parameter {place}" for place in _not_finite(self.parameters)]
        places += [f"output of layer {layer - 1}" if layer else "output of the embedding" for layer in layers]
        if not math.isfinite(self.loss):
            places.append("loss, of finite activations")
        # The backward pass begins with the head and ends with the embedding.
        places += [f"gradient of {place}" for place in reversed(_not_finite(self.gradients))]
        if not math.isfinite(self.grad_norm):
            places.append("norm of the gradient: its entries are finite, their sum is not")
        return places[0] if places else None

    def lines(self) -> list[str]:
        """A table: one line for the embedding, each layer and the head."""
        layers = range(len(self.activations) - 1)
        places = [("embedding", EMBEDDING, 0), *((f"layer {n}", BLOCKS, n) for n in layers), ("head", HEAD, 0)]
        rows = []
        for number, (title, part, layer) in enumerate(places):
            gradients, parameters = (
                [value[layer] if part == BLOCKS else value for name, value in of.items() if _part(name) == part]
                for of in (self.gradients, self.parameters)
            )
            activations = self.activations[number : number + 1]  # the head has none
            cells = _cell(activations, "largest"), _cell(gradients, "norm"), _cell(parameters, "largest")
            rows.append([title, *cells])
        first = self.first
        return [
            *text_table(["", "activations", "gradients", "parameters"], rows, left=1),
            f"loss {self.loss!r}, norm of the gradient {self.grad_norm!r}",
            "all is finite" if first is None else f"first value that is not finite: {first}",
        ]


def make_diagnosis(model: ShardedModel) -> Callable[[Any, dict[str, Array], Array], Diagnosis]:
    """A function of `(params, batch, noise)` that repeats a step's forward and backward pass and measures its values.

    It changes no state. Collective: all processes of a job must call it together. `noise` is that of the step, see
    `loss_and_grad`.
    """
    whole = NamedSharding(model.mesh, P())  # so that every process can read it
    observe, rows = jax.jit(model.activations), flatten(model.plan.rows)
    measure = jax.jit(functools.partial(_measured, model), out_shardings=whole)

    def diagnose(params: Any, batch: dict[str, Array], noise: Array) -> Diagnosis:
        activations = np.asarray(observe(params, batch, noise))
        loss, grad_norm, *measured = jax.device_get(measure(params, batch, noise))
        gradients, parameters = ({name: of_model(name, value) for name, value in of.items()} for of in measured)
        return Diagnosis(float(loss), float(grad_norm), parameters, activations, gradients)

    def of_model(name: str, value: np.ndarray) -> np.ndarray:
        """Measurements of a stack of layers, at the layers' positions in the model."""
        stack = rows[name].spec.stack
        if not stack:
            return value
        by_layer = np.zeros((model.config.layers, *value.shape[1:]), value.dtype)
        by_layer[model.orders[stack].members] = value
        return by_layer

    return diagnose


def not_finite(params: Any) -> list[str]:
    """Names of the parameters with a non-finite value."""
    return [name for name, bad in jax.device_get(_any_not_finite(params)).items() if bad]


@jax.jit
def _any_not_finite(params: Any) -> dict[str, Array]:
    return {name: ~jnp.isfinite(to_device(leaf)).all() for name, leaf in flatten(params).items()}


def _measured(model: ShardedModel, params: Any, batch: dict[str, Array], noise: Array):
    metrics, grads = model.loss_and_grad(params, batch, noise)
    rows = flatten(model.plan.rows)
    grads = {name: grad for name, grad in flatten(grads).items() if rows[name].spec.is_trained}
    gradients = {name: _measure(rows[name], grad, norm=True) for name, grad in grads.items()}
    parameters = {
        name: _measure(rows[name], leaf, norm=False) for name, leaf in flatten(jax.tree.map(to_device, params)).items()
    }
    return metrics["loss"], global_norm(grads), gradients, parameters


def _measure(row: ParameterPlan, x: Array, *, norm: bool) -> Array:
    axes = tuple(range(bool(row.spec.stack), x.ndim))
    finite = jnp.isfinite(x)
    size = jnp.where(finite, jnp.abs(x), 0).astype(jnp.float32)
    size = jnp.sqrt(jnp.sum(size**2, axis=axes)) if norm else jnp.max(size, axis=axes)
    return jnp.stack([jnp.sum(~finite, axis=axes).astype(jnp.float32), size], axis=-1)


def _part(name: str) -> str:
    return name.split(".")[0]


def _not_finite(measured: dict[str, np.ndarray]) -> list[str]:
    """Names and layers with non-finite values, in the order of the forward pass."""
    depth = {EMBEDDING: -1, HEAD: math.inf}
    places = [(name, *place) for name, values in measured.items() for place in np.argwhere(values[..., 0]).tolist()]
    places.sort(key=lambda place: depth.get(_part(place[0]), place[-1]))
    return [" in layer ".join(map(str, place)) for place in places]


def _cell(measured: Sequence[np.ndarray], what: str) -> str:
    """Several arrays combined: the number of non-finite entries or, if there are none, the norm or the largest."""
    if not len(measured):
        return ""
    counts, sizes = np.array(measured).T
    if counts.any():
        return f"{int(counts.sum())} not finite"
    return f"{what} {np.linalg.norm(sizes) if what == 'norm' else sizes.max():.3e}"


@dataclass
class SkippedSteps:
    """Reports skipped steps and the text that they read; `put` sends a batch to the model's devices."""

    settings: Settings
    data: Reader | MixedReader
    model: ShardedModel
    put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]
    folder: RunFiles
    logger: RunLogger

    def note(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Values for metrics.jsonl if a step was skipped, otherwise none; also prints a line."""
        if not metrics["skipped"]:
            return {}
        self.logger.say(f"step {step} skipped: {self._why(metrics)}; {text_of(self.data, step)}; nothing has changed")
        reason = "not finite" if metrics["in_a_row"] else "spike"
        values: dict[str, Any] = {"skipped/reason": reason}
        for name, (reader, windows) in self.data.windows_by_source(step - 1).items():
            of_source = f"/{name}" if name else ""
            values[f"skipped/windows{of_source}"] = windows.tolist()
            values[f"skipped/documents{of_source}"] = reader.documents_of(windows).tolist()
        return values

    def too_many(self, metrics: Mapping[str, float]) -> bool:
        """Whether too many consecutive steps were not finite, so that the run must stop."""
        return metrics["in_a_row"] > self.settings.guard.max_skipped_steps

    def stop(self, step: int, metrics: Mapping[str, float], params: Any) -> None:
        """Raise DivergenceError, which names the place in the model where the first of these steps went wrong."""
        in_a_row = int(metrics["in_a_row"])
        first = step - in_a_row + 1
        set_phase(f"the diagnosis of step {first}", compiling=True)
        noise = np.array([self.settings.train.seed, first - 1], np.int32)
        batch = self.put(self.data.batch(first - 1))
        diagnosis = make_diagnosis(model_of_shape(self.model, batch["tokens"].shape))(params, batch, noise)
        numbers, where = _numbers(metrics), "when it is recomputed, all values are finite: the hardware may be faulty"
        if diagnosis.first is not None:
            numbers = _numbers(diagnosis._asdict())
            where = f"the first value that is not finite is the {diagnosis.first}"
        after = f", nor are the {in_a_row - 1} steps after it" if in_a_row > 1 else ""
        raise DivergenceError(
            f"step {first} is not finite: {numbers}{after} (guard.max_skipped_steps="
            f"{self.settings.guard.max_skipped_steps}); in step {first}, of "
            f"{text_of(self.data, first)}, {where}. Nothing of these steps was kept. Replay it with "
            f"`python -m parallax.replay --workdir={self.folder.path} --step={first}`; try a lower "
            "optimizer.learning_rate, more optimizer.warmup_steps or a smaller optimizer.clip_norm"
        )

    def _why(self, metrics: Mapping[str, float]) -> str:
        if metrics["in_a_row"]:
            most = self.settings.guard.max_skipped_steps
            return f"not finite, {_numbers(metrics)} ({int(metrics['in_a_row'])} in a row, {most} are let pass)"
        guard = self.settings.guard
        return f"a spike of {guard.spike_signal} beyond guard.spike_z={guard.spike_z:g}, {_numbers(metrics)}"


def ranges(numbers: np.ndarray) -> str:
    """Integers in order, with consecutive ones as ranges; a long list is shortened.

    >>> ranges(np.array([7, 3, 4, 5, 12]))
    '3-5, 7, 12'
    """
    numbers = np.unique(numbers)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return first_few([f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs], SHOWN_RANGES)


def text_of(data: Reader | MixedReader, step: int) -> str:
    """The text of a step, as the numbers of its windows and documents, by source."""
    return "; ".join(
        f"{f'{name}: ' if name else ''}windows {ranges(windows)} of documents {ranges(reader.documents_of(windows))}"
        for name, (reader, windows) in data.windows_by_source(step - 1).items()
    )


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "grad_norm"))
