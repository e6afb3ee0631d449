"""A trained run, loaded from its folder onto any mesh: settings, metrics, parameters and tokenizer."""

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np

from parallax.checkpoint.restore import restore, restore_newest
from parallax.checkpoint.steps import complete_steps
from parallax.config.sections import ALL_AXES, INFERRED, MeshConfig
from parallax.config.settings import (
    NO_CODE,
    OF_DATA,
    Settings,
    load_saved,
    load_settings,
    read_settings,
    tell_saved,
    with_code,
)
from parallax.data import MixedReader, Reader, as_batch
from parallax.data.tokenizer import TOKENIZER_FILE, Tokenizer
from parallax.display.html import facts_html
from parallax.display.progress import clear_progress, waiting
from parallax.display.svg import svg
from parallax.errors import CheckpointError, ConfigError, DataError, nearest, tell
from parallax.hardware.devices import simulate_devices, start_devices
from parallax.inference.ends import ends_of_step
from parallax.inference.generate import complete, encode
from parallax.pipeline import ShardedModel
from parallax.processes.compile_cache import use_compile_cache
from parallax.processes.job import connect_devices, several
from parallax.sharding.mesh import make_mesh
from parallax.step.batches import open_by_source, open_split
from parallax.step.resolve import for_inference, tokenizer_of_step
from parallax.step.step import model_of
from parallax.storage.run_files import RunFiles, number_of, read_metrics

