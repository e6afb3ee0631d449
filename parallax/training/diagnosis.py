"""Where in a step the first number is not finite: parameters, activations by layer, loss, gradients by layer."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.pipeline.sharded_model import ShardedModel


class Diagnosis(NamedTuple):
    """Of one step. Arrays are [..., 2]: entries that are not finite, and the largest of the others or, of gradients,
    the norm. Those of blocks have a leading dim of layers."""

    loss: float
    grad_norm: float
    parameters: dict[str, np.ndarray]
    activations: np.ndarray  # of the embedding, then of each layer
    gradients: dict[str, np.ndarray]

    @property
    def first(self) -> str | None:
        """The first value that is not finite, in the order in which a step computes; None if all are."""
        for name, layer in _not_finite(self.parameters):
            return f"parameter {name}{_of(layer)}"
        for at in np.flatnonzero(self.activations[:, 0]):
            return f"output of layer {at - 1}" if at else "output of the embedding"
        if not math.isfinite(self.loss):
            return "loss, of finite activations"
        # The backward pass begins with the head, and ends with the embedding.
        for name, layer in reversed(_not_finite(self.gradients)):
            return f"gradient of {name}{_of(layer)}"
        return (
            None if math.isfinite(self.grad_norm) else "norm of the gradient: its entries are finite, their sum is not"
        )

    def lines(self) -> list[str]:
        """A table: one line for the embedding, each layer and the head."""
        rows = [f"{'':12}{'activations':>24}{'gradients':>24}{'parameters':>24}"]
        layers = len(self.activations) - 1
        for at, name in enumerate(["embedding", *(f"layer {n}" for n in range(layers)), "head"]):
            activation = self.activations[at] if at <= layers else None
            part = "head" if at > layers else "blocks" if at else "embedding"
            cells = [_cell(activation, "largest"), self._of_part(self.gradients, part, at - 1, "norm")]
            cells.append(self._of_part(self.parameters, part, at - 1, "largest"))
            rows.append(f"{name:12}" + "".join(f"{cell:>24}" for cell in cells))
        first = self.first
        return [
            *rows,
            f"loss {self.loss!r}, norm of the gradient {self.grad_norm!r}",
            "all is finite" if first is None else f"first value that is not finite: {first}",
        ]

    def _of_part(self, measured: dict[str, np.ndarray], part: str, layer: int, what: str) -> str:
        found = [value[layer] if part == "blocks" else value for name, value in measured.items() if _part(name) == part]
        if not found:
            return ""
        counts, sizes = np.array(found).T
        total = float(np.sqrt(np.sum(sizes**2))) if what == "norm" else float(np.max(sizes))
        return _cell(np.array([np.sum(counts), total]), what)


def make_diagnosis(model: ShardedModel) -> Callable[[Any, dict[str, Array], Array], Diagnosis]:
    """`(params, batch, noise)`: take a step's forward and backward pass again, and measure what it computes.

    Nothing is changed. Collective: all processes of a job call it together. `noise` is that of the step, see
    `loss_and_grad`.
    """
    whole = NamedSharding(model.mesh, P())  # so that every process can read it
    observe = jax.jit(model.activations)
    measure = jax.jit(functools.partial(_measured, model), out_shardings=whole)

    def diagnose(params: Any, batch: dict[str, Array], noise: Array) -> Diagnosis:
        activations = np.asarray(observe(params, batch, noise))
        loss, grad_norm, gradients, parameters = jax.device_get(measure(params, batch, noise))
        return Diagnosis(float(loss), float(grad_norm), parameters, activations, gradients)

    return diagnose


def not_finite(params: Any) -> list[str]:
    """Names of the parameters that hold a value that is not finite."""
    return [name for name, bad in jax.device_get(_any_not_finite(params)).items() if bad]


@jax.jit
def _any_not_finite(params: Any) -> dict[str, Array]:
    return {name: ~jnp.isfinite(leaf).all() for name, leaf in _named(params)}


def _measured(model: ShardedModel, params: Any, batch: dict[str, Array], noise: Array):
    metrics, grads = model.loss_and_grad(params, batch, noise)
    gradients = {name: _measure(name, grad, norm=True) for name, grad in _named(grads)}
    squares = sum(jnp.sum(jnp.square(grad)) for _, grad in _named(grads))
    parameters = {name: _measure(name, leaf, norm=False) for name, leaf in _named(params)}
    return metrics["loss"], jnp.sqrt(squares), gradients, parameters


def _measure(name: str, x: Array, *, norm: bool) -> Array:
    axes = tuple(range(1 if _part(name) == "blocks" else 0, x.ndim))
    finite = jnp.isfinite(x)
    size = jnp.where(finite, jnp.abs(x), 0).astype(jnp.float32)
    size = jnp.sqrt(jnp.sum(size**2, axis=axes)) if norm else jnp.max(size, axis=axes)
    return jnp.stack([jnp.sum(~finite, axis=axes).astype(jnp.float32), size], axis=-1)


def _named(tree: Any) -> Iterator[tuple[str, Array]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _part(name: str) -> str:
    return name.split(".")[0]


def _not_finite(measured: dict[str, np.ndarray]) -> list[tuple[str, int | None]]:
    """Names and layers where something is not finite, in the order of the forward pass."""
    places = []
    for name, values in measured.items():
        for at in np.argwhere(values[..., 0]).tolist():
            places.append((name, at[0] if at else None))
    depth = {"embedding": -1, "head": math.inf}
    return sorted(places, key=lambda place: depth.get(_part(place[0]), place[1]))


def _of(layer: int | None) -> str:
    return "" if layer is None else f" in layer {layer}"


def _cell(value: np.ndarray | None, what: str) -> str:
    if value is None:
        return ""
    return f"{int(value[0])} not finite" if value[0] else f"{what} {value[1]:.3e}"
