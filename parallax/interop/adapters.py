"""Adapters of a run: merged into its weights, or as a folder of Hugging Face's `peft`, in both directions.

Of a product with a kernel whose tensor is `[out, in]`, PEFT has `lora_A` `[r, in]` and `lora_B` `[out, r]`; ours have
the kernel's named dims.
"""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallax.checkpoint.arrays import flatten
from parallax.config.sections import ModelConfig
from parallax.config.settings import Settings, load_json, load_saved, read_settings
from parallax.errors import CheckpointError, ConfigError, quoted
from parallax.interop import export, hf_config, hf_weights
from parallax.interop.export import SavedParams, SavedStep, TensorSource, json_text
from parallax.interop.hf_architectures import ARCHITECTURES
from parallax.interop.hf_weights import FUSED_DOWNS, WeightView
from parallax.interop.huggingface import CONFIG, WEIGHT_DTYPES, read_record
from parallax.interop.merged import Adapter, MergedParams, adapters_of
from parallax.interop.safetensors import Tensor, read_file, write_tensors
from parallax.model.products import KERNEL
from parallax.sharding.plan import ParameterPlan
from parallax.storage import files
from parallax.storage.run_files import RECORD

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Fields that are read, or that say nothing about the results.
PEFT_READ = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_parameters")
PEFT_HARMLESS = [
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "init_lora_weights",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "loftq_config",
    "eva_config",
    "corda_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "runtime_config",
    "qalora_group_size",
]
ADAPTER_KEYS = ("lora_rank", "lora_alpha", "lora_on", "lora_dropout", "lora_base")
NO_ADAPTERS = {key: getattr(ModelConfig, key) for key in ADAPTER_KEYS}


def merge(workdir: Path, new: Path, *, step: int | None) -> int:
    """Make a run at step 0 of a step of a run with adapters (`step` None: the newest), which are added to its weights;
    returns the step.

    Raises:
        DamagedError: a parameter, its config or its tokenizer is damaged.
        CheckpointError: there is no such checkpoint, or `new` cannot be written.
        ConfigError: the run has no adapters.
    """
    source, settings = _with_adapters(workdir, step)
    rows = flatten(export.plan_of(settings).rows)
    params = MergedParams(SavedParams(source), rows, settings.model)
    plain = read_settings(settings, model=NO_ADAPTERS, optimizer={"frozen": ""})
    shapes = export.param_shapes(plain)

    def parts(_: str, here: TensorSource) -> Iterator[tuple[tuple[int, ...], Iterator[np.ndarray]]]:
        for index in _matrices(rows[here.name], here):
            pieces = params.pieces(here.name, index)
            yield index, (piece.astype(shapes[here.name].dtype) for piece in pieces)

    carried = _carried(source) | {CONFIG: json_text(plain.to_dict())}
    export.make_run(new, plain, source.tokenizer, carried, parts, check=params.check)
    return source.number


def _with_adapters(workdir: Path, step: int | None) -> tuple[SavedStep, Settings]:
    source = export.open_step(workdir, step)
    settings = read_settings(load_saved(source.folder / CONFIG)[0])
    if not settings.model.lora_rank:
        raise ConfigError(f"{workdir} has no adapters (model.lora_rank=0); `to-hf` and `export` write it as it is.")
    return source, settings


def _carried(source: SavedStep) -> dict[str, Path | str]:
    names = (*export.CARRIED, *export.CARRIED_IF_THERE, RECORD)
    return {name: source.folder / name for name in names if name in source.files}


def _matrices(row: ParameterPlan, here: TensorSource) -> Iterator[tuple[int, ...]]:
    """The index of each matrix of a tensor of a layer: of each expert, where these are stacked."""
    stacked = row.spec.stacked(row.at_rest) - len(here.index)
    return ((*here.index, *rest) for rest in np.ndindex(*here.shape[:stacked]))


# ---- PEFT


class PeftPair(NamedTuple):
    """One pair of PEFT's tensors: the arrays of ours that they are, the index in these, and the kernel's view."""

    adapter: Adapter
    index: tuple[int, ...]
    view: WeightView
    module: str


