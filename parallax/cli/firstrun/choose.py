"""Which config a first run takes: the largest that the plan says fits."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from parallax.analysis.devices import device_memory
from parallax.analysis.memory import Memory, predicted_memory
from parallax.analysis.trace import abstract_mesh
from parallax.cli.command import CONFIGS, read_command
from parallax.config.settings import Settings
from parallax.data.vocabulary import with_likely_vocab
from parallax.runtime.errors import ParallaxError
from parallax.runtime.units import in_bytes
from parallax.sharding.mesh import resolve_sizes
from parallax.training.step import model_of

ALL_ALONG_DP = "--config.mesh.dp=-1"
# By platform, the largest first: a config, and what is changed of it.
CANDIDATES = {
    "gpu": [("gpu_80gb_x8",), ("gpu_80gb", ALL_ALONG_DP), ("gpu_24gb_x8",), ("gpu_24gb", ALL_ALONG_DP)],
    "tpu": [
        ("llama2_7b_64", ALL_ALONG_DP),
        ("llama_1b_16", ALL_ALONG_DP),
        ("llama_1b_16", ALL_ALONG_DP, "--config.pipeline.microbatches=8"),
        ("gpu_24gb", ALL_ALONG_DP, "--config.model.kernel=splash"),
    ],
    "cpu": [],
}
SMALLEST = "tiny_gqa"
ROOM = 0.7  # of a device's memory: JAX takes three quarters of a GPU's, and compilers more than a program's peak


def choose(rest: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """The flags of the config to take on the devices that are here; `rest` are what the user changes of it."""
    room = device_memory()
    for name, *changes in CANDIDATES.get(jax.devices()[0].platform, []):
        words = [f"--config={CONFIGS / name}.py", *changes]
        try:
            needed = planned_memory(placed(read_command([__name__, *words, *rest], {})[0])).peak
        except ParallaxError as error:
            say(f"{name} is passed over: {error}")
            continue
        if room is None or needed <= ROOM * room:
            return words
        say(f"{name} is passed over: it needs {in_bytes(needed)} on each device, which has {in_bytes(room)}")
    return [f"--config={CONFIGS / SMALLEST}.py", f"--config.data.global_batch={4 * jax.device_count()}"]


def placed(settings: Settings) -> Settings:
    """The settings on the devices that are here: every mesh axis and the vocab a number."""
    sizes = resolve_sizes(settings.mesh, jax.device_count())
    return with_likely_vocab(dataclasses.replace(settings, mesh=dataclasses.replace(settings.mesh, **sizes)))


def planned_memory(settings: Settings) -> Memory:
    """Bytes on each device by component, of settings that were placed; ParallaxError where they do not fit the mesh."""
    model = model_of(settings, abstract_mesh(settings.mesh.sizes, simulated=jax.default_backend() == "cpu"))
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return predicted_memory(model, settings)