MESH_KEYS = (*ALL_AXES, "simulate")  # keys of a run's mesh that a command may change
LARGEST_DRAWN = 1e99
LAST_VALUES = {"train": "train/loss", "eval": "eval/loss", "speed": "perf/tokens_per_second"}


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Run:
    """A run at one of its checkpoints; `model` and `params` are on the requested mesh."""

    path: Path
    step: int
    settings: Settings
    model: ShardedModel
    params: Any
    tokenizer: Tokenizer
    ends: tuple[int, ...] = ()  # ids at which generation stops

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer of its checkpoint, with the saved checksum."""
        return tokenizer_file(self.path, self.step)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each step: "step", "train/loss", "perf/tokens_per_second", ..."""
        return read_metrics(RunFiles(self.path).metrics)

    @property
    def numbers(self) -> list[str]:
        """Names of the metrics in metrics.jsonl."""
        numbers = {key for row in self.metrics for key, value in row.items() if number_of(value) is not None}
        return sorted(numbers - {"step"})

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one metric, where it was measured; ConfigError lists the known names.

        "train/loss" and "eval/loss" are in nats per token; units of "perf/..." are in their names.
        """
        if name not in self.numbers:
            raise ConfigError(f"{self.path} has no number {name!r}; {nearest(name, self.numbers)}")
        pairs = ((row["step"], number_of(row.get(name))) for row in self.metrics)
        steps, values = zip(*(pair for pair in pairs if pair[1] is not None))
        return np.array(steps), np.array(values, float)

    def generate(self, prompt: str | Sequence[str], *, stop: str | Sequence[str] = (), **keys: Any) -> str | list[str]:
        """The prompt and the generated text; a list of them for several prompts, which are generated together.

        The text ends where the model says, before the first of the texts `stop`, or after `tokens`. `keys` are those of
        the config's section `sample`; missing ones are those of the run: tokens, temperature (0 is greedy), top_k,
        top_p, seed, special_tokens.
        """
        sample = read_settings(self.settings, sample=keys).sample
        alone = isinstance(prompt, str)
        prompts = [prompt] if alone else prompt
        prompts = [encode(self.tokenizer, text, special_tokens=sample.special_tokens) for text in prompts]
        stop = [stop] if isinstance(stop, str) else stop
        texts = complete(self.model, self.params, self.tokenizer, prompts, sample, ends=self.ends, stop=stop)
        return texts[0] if alone else texts

    def batch_of(self, text: str) -> dict[str, np.ndarray]:
        """A text as a batch of one row: the arrays that `capture_activations` and the model's loss read."""
        ids = encode(self.tokenizer, text, special_tokens=self.settings.sample.special_tokens, name="text")
        if len(ids) < 2:
            raise ConfigError(f"{text!r} is {len(ids)} token, which has no next one; use two or more")
        return as_batch(ids[None])  # one document, also where the id of an end begins it

    def batch(self, index: int = 0, *, split: str = "eval") -> dict[str, np.ndarray]:
        """A global batch of the run's data, int32 [global_batch, seq] each: tokens, labels, segments, positions. The
        held-out text of a mixture's sources is read in turn."""
        if split not in self._readers:
            self._readers[split] = [*self._opened(split)]
        readers = self._readers[split]
        return readers[index % len(readers)].batch(index // len(readers))

    def _opened(self, split: str) -> Iterable[Reader | MixedReader]:
        run = RunFiles(self.path)
        if split == "train":
            return [open_split(self.settings, run, split)]
        return open_by_source(self.settings, run, split).values()

    @cached_property
    def _readers(self) -> dict[str, list[Reader | MixedReader]]:
        """Its opened splits; before the first, a line on stderr names the files that its config has read."""
        config = RunFiles(self.path).config
        tell_saved(config, *load_saved(config), OF_DATA)
        return {}

    def __repr__(self) -> str:
        return "\n".join(f"{name:6} {value}" for name, value in self._facts())

    def _repr_html_(self) -> str:
        return facts_html((name, escape(value)) for name, value in self._facts()) + self.loss_curve()

    def _facts(self) -> list[tuple[str, str]]:
        model, data = self.settings.model, self.settings.data

        def sizes(axes: Mapping[str, int]) -> str:
            return " ".join(f"{axis}={size}" for axis, size in axes.items())

        trained_on = sizes(self.settings.mesh.sizes)
        heads = " and ".join(map(str, sorted({block.heads for block in model.blocks.values()})))
        kind = f"{model.layers} layers, d_model {model.d_model}, {heads} heads, {model.attention}"
        source = ", ".join(part.name for part in data.parts) or data.source
        padded = f", padded to {model.padded_vocab}" if model.padded_vocab > model.vocab else ""
        measured = {label: name for label, name in LAST_VALUES.items() if name in self.numbers}
        ends = {label: (name, *(values[-1] for values in self.curve(name))) for label, name in measured.items()}
        return [
            ("run", f"{self.path}, step {self.step} of {self.settings.train.steps}"),
            ("model", f"{kind}, vocab {model.vocab}{padded}"),
            ("mesh", f"{sizes(self.model.axis_sizes)} (trained on {trained_on})"),
            ("data", f"{source}, {data.global_batch} x {data.seq} tokens a step, tokenizer {self.tokenizer.name}"),
            *((label, f"{name} {_number(value)} at step {step}") for label, (name, step, value) in ends.items()),
        ]

    def loss_curve(self) -> str:
        """The training loss as a small picture, without non-finite values and outliers."""
        losses = self.curve("train/loss")[1] if "train/loss" in self.numbers else np.zeros(0)
        losses = losses[np.abs(losses) < LARGEST_DRAWN]
        return svg(lambda axes: axes.plot(losses), 240, 60) if len(losses) else ""


def load(
    workdir: Path | str,
    *,
    step: int | None = None,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    tp: int = 1,
    code: Mapping[str, Any] = NO_CODE,
) -> Run:
    """Open the folder of a run: the checkpoint of `step`, or the newest intact one, on a mesh of these axes.

    The mesh may differ from that of training; by default it is one device. Raises CheckpointError if the folder has no
    such checkpoint, ConfigError if the mesh does not fit the devices or the model. A run's config imports no code: if
    its model has some, give it as `code`, as {"model.mlp": SquaredMLP}, where the values are classes, functions or the
    texts of a config.
    """
    path = RunFiles(workdir).path
    mesh = MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0, cp=cp, ep=ep)
    return load_trained(path, with_code(load_settings(path), code), mesh, step, "pp, dp, cp, ep and tp")