def to_peft(workdir: Path, out: Path, *, step: int | None) -> int:
    """Write the adapters of a step of a run (`step` None: the newest) as a folder that `peft` reads; returns the step.

    Raises:
        DamagedError: an adapter, its config or its tokenizer is damaged.
        CheckpointError: there is no such checkpoint, or `out` cannot be written.
        ConfigError: the run has no adapters, or PEFT has none such.
    """
    source, settings = _with_adapters(workdir, step)
    model, params = settings.model, SavedParams(source)
    record = read_record(source)
    content = record["config"] if record else hf_config.write_config(model, settings.data.longest_seq)
    pairs = _pairs(settings, hf_config.read_config(content))
    adapted = {name for pair in pairs for name in pair.adapter}

    def pieces(name: str) -> Iterator[np.ndarray]:
        pair, array = written[name][1:]
        whole = np.concatenate([*params.pieces(array, pair.index)])
        yield _theirs(whole, pair, is_first=array == pair.adapter.a)

    written = {}
    for pair in pairs:
        dtype = params.stored[pair.adapter.a].dtype
        shapes = (model.lora_rank, pair.view.shape[1]), (pair.view.shape[0], model.lora_rank)
        for array, end, shape in zip(pair.adapter, (A, B), shapes):
            written[f"{PREFIX}{pair.module}{end}"] = TensorSource(array, pair.index, shape, dtype), pair, array
    modules = {pair.module for pair in pairs}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": content.get("_name_or_path"),
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": _targets(settings, hf_config.read_config(content), modules),
        "lora_dropout": model.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with export.new_folder(out) as unfinished:
        files.make_folder(unfinished)
        write_tensors(unfinished / PEFT_WEIGHTS, {name: each[0] for name, each in written.items()}, pieces)
        params.check(adapted)
        files.write_file(unfinished / PEFT_CONFIG, json_text(about))
    return source.number


def from_peft(source: Path, base: Path, workdir: Path) -> str:
    """Make a run at step 0 of the newest step of a run, `base`, and the adapters of a folder of `peft`; returns what
    they are.

    Raises:
        ConfigError: the adapters are of a kind that is not supported; names the field.
        CheckpointError: the folder cannot be trusted, or its adapters do not fit the base.
        DamagedError: the base is damaged.
    """
    about, step = load_json(source / PEFT_CONFIG), export.open_step(base, None)
    settings = read_settings(load_saved(step.folder / CONFIG)[0])
    if settings.model.lora_rank:
        raise ConfigError(f"{base} has adapters; merge them first: python -m parallax.convert merge {base} NEW")
    tensors, record = read_file(source, PEFT_WEIGHTS), read_record(step)
    content = record["config"] if record else hf_config.write_config(settings.model, settings.data.longest_seq)
    config = hf_config.read_config(content)
    tensors = _of_each_expert(tensors, settings.model, config.architecture)
    keys = _read_config(about) | {"lora_base": settings.optimizer.weights_dtype}
    everywhere = read_settings(settings, model=keys)
    every, rows = _pairs(everywhere, config, in_own_tensors=False), flatten(export.plan_of(everywhere).rows)
    there = [pair for pair in every if f"{PREFIX}{pair.module}{A}" in tensors]
    if not there:
        raise CheckpointError(f"{source / PEFT_WEIGHTS} has no adapter of a product of {base}")
    words = dict.fromkeys(_module(rows[pair.adapter.a]) for pair in there)
    settings = read_settings(settings, model=keys | {"lora_on": " ".join(words)})
    pairs = _pairs(settings, config)
    rank = settings.model.lora_rank
    wanted = {f"{PREFIX}{pair.module}{A}": (rank, pair.view.shape[1]) for pair in pairs}
    wanted |= {f"{PREFIX}{pair.module}{B}": (pair.view.shape[0], rank) for pair in pairs}
    differences = [
        f"{name} is {list(tensors[name].shape)} there and {list(wanted[name])} here"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name]
    ] + [f"{name} is {tensors[name].dtype}" for name in tensors if tensors[name].dtype not in WEIGHT_DTYPES.values()]
    export.check_tensors(source, tensors, wanted, differences, f"adapters that fit {base}")
    params, shapes = SavedParams(step), export.param_shapes(settings)
    ours = {(name, pair.index): pair for pair in pairs for name in pair.adapter}

    def parts(_: str, here: TensorSource) -> Iterator[tuple[tuple[int, ...], Iterator[np.ndarray]]]:
        dtype = shapes[here.name].dtype
        if here.name in params.stored:
            yield here.index, (piece.astype(dtype) for piece in params.pieces(here.name, here.index))
            return
        for index in _matrices(rows[here.name], here):
            pair, shape = ours[here.name, index], here.shape[len(index) - len(here.index) :]
            is_first = here.name == pair.adapter.a
            whole = tensors[f"{PREFIX}{pair.module}{A if is_first else B}"].whole().astype(np.float32)
            yield index, iter([_ours(whole, pair, shape, is_first=is_first).astype(dtype)])

    carried = _carried(step) | {CONFIG: json_text(settings.to_dict())}
    export.make_run(workdir, settings, step.tokenizer, carried, parts, check=params.check)
    return f"rank {rank}, alpha {settings.model.lora_alpha:g}, on {' '.join(words)}"


