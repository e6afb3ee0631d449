"""Whether a model on a mesh is the model on one device: its loss and each gradient, compared."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from parallax.config.sections import ALL_AXES
from parallax.config.settings import NO_CODE, Settings, check_settings, read_settings, with_code
from parallax.data import as_batch
from parallax.display.tables import text_table
from parallax.errors import ConfigError
from parallax.sharding.layout import named_leaves
from parallax.sharding.mesh import make_mesh
from parallax.step.resolve import resolve
from parallax.step.step import model_of

# Rounding in float32, whose sums have another order on a mesh: of the loss, and of the largest entry of a gradient.
LOSS_LIMIT, GRADIENT_LIMIT = 1e-6, 1e-5
SHOWN_GRADIENTS = 8  # gradients of a table, those that differ most
DOCUMENTS = 2  # in a row, about


@dataclasses.dataclass(frozen=True, repr=False)
class Parity:
    """Differences of a model on a mesh from the same on one device: of the loss, relative, and by parameter the largest
    of its gradient's entries, over its largest entry."""

    mesh: Mapping[str, int]
    loss: float
    gradients: Mapping[str, float]

    @property
    def is_equal(self) -> bool:
        """Whether they are equal up to rounding in float32."""
        return self.loss <= LOSS_LIMIT and all(error <= GRADIENT_LIMIT for error in self.gradients.values())

    def __repr__(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        largest = sorted(self.gradients.items(), key=lambda pair: -pair[1])
        rows = [["loss", f"{self.loss:.1e}", f"{LOSS_LIMIT:.0e}"]]
        shown = [(f"gradient of {name}", error) for name, error in largest[:SHOWN_GRADIENTS]]
        if rest := largest[SHOWN_GRADIENTS:]:
            shown.append((f"{len(rest)} more gradients", rest[0][1]))
        rows += [[name, f"{error:.1e}", f"{GRADIENT_LIMIT:.0e}"] for name, error in shown]
        is_same = "the same as on one device" if self.is_equal else "NOT the same as on one device"
        return "\n".join([f"{mesh}: {is_same}", *text_table(["", "difference", "limit"], rows, left=1)])


def parity(settings: Settings, mesh: Any = None, *, code: Mapping[str, Any] = NO_CODE) -> Parity:
    """Compare a model on a mesh with the same on one device, on a batch of random tokens of the settings' size.

    Without a mesh, on that of the settings, over all devices that are here. `code` is that of `px.model_of`. Both
    compute without dropout. A small model and batch are enough: layers that are the same on a mesh are so in any size.

    Raises ConfigError if the model does not compute in float32, or does not fit the mesh.
    """
    check_settings(settings)
    settings = resolve(with_code(settings, code))
    dtypes = {"model.dtype": settings.model.dtype, "pipeline.grads_dtype": settings.pipeline.grads_dtype}
    for key, dtype in dtypes.items():
        if dtype != "float32":
            raise ConfigError(f"{key}={dtype!r} rounds more than a mesh differs; use {key}='float32'.")
    model = model_of(settings, mesh)
    on_one = read_settings(
        settings,
        mesh={**dict.fromkeys(ALL_AXES, 1), "simulate": 0},
        pipeline={"schedule": "gpipe", "virtual": 1},
        layout={"exchange": "gather"},
        model={"kernel": model.config.kernel},
    )
    model_alone = model_of(on_one, make_mesh(on_one.mesh, list(model.mesh.devices.flat)[:1]))
    rows, seq, entries = settings.data.global_batch, settings.data.seq, settings.model.vocab
    model.check_batch(rows, seq)
    random = np.random.default_rng(settings.train.seed)
    ids = np.where(random.random((rows, seq + 1)) < DOCUMENTS / seq, 0, random.integers(1, entries, (rows, seq + 1)))
    results = []
    for each in (model_alone, model):
        metrics, gradients, *_ = jax.jit(each.loss_and_grad)(each.init(settings.train.seed), as_batch(ids, end=0))
        results.append(jax.device_get((metrics["loss"], named_leaves(gradients))))
    (loss_alone, expected), (loss, actual) = results
    return Parity(
        mesh=model.axis_sizes,
        loss=abs(float(loss) / float(loss_alone) - 1),
        gradients={name: _difference(actual[name], leaf) for name, leaf in expected.items() if leaf.size},
    )


def _difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, over the largest entry; inf where one of them is not a number."""
    largest, difference = np.abs(expected).max(), np.abs(actual - expected).max()
    if not np.isfinite(difference):
        return np.inf
    return float(difference / largest) if largest else float(difference and np.inf)