def tokenizer_file(workdir: Path, step: int) -> Path:
    """The tokenizer of a run's checkpoint, beside which its chat template is."""
    return workdir / "checkpoints" / str(step) / TOKENIZER_FILE


def load_trained(workdir: Path, settings: Settings, mesh: MeshConfig, step: int | None, choose: str) -> Run:
    """A run at a step (None: the newest intact one); `choose` names the flags that choose a mesh, for errors.

    Raises:
        ConfigError: the mesh does not fit the devices or the model.
        CheckpointError: there is no such step, or it is damaged.
        DataError: the tokenizer does not fit the model.
    """
    checkpoints = workdir / "checkpoints"
    if not complete_steps(checkpoints):
        raise CheckpointError(f"{workdir} has no checkpoint yet; it is saved by checkpoint.every_steps, or at the end")
    with waiting("building the model"):
        model = build_on(settings, mesh, choose)
    with waiting("restoring the parameters"):
        step, params = restore_params(checkpoints, step, model)
    folder = checkpoints / str(step)
    tokenizer, vocab = tokenizer_of_step(checkpoints, step), model.config.vocab
    if tokenizer.needed > vocab:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.needed} entries, but model.vocab={vocab}; "
            "import the model with its own tokenizer.json"
        )
    return Run(workdir, step, settings, model, params, tokenizer, ends_of_step(tokenizer, vocab, folder))


def build_on(settings: Settings, mesh: MeshConfig, choose: str) -> ShardedModel:
    """A run's model on another mesh than that of training."""
    if mesh.simulate and not several():
        simulate_devices(mesh.simulate)
    devices = start_devices()
    use_compile_cache(settings.train.compile_cache)
    sizes = mesh.sizes.values()
    if INFERRED not in sizes and not mesh.simulate and not several() and math.prod(sizes) < len(devices):
        devices = devices[: math.prod(sizes)]  # inference need not use the whole machine
    try:
        laid_out = make_mesh(mesh, devices)
    except ConfigError as error:
        raise ConfigError(f"{error}; choose with {choose}") from error
    connect_devices(laid_out)
    return model_of(for_inference(settings), laid_out)


def mesh_config(saved: MeshConfig, given: dict[str, int]) -> MeshConfig:
    """The run's mesh with the given axes changed, and as many simulated devices as it needs.

    >>> mesh_config(MeshConfig(pp=2, dp=2, tp=2, simulate=8), {"pp": 1, "dp": 1}).simulate
    2
    """
    mesh = dataclasses.replace(saved, **given)
    sizes = mesh.sizes.values()
    if saved.simulate and "simulate" not in given and INFERRED not in sizes:
        mesh = dataclasses.replace(mesh, simulate=math.prod(sizes))
    return mesh


def sizes_of(model: ShardedModel) -> str:
    """A model's mesh, as "pp1·dp2·tp4"."""
    return "·".join(f"{axis}{size}" for axis, size in model.axis_sizes.items())


def restore_params(checkpoints: Path, step: int | None, model: ShardedModel) -> tuple[int, Any]:
    """The step (None: the newest intact one) and its parameters on the model's mesh."""

    def on_mesh(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    wanted = {"params": jax.tree.map(on_mesh, model.shapes, model.shardings)}
    if step is not None:
        return step, restore(checkpoints, step, wanted)["params"]
    restored = restore_newest(checkpoints, wanted)
    for error in restored.damaged:
        clear_progress()
        instead = f"going on with step {restored.step}"
        tell(f"the checkpoint of step {error.step} is damaged: {error.damage}; {instead}", sys.stderr)
    return restored.step, restored.trees["params"]


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