def _read_config(about: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model that an adapter_config.json says; ConfigError names a field that is not supported."""
    if about.get("peft_type") != "LORA":
        raise ConfigError(f"{PEFT_CONFIG} has peft_type={quoted(about.get('peft_type'))}; only 'LORA' is read")
    rank, alpha, dropout = about.get("r"), about.get("lora_alpha"), about.get("lora_dropout", 0.0)
    for name, value in (("r", rank), ("lora_alpha", alpha)):
        if not _is_number(value) or not value > 0:
            raise ConfigError(f"{PEFT_CONFIG} has {name}={quoted(value)}, which is not a number above 0")
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise ConfigError(f"{PEFT_CONFIG} has lora_dropout={quoted(dropout)}, which is not a number from 0 to below 1")
    others = [name for name in about.get("target_parameters") or [] if _last_name(str(name)) != _last_name(FUSED_DOWNS)]
    if others:
        raise ConfigError(
            f"{PEFT_CONFIG} has target_parameters={quoted(others)}; only {FUSED_DOWNS!r} is read: PEFT has one adapter "
            "of an expert's gate and up, whose first matrix is of both, and ours have one each."
        )
    for name, value in about.items():
        if name not in (*PEFT_READ, *PEFT_HARMLESS) and value and (name, value) != ("bias", "none"):
            raise ConfigError(f"{PEFT_CONFIG} has {name}={quoted(value)}, which is not supported")
    # Of rank-stabilized adapters the factor is alpha / sqrt(r).
    scaled = alpha * math.sqrt(rank) if about.get("use_rslora") else alpha
    return {"lora_rank": rank, "lora_alpha": float(scaled), "lora_dropout": float(dropout)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ExpertColumns(NamedTuple):
    """The columns of an expert in a tensor [out, r of all experts], where those of one follow those of another."""

    tensor: Tensor
    expert: int
    experts: int

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[0], self.tensor.shape[1] // self.experts

    def whole(self) -> np.ndarray:
        return self.tensor.whole()[:, self.expert :: self.experts]


def _of_each_expert(
    tensors: Mapping[str, Tensor], model: ModelConfig, architecture: str
) -> dict[str, Tensor | ExpertColumns]:
    """Tensors by name, with those of all down-projections of a layer, as PEFT has them, divided by experts."""
    kind, single = ARCHITECTURES[architecture], dict(tensors)
    down = kind.tensor("mlp.experts.down") if kind.mixture else ""
    for layer, base in enumerate(model.layer_bases):
        every = f"{PREFIX}{kind.tensor('').format(layer=layer)}.{FUSED_DOWNS.rpartition('.')[0]}"
        names = [f"{PREFIX}{down.format(layer=layer, expert=expert)}" for expert in range(model.experts)]
        shapes = [tensors[every + end].shape for end in (A, B) if every + end in tensors]
        ranks = [shape[place] for place, shape in enumerate(shapes) if len(shape) == 2]
        if base != "moe" or len(ranks) != 2 or any(rank % model.experts for rank in ranks):
            continue
        first, last = single.pop(every + A), single.pop(every + B)
        single |= {name + A: part for name, part in zip(names, first.matrices(model.experts))}
        single |= {name + B: ExpertColumns(last, expert, model.experts) for expert, name in enumerate(names)}
    return single


def _pairs(settings: Settings, config: hf_config.HfConfig, *, in_own_tensors: bool = True) -> list[PeftPair]:
    """PEFT's pairs of a model with adapters, layer by layer. With `in_own_tensors`, ConfigError if several of ours are
    one of theirs."""
    model = settings.model
    views = hf_weights.weight_views(model, config.architecture, interleaved=config.interleaved)
    adapters, tensors = adapters_of(flatten(export.plan_of(settings).rows)), collections.Counter()
    for view in filter(None, views.values()):
        tensors[view.tensor] += 1
    plain = export.plain_names(export.param_shapes(settings), model.layer_kinds).values()
    of_layer = f"{ARCHITECTURES[config.architecture].tensor('')}."
    pairs = []
    for here in plain:
        view = views.get(here.name)
        if here.name not in adapters or view is None:
            continue
        if tensors[view.tensor] > 1:
            if in_own_tensors:
                raise ConfigError(
                    f"PEFT has one adapter for {view.tensor.removeprefix(of_layer)}, of which {here.name} is a "
                    "part, with an adapter of its own; use `to-hf`, which merges them, or model.lora_on without it."
                )
            continue
        if len(view.shape) > 2:
            if in_own_tensors:
                raise ConfigError(
                    f"PEFT has no adapters of single experts for {view.tensor.removeprefix(of_layer)}, which "
                    "has all experts of a layer; use `to-hf`, which merges them, or model.lora_on without it."
                )
            continue
        pairs += [
            PeftPair(adapters[here.name], index, view, name.removesuffix(".weight"))
            for index, name in view.tensors(here)
        ]
    return pairs


def _targets(settings: Settings, config: hf_config.HfConfig, modules: set[str]) -> list[str]:
    """PEFT's target_modules: last names if these are enough, or else whole names."""
    every = settings.model
    views = hf_weights.weight_views(every, config.architecture, interleaved=config.interleaved)
    plain = export.plain_names(export.param_shapes(settings), every.layer_kinds).values()
    of_views = ((view, here) for here in plain if (view := views.get(here.name)))
    others = {name.removesuffix(".weight") for view, here in of_views for _, name in view.tensors(here)} - modules
    last = set(map(_last_name, modules))
    return sorted(modules if last & set(map(_last_name, others)) else last)


def _last_name(module: str) -> str:
    """The last of the names in a module's path."""
    return module.rpartition(".")[2]


def _module(row: ParameterPlan) -> str:
    """The word of model.lora_on for an adapter."""
    return row.scope if row.spec.adapts == KERNEL else f"{row.scope}/{row.spec.adapts}"


def _theirs(array: np.ndarray, pair: PeftPair, *, is_first: bool) -> np.ndarray:
    """PEFT's tensor of one of ours."""
    if is_first:
        return array.reshape(-1, array.shape[-1]).T
    if pair.view.order is not None:
        ordered = np.empty_like(array)
        ordered[..., pair.view.order] = array
        array = ordered
    return array.reshape(len(array), -1).T


def _ours(tensor: np.ndarray, pair: PeftPair, shape: Sequence[int], *, is_first: bool) -> np.ndarray:
    """Our array of this shape of one of PEFT's tensors."""
    array = tensor.T.reshape(shape)
    return array if is_first or pair.view.order is None else array[..., pair.view.order]
