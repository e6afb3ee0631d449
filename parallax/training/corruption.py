"""Finds silent data corruption: a step is taken twice and compared, and replicas with each other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.checkpoint.arrays import flatten
from parallax.checkpoint.fingerprint import fingerprint
from parallax.runtime.errors import EXIT_NUMBERS, ParallaxError
from parallax.sharding.collectives import as_varying
from parallax.training.step import TrainState

SHOWN = 4
NamedBits = dict[str, np.ndarray]  # by name of an array, uint32, a dim for each axis: of each device's piece
ADVICE = "the hardware may be faulty: nothing was saved; go on from the last checkpoint, without that machine"


class CorruptionError(ParallaxError):
    """A step, taken twice, gave different bits, or copies of an array are not the same."""

    exit_status = EXIT_NUMBERS


@dataclass
class SilentCorruptionCheck:
    """`shardings` are those of a state. Between the two times the state waits in the hosts' memory, each device's copy
    by itself; the devices need no more than for one step."""

    shardings: TrainState

    def take(self, train_step: Callable, state: TrainState, batch: Any, step: int) -> tuple[TrainState, dict]:
        """What `train_step` returns; CorruptionError if the hardware is not to be trusted."""
        held = jax.tree.map(_hold, state)
        after, metrics = train_step(state, batch)
        first = self.bits(after) | _bits_of(metrics)
        del after, state
        state = jax.tree.map(_give_back, held, self.shardings, is_leaf=lambda leaf: isinstance(leaf, HostCopy))
        state, metrics = train_step(state, batch)
        second = self.bits(state) | _bits_of(metrics)
        self._compare(first, second, step)
        self.compare_copies(second, step)
        return state, metrics

    def bits(self, state: TrainState) -> NamedBits:
        """A fingerprint of what each device holds of each array; every process gets all of them."""
        table = np.asarray(self._measure(state))
        return {name: table[..., at] for at, name in enumerate(self._names)}

    def compare_copies(self, found: NamedBits, step: int) -> None:
        """Raise CorruptionError where devices hold the same piece of an array, but not the same bits."""
        wrong = {}
        for name, sharding in zip(self._names, jax.tree.leaves(self.shardings), strict=True):
            axes = tuple(at for at, axis in enumerate(self._mesh.axis_names) if axis not in _used(sharding.spec))
            usual = _most_frequent(found[name], axes)
            if (found[name] != usual).any():
                wrong[name] = np.argwhere(found[name] != usual)
        if wrong:
            raise CorruptionError(
                f"after step {step} copies of an array are not the same: {self._text(wrong)} differ from the others; "
                f"{ADVICE}"
            )

    def _compare(self, first: NamedBits, second: NamedBits, step: int) -> None:
        pairs = ((name, first[name] != second[name]) for name in first)
        wrong = {name: np.argwhere(differ) for name, differ in pairs if differ.any()}
        if wrong:
            raise CorruptionError(f"step {step}, taken twice, gave different bits: {self._text(wrong)}; {ADVICE}")

    @cached_property
    def _names(self) -> list[str]:
        return list(flatten(self.shardings))

    @cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        return self.shardings.step.mesh

    @cached_property
    def _measure(self) -> Callable[[TrainState], Array]:
        def local(state):
            pieces = [as_varying(fingerprint(leaf)) for leaf in jax.tree.leaves(state)]
            return jnp.stack(pieces)[(None,) * self._mesh.devices.ndim]

        specs = jax.tree.map(lambda sharding: sharding.spec, self.shardings)
        mapped = jax.shard_map(
            local, mesh=self._mesh, in_specs=(specs,), out_specs=P(*self._mesh.axis_names), check_vma=True
        )
        return jax.jit(mapped, out_shardings=NamedSharding(self._mesh, P()))

    def _text(self, wrong: dict[str, np.ndarray]) -> str:
        shown = []
        for name, places in list(wrong.items())[:SHOWN]:
            devices = ", ".join(self._device(place) for place in places[:SHOWN].tolist() if place)
            more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
            shown.append(f"{name} on {devices}{more}" if places.size else name)
        left = len(wrong) - SHOWN
        return "; ".join(shown) + (f"; and {left} more arrays" if left > 0 else "")

    def _device(self, place: list[int]) -> str:
        device = self._mesh.devices[tuple(place)]
        where = ", ".join(f"{axis}={rank}" for axis, rank in zip(self._mesh.axis_names, place))
        return f"device {device.id} of process {device.process_index} ({where})"


@dataclass(frozen=True)
class HostCopy:
    """An array's pieces in the memory of this host, each device's own."""

    shape: tuple[int, ...]
    pieces: list[tuple[jax.Device, np.ndarray]]


def _bits_of(metrics: dict[str, Array]) -> NamedBits:
    return {f"metric {name}": np.asarray(value).view(np.uint32) for name, value in metrics.items()}


def _hold(array: Array) -> HostCopy:
    # Copied: on CPU a view of the device's buffer would see what the step writes there.
    return HostCopy(array.shape, [(shard.device, np.array(shard.data)) for shard in array.addressable_shards])


def _give_back(copy: HostCopy, sharding: NamedSharding) -> Array:
    pieces = [jax.device_put(piece, device) for device, piece in copy.pieces]
    return jax.make_array_from_single_device_arrays(copy.shape, sharding, pieces)


def _used(spec: P) -> set[str]:
    axes = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return {axis for group in axes for axis in group if axis is not None}


def _most_frequent(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Along these axes the value that most of them have, the first of equally frequent ones."""
    if not axes:
        return values
    moved = np.moveaxis(values, axes, range(len(axes)))
    rows = moved.reshape(-1, *moved.shape[len(axes) :])
    counts = (rows[:, None] == rows[None]).sum(1)
    usual = np.take_along_axis(rows, counts.argmax(0)[None], 0)[0]
    return np.moveaxis(np.broadcast_to(usual, moved.shape), range(len(axes)), axes)
