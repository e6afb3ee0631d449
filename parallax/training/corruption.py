"""Detects silent data corruption: runs a step twice and compares the results, and compares replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from parallax.checkpoint.arrays import flatten
from parallax.checkpoint.fingerprint import fingerprint
from parallax.errors import EXIT_NUMBERS, ParallaxError, first_few
from parallax.sharding.collectives import as_varying
from parallax.sharding.host import is_on_host, to_device
from parallax.step.step import TrainState, in_their_memory

NamedBits = dict[str, np.ndarray]  # by name of an array: uint32 for each device's piece, with a dim for each mesh axis


class CorruptionError(ParallaxError):
    """A step that was run twice gave different bits, or copies of an array differ."""

    exit_status = EXIT_NUMBERS


class SilentCorruptionCheck:
    """Runs a step twice and compares; `shardings` are those of the state. Between the two runs the state is in host
    memory, a copy for each device, so devices need no more memory than for one step."""

    def __init__(self, shardings: TrainState):
        self._shardings, self._mesh = flatten(shardings), shardings.step.mesh

        def local(state):
            pieces = [as_varying(_fingerprint(leaf)) for leaf in jax.tree.leaves(in_their_memory(state, shardings))]
            return jnp.stack(pieces)[(None,) * self._mesh.devices.ndim]

        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
        mapped = jax.shard_map(
            local, mesh=self._mesh, in_specs=(specs,), out_specs=P(*self._mesh.axis_names), check_vma=True
        )
        self._measure = jax.jit(mapped, out_shardings=NamedSharding(self._mesh, P()))

    def take(self, train_step: Callable, state: TrainState, batch: Any, step: int) -> tuple[TrainState, dict]:
        """The result of `train_step`; CorruptionError if the two runs or the copies differ."""
        held = jax.tree.map(_held_by_hosts, state)
        after, metrics = train_step(state, batch)
        first = self.bits(after) | _bits_of(metrics)
        del after, state
        state, metrics = train_step(jax.tree.map(lambda give_back: give_back(), held), batch)
        second = self.bits(state) | _bits_of(metrics)
        differ = {name: first[name] != second[name] for name in first}
        self._check(differ, f"step {step}, taken twice, gave different bits: {{}}")
        self.compare_copies(second, step)
        return state, metrics

    def bits(self, state: TrainState) -> NamedBits:
        """A fingerprint of each device's piece of each array; every process gets all fingerprints."""
        table = np.asarray(self._measure(state))
        return {name: table[..., column] for column, name in enumerate(self._shardings)}

    def compare_copies(self, bits: NamedBits, step: int) -> None:
        """Raise CorruptionError if devices hold different bits of the same piece of an array."""
        differ = {}
        for name, sharding in self._shardings.items():
            used = jax.tree.leaves(tuple(sharding.spec))
            copies = tuple(dim for dim, axis in enumerate(self._mesh.axis_names) if axis not in used)
            # The median is the value of the majority.
            differ[name] = bits[name] != np.quantile(bits[name], 0.5, axis=copies, method="lower", keepdims=True)
        self._check(differ, f"after step {step} copies of an array are not the same: {{}} differ from the others")

    def _check(self, differ: NamedBits, message: str) -> None:
        """Raise CorruptionError if anything differs; the message names arrays and devices."""
        wrong = {name: np.argwhere(where) for name, where in differ.items() if where.any()}
        if wrong:
            raise CorruptionError(
                f"{message.format(self._text(wrong))}; the hardware may be faulty: nothing was saved; go on from the "
                "last checkpoint, without that machine"
            )

    def _text(self, wrong: dict[str, np.ndarray]) -> str:
        shown = []
        for name, places in wrong.items():
            devices = first_few([self._device(place) for place in places.tolist() if place])
            shown.append(f"{name} on {devices}" if devices else name)
        return first_few(shown)

    def _device(self, place: list[int]) -> str:
        device = self._mesh.devices[tuple(place)]
        where = ", ".join(f"{axis}={rank}" for axis, rank in zip(self._mesh.axis_names, place))
        return f"device {device.id} of process {device.process_index} ({where})"


def _bits_of(metrics: dict[str, Array]) -> NamedBits:
    """The bits of each metric, combined for arrays; metrics are the same on all devices, so none is named."""
    return {f"metric {name}": np.array(np.asarray(value).tobytes()) for name, value in metrics.items()}


def _held_by_hosts(array: Array) -> Callable[[], Array]:
    """Copy each device's piece to host memory; the returned function copies it back to the devices."""
    # A copy, since on CPU a view of the device's buffer would change when the step writes to it.
    pieces = [(np.array(shard.data), shard.device) for shard in array.addressable_shards]
    shape, sharding = array.shape, array.sharding

    def put_back() -> Array:
        kind = sharding.memory_kind
        on_devices = [jax.device_put(piece, SingleDeviceSharding(to, memory_kind=kind)) for piece, to in pieces]
        return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)

    return put_back


def _fingerprint(x: Array) -> Array:
    """The fingerprint of an array; one in host memory is read row by row, so that only one row is on the device."""
    if not is_on_host(x):
        return fingerprint(x)

    def fingerprint_of_row(row: Array) -> Array:
        return fingerprint(to_device(lax.dynamic_slice_in_dim(x, row, 1)))

    marks = lax.map(fingerprint_of_row, jnp.arange(len(x)))
    return fingerprint(marks)
