"""Converts between runs and folders of Hugging Face's `transformers`, tensor by tensor."""

import collections
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from parallax.checkpoint.arrays import PIECE_BYTES, flatten
from parallax.config.sections import LONGROPE, ModelConfig
from parallax.config.settings import Settings, load_json, load_saved, read_settings
from parallax.data.chat import ADDITIONAL_TEMPLATES, templates_in
from parallax.data.sentence_pieces import SentencePiece
from parallax.data.special_tokens import PIECES_FILE
from parallax.data.tokenizer import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    Bytes,
    Tokenizer,
    load_tokenizer,
    tokenizer_file_in,
    with_several_templates,
)
from parallax.errors import CheckpointError, ConfigError, DataError, errors_as
from parallax.inference.ends import ends_of_import, ends_of_step, eos_ids
from parallax.interop import export, hf_config, hf_weights
from parallax.interop.export import SavedParams, SavedStep, TensorSource, json_text
from parallax.interop.hf_architectures import ARCHITECTURES
from parallax.interop.hf_config import HfConfig
from parallax.interop.hf_weights import ScaledTensor, Weight, WeightView
from parallax.interop.merged import MergedParams
from parallax.interop.mxfp4 import with_exponents
from parallax.interop.safetensors import INDEX, in_pieces, read_model, write_model
from parallax.sharding.plan import ParameterPlan
from parallax.storage import files
from parallax.storage.run_files import GENERATION_CONFIG, RECORD

CONFIG = "config.json"
# Small texts that users expect in such a folder.
ADDED_TOKENS = "added_tokens.json"
BESIDE = (GENERATION_CONFIG, TOKENIZER_CONFIG, "special_tokens_map.json", ADDED_TOKENS, TEMPLATE_FILE)
BESIDE_LIMIT_BYTES = 1 << 24
# For a model of type qwen2 with its own tokenizer.
NOT_QWENS = "read its tokenizer with PreTrainedTokenizerFast: transformers 5's AutoTokenizer makes Qwen's splits of it"
WEIGHT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
COMPUTE_DTYPES = ("float32", "bfloat16")  # of model.dtype
ROPE_TABLE = ".rotary_emb.inv_freq"  # derived from the config, but stored in old files


# ---- import


def from_hf(source: Path, workdir: Path, settings: Settings, *, dtype: str | None) -> HfConfig:
    """Make a run folder whose step 0 has the model of a folder; `settings` are the run's, except its model.

    The run computes in `dtype`, or if it is None in that of the weights in the folder. Parameters
    have the dtype of optimizer.weights_dtype; bfloat16 and float16 lose no bit in float32.

    Raises:
        ConfigError: the model is not supported; names the field.
        CheckpointError: the folder cannot be trusted, or does not have the parameters of its config.
        DataError: its tokenizer is missing, damaged, or has more entries than the model.
    """
    if not (source / CONFIG).is_file():
        raise CheckpointError(
            f"{source} has no {CONFIG}; name a folder with {CONFIG}, {TOKENIZER_FILE} and "
            f"safetensors, as `hf download NAME --local-dir FOLDER` makes one"
        )
    content, part = hf_config.language_model(load_json(source / CONFIG))
    config = hf_config.read_config(content)
    if part:
        said = (
            f"of a {part.model_type} its language model alone, a {config.architecture}: what reads pictures is left out"
        )
        config = config._replace(part=part, notes=(*config.notes, said))
    # Read like a written config, whose checks limit sizes.
    written = settings.to_dict()
    settings = read_settings(written | {"model": written["model"] | config.model})
    model = settings.model
    file = tokenizer_file_in(source)
    tokenizer = load_tokenizer(file)
    if tokenizer.needed > model.vocab:
        raise DataError(
            f"{file} has {tokenizer.needed} entries besides added tokens, but vocab_size={model.vocab}; it belongs to "
            f"another model: use the {file.name} of the one whose {CONFIG} this is"
        )
    if isinstance(tokenizer, SentencePiece):
        _check_no_more_tokens(source, tokenizer)
    views = hf_weights.weight_views(model, config.architecture, interleaved=config.interleaved)
    tensors, left_out = _tensors_of_model(source, _hf_shapes(settings, views), model, config)
    # Of weights in the form in which they are written back, which is without layers that were left out.
    further = dict.fromkeys(hf_config.FURTHER_LAYERS & content.keys(), 0) if left_out else {}
    record = {
        "config": {k: v for k, v in (content | further).items() if k != "quantization_config" or not v},
        "dtypes": _dtypes_to_write(content, tensors),
        "files": {name: _read_text(source / name) for name in BESIDE if _is_small(source / name)},
    }
    stored = _stored_dtype(record["dtypes"], tensors)
    if dtype or stored in COMPUTE_DTYPES:
        settings = read_settings(settings, model={"dtype": dtype or stored})
    ends = ends_of_import(content, _generation(record["files"], source / GENERATION_CONFIG))
    if (source / ADDITIONAL_TEMPLATES).is_dir():
        tokenizer = with_several_templates(tokenizer, {name: text for name, (text, _) in templates_in(source).items()})
    beside = (TOKENIZER_FILE, TOKENIZER_CONFIG, *([TEMPLATE_FILE] if tokenizer.template else []))
    copied = [name for name in beside if (source / name).is_file()]
    carried = {
        TOKENIZER_FILE: tokenizer.content,
        CONFIG: json_text(settings.to_dict()),
        RECORD: json.dumps(record),
        **({GENERATION_CONFIG: json_text({"eos_token_id": ends})} if ends else {}),
        **{name: source / name for name in copied},
    }
    if tokenizer.config:  # it may name an end that only the model's config.json names
        carried[TOKENIZER_CONFIG] = tokenizer.config
    export.make_run(workdir, settings, tokenizer, carried, lambda _, here: _our_parts(views[here.name], tensors, here))
    notes = _notes(settings, tokenizer, ends, config.context, stored)
    return config._replace(notes=(*config.notes, *notes))


def _check_no_more_tokens(source: Path, tokenizer: SentencePiece) -> None:
    """Raise DataError if files beside a model of SentencePiece add tokens, which it would not make of text."""
    added = files.object_if_readable(source / ADDED_TOKENS).values()
    decoded = files.object_if_readable(source / TOKENIZER_CONFIG, odd_numbers=True).get("added_tokens_decoder")
    numbers = [number for number in added if isinstance(number, int)]
    numbers += [int(key) for key in decoded or {} if key.isdecimal()]
    if beyond := [number for number in numbers if number >= tokenizer.vocab]:
        raise DataError(
            f"{source / PIECES_FILE} has {tokenizer.vocab} pieces, and a file beside it adds token {beyond[0]}; "
            f"write a {TOKENIZER_FILE} with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )


def _notes(
    settings: Settings, tokenizer: Tokenizer, ends: Sequence[int], context: int, stored_dtype: str
) -> Iterator[str]:
    """What the run does with the model that its user should know."""
    model, data = settings.model, settings.data
    yield (
        f"the weights are {stored_dtype}; a run computes in {model.dtype} (model.dtype), with "
        f"{settings.optimizer.weights_dtype} parameters (optimizer.weights_dtype)"
    )
    yield (
        f"it trains on {data.global_batch} windows of {data.longest_seq} tokens in a step "
        f"(data.global_batch, data.seq); the model's context is {context}"
    )
    if model.padded_vocab != model.vocab:
        yield (
            f"vocab_size={model.vocab} is padded to {model.padded_vocab} (model.vocab_multiple="
            f"{model.vocab_multiple}), so that mesh.tp divides it; the padding has no logits, and to-hf leaves it out"
        )
    known = [number for number in ends if 0 <= number < model.vocab]
    if known:
        listed = ", ".join(str(number) for number in dict.fromkeys([*known, tokenizer.end]))
        yield f"a generated text ends at one of the tokens {listed}: eos_token_id, and the end of a document"
    for number in [number for number in ends if number not in known]:
        yield f"eos_token_id={number} ends nothing: vocab_size={model.vocab} has no such token"


def _our_parts(
    view: WeightView | None, tensors: Mapping[str, Weight], here: TensorSource
) -> Iterator[tuple[tuple[int, ...], Iterator[np.ndarray]]]:
    """Index of each tensor in its array, and its rows in the array's dtype, expert by expert."""
    if view is None:
        yield here.index, iter([np.zeros(here.shape, here.dtype)])
        return
    for index, name in view.tensors(here):
        yield index, _our_rows(view, tensors[name], here.shape, here.dtype)


def _our_rows(view: WeightView, weight: Weight, shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray]:
    """Rows of an array in its dtype: from the file if they are the tensor's rows, otherwise from the whole tensor."""
    limit = PIECE_BYTES // 2  # half: bfloat16 becomes float32
    if view.by_rows:
        pieces = map(view.ours, weight.pieces(limit))
    elif view.view:
        pieces = in_pieces(view.ours(weight.whole()), limit)
    else:
        padding = np.broadcast_to(np.float32(0), (shape[0] - view.shape[0], *shape[1:]))  # of the vocab
        pieces = itertools.chain(weight.pieces(limit), in_pieces(padding, limit))
    return (np.ascontiguousarray(view.read(piece), dtype) for piece in pieces)


def _dtypes_to_write(content: Mapping[str, Any], tensors: Mapping[str, Weight]) -> dict[str, str]:
    """The dtype of each tensor; for quantized ones, that of the model in config.json."""
    said = content.get("torch_dtype") or content.get("dtype")
    plain = said if said in tuple(WEIGHT_DTYPES) else "bfloat16"
    return {name: plain if isinstance(weight, ScaledTensor) else str(weight.dtype) for name, weight in tensors.items()}


def _stored_dtype(dtypes: Mapping[str, str], tensors: Mapping[str, Weight]) -> str:
    """The dtype of most entries of the weights."""
    entries: collections.Counter[str] = collections.Counter()
    for name, dtype in dtypes.items():
        entries[dtype] += math.prod(tensors[name].shape)
    return entries.most_common(1)[0][0]


def _hf_shapes(settings: Settings, views: Mapping[str, WeightView | None]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that `transformers` has of a model."""
    plain = export.plain_names(export.param_shapes(settings), settings.model.layer_kinds).values()
    of_view = ((view, here) for here in plain if (view := views[here.name]))
    return {name: view.shape for view, here in of_view for _, name in view.tensors(here)}


def _tensors_of_model(
    source: Path, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, config: HfConfig
) -> tuple[dict[str, Weight], bool]:
    """The tensors of the model, and whether there are more, of layers after it; CheckpointError names those that are
    missing, unknown, or do not fit the config."""
    kind = ARCHITECTURES[config.architecture]
    layers = (model.layers + number for number in range(config.further_layers))
    further = tuple(f"{kind.tensor('').format(layer=layer)}." for layer in layers)
    there = hf_weights.of_language_model(read_model(source), config.part)
    tensors = {
        name: tensor
        for name, tensor in there.items()
        if not name.endswith((ROPE_TABLE, *kind.buffers)) and not name.startswith(further)
    }
    if config.block:
        tensors = hf_weights.with_scales(tensors, config.block)
    if config.mxfp4:
        tensors = with_exponents(tensors)
    of_head, of_table = (f"{kind.tensor(module)}.weight" for module in ("head", "embedding"))
    head, table = tensors.get(of_head), tensors.get(of_table)
    if head and table and of_head not in shapes and _same(head, table):
        del tensors[of_head]  # a tied table that is stored twice
    is_fused = any(name.endswith((hf_weights.FUSED_GATES_AND_UPS, hf_weights.FUSED_DOWNS)) for name in tensors)
    fused = hf_weights.fused_tensors(model, config.architecture) if is_fused else {}
    parts = {part for about in fused.values() for part in about.parts}
    shapes = {name: shape for name, shape in shapes.items() if name not in parts}
    shapes |= {name: about.shape for name, about in fused.items()}
    differences = []
    for name in shapes.keys() & tensors.keys():
        tensor = tensors[name]
        if tensor.shape != shapes[name]:
            differences.append(f"{name} is {list(tensor.shape)} there and {list(shapes[name])} here")
        if tensor.dtype not in WEIGHT_DTYPES.values():
            differences.append(f"{name} is {tensor.dtype}, not one of {', '.join(WEIGHT_DTYPES)}")
    export.check_tensors(source, tensors, shapes, differences)
    return hf_weights.unfused(tensors, fused), any(name.startswith(further) for name in there)


def _same(first: Weight, second: Weight) -> bool:
    """Whether tensors have the same dtype, shape and bytes."""
    pairs = zip(first.pieces(PIECE_BYTES), second.pieces(PIECE_BYTES))
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and all(a.tobytes() == b.tobytes() for a, b in pairs)


def _read_text(path: Path) -> str:
    with errors_as(CheckpointError, f"{path} cannot be read: ", "", UnicodeDecodeError):
        return files.read_bytes(path, BESIDE_LIMIT_BYTES).decode("utf-8")  # line ends as they are


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and (files.size_of(path) or 0) <= BESIDE_LIMIT_BYTES


# ---- export


class HfTensor(NamedTuple):
    """A tensor to write, and the arrays stored in it: name, index and view of each."""

    shape: tuple[int, ...]
    dtype: np.dtype
    arrays: list[tuple[str, tuple[int, ...], WeightView]]


def to_hf(
    workdir: Path, out: Path, *, step: int | None, like: Path | None, dtype: str | None, shard_bytes: int
) -> tuple[int, str]:
    """Write a step of a run (`step` None: the newest) as a folder that `transformers` reads.

    An imported model is written as it was: config.json, names, dtypes, tokenizer. So is a run trained from an import,
    which is recorded in the run or given by `like`, the import's run. Any other model becomes the simplest architecture
    that computes it, in the dtype of its weights. `dtype` takes precedence. Returns the step and a description.

    Raises:
        DamagedError: a parameter, its config or its tokenizer is damaged.
        CheckpointError: there is no such checkpoint, or `out` cannot be written.
        ConfigError: no architecture computes the model, or `like` is another one.
    """
    source = export.open_step(workdir, step)
    settings = read_settings(load_saved(source.folder / CONFIG)[0])
    model, tokenizer, rows = settings.model, source.tokenizer, flatten(export.plan_of(settings).rows)
    record = _record_of(like, tokenizer) if like else read_record(source)
    trained = like is not None or source.number > 0
    differing = hf_config.differing_keys(hf_config.read_config(record["config"]), model) if record else ""
    if differing and like:
        raise ConfigError(f"the model is not the one that was imported: {differing}")
    if record is None or differing:
        record = {"files": {}, "dtypes": {}}
        ends = ends_of_step(tokenizer, model.vocab, source.folder)
        content = hf_config.write_config(model, settings.data.longest_seq) | _special_ids(tokenizer, ends)
        dtype = dtype or settings.optimizer.weights_dtype
        config = hf_config.read_config(content)
    else:
        config = hf_config.read_config(record["config"])
        content = hf_config.with_layers(record["config"], config, model)
        content = _extended(content, config, model, settings.data.longest_seq) if trained else content
    if dtype:
        content = {key: value for key, value in content.items() if key != "dtype"} | {"torch_dtype": dtype}
    # The tokenizer config of a run without an import, but with a foreign tokenizer. The import itself writes one for an
    # end that only config.json named.
    keys = files.object_if_readable(source.folder / TOKENIZER_CONFIG).keys()
    is_foreign = TOKENIZER_CONFIG in source.files and keys != {"eos_token"}
    written = {TOKENIZER_CONFIG: _read_text(source.folder / TOKENIZER_CONFIG)} if is_foreign else {}
    texts = _texts_beside(content, config.context, tokenizer, written | record["files"], trained=trained)
    with export.new_folder(out) as unfinished:
        params = SavedParams(source)
        if model.lora_rank:
            params = MergedParams(params, rows, model)
        tensors = _hf_tensors(params, rows, model, config, lambda name: dtype or record["dtypes"][name])
        index = write_model(
            unfinished, tensors, lambda name: _hf_pieces(params, tensors[name]), shard_bytes=shard_bytes
        )
        params.check()
        if isinstance(tokenizer, SentencePiece):
            files.write_file(unfinished / PIECES_FILE, tokenizer.model)
        else:
            files.copy_file(source.folder / TOKENIZER_FILE, unfinished / TOKENIZER_FILE)
        for name, text in {CONFIG: json_text(content), **texts}.items():
            files.write_file(unfinished / name, text)
        files.write_whole(unfinished / INDEX, index)
    kinds = " and ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
    aside = f", since it is not the imported model: {differing}" if differing else ""
    if "config" not in record and config.architecture == "Qwen2ForCausalLM" and not written:
        aside += f"; {NOT_QWENS}"
    if isinstance(tokenizer, SentencePiece):
        aside += f"; its tokenizer is {PIECES_FILE}, which sentencepiece reads: there is no {TOKENIZER_FILE} of it"
    merged = ", adapters merged" if model.lora_rank else ""
    return source.number, f"{config.architecture}, {kinds}{merged}{aside}"


def _hf_tensors(
    params: SavedParams,
    rows: Mapping[str, ParameterPlan],
    model: ModelConfig,
    config: HfConfig,
    dtype_of: Callable[[str], str],
) -> dict[str, HfTensor]:
    """The tensors of the architecture, by name. Arrays that it does not have are read."""
    views, tensors = hf_weights.weight_views(model, config.architecture, interleaved=config.interleaved), {}
    for here in export.plain_names(params.stored, model.layer_kinds).values():
        if rows[here.name].spec.is_maximum:
            collections.deque(params.pieces(here.name, here.index), maxlen=0)  # `check` requires that all are read
        elif (view := views[here.name]) is None:
            _check_zeros(params, here, config.architecture)
        else:
            for index, name in view.tensors(here):
                tensors.setdefault(name, HfTensor(view.shape, WEIGHT_DTYPES[dtype_of(name)], []))
                tensors[name].arrays.append((here.name, index, view))
    return tensors


def _check_zeros(params: SavedParams, here: TensorSource, architecture: str) -> None:
    """Raise ConfigError if an array that the architecture does not have is not zeros."""
    for piece in params.pieces(here.name, here.index):
        if piece.any():
            raise ConfigError(
                f"{here.name} of layer {here.layer} reaches {np.abs(piece).max():g}, and a {architecture} has no such "
                "bias; train without optimizer.balance_rate, or write the run with `export`"
            )


def _hf_pieces(params: SavedParams, tensor: HfTensor) -> Iterator[np.ndarray]:
    """The data of a tensor: in pieces if it is one of our arrays, otherwise whole."""
    (name, index, view), *more = tensor.arrays
    if not more and view.view is None:
        row = 0  # all rows are read, for the fingerprint; rows that pad a vocab are not written
        for piece in params.pieces(name, index):
            yield _narrowed(name, piece[: max(tensor.shape[0] - row, 0)], tensor.dtype)
            row += len(piece)
        return
    whole = np.empty(tensor.shape, tensor.dtype)
    for name, index, view in tensor.arrays:
        ours, row = view.ours(whole), 0
        for piece in params.pieces(name, index):
            view.write(ours[row : row + len(piece)], _narrowed(name, piece, tensor.dtype))
            row += len(piece)
    yield whole


def _narrowed(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values rounded to a dtype; ConfigError if one is out of range, since it would become infinite."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(dtype)
    if (np.isinf(narrow) & np.isfinite(values)).any():
        raise ConfigError(f"{name} has values beyond {dtype}'s largest; write it with --dtype=bfloat16 or float32")
    return narrow


def read_record(source: SavedStep) -> dict[str, Any] | None:
    """The record of an import about its source folder. It is checked: a run may be untrusted, and names become
    files."""
    if RECORD not in source.files:
        return None
    record = load_json(source.folder / RECORD, files.LARGEST_BYTES)
    config, dtypes, texts = (record.get(part) for part in ("config", "dtypes", "files"))
    known = all(isinstance(part, dict) for part in (config, dtypes, texts))
    known = known and all(kind in tuple(WEIGHT_DTYPES) for kind in dtypes.values())
    if not known or not all(name in BESIDE and isinstance(text, str) for name, text in texts.items()):
        raise export.damaged(source, f"its file {RECORD} was not written by an import")
    return record


def _record_of(like: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """The record of the run that --like names; ConfigError if there is none, or not of this tokenizer."""
    source = export.open_step(like, None)
    record = read_record(source)
    if record is None:
        raise ConfigError(f"--like={like} was not made by from-hf; name the folder of such a run")
    if source.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"--like={like} has another tokenizer, so that its special tokens are others; leave it out")
    return record


def _extended(content: dict[str, Any], config: HfConfig, model: ModelConfig, seq: int) -> dict[str, Any]:
    """An imported config.json with the context extension of the model, and a context of at least `seq`."""
    known = config.context
    if hf_config.same_rope(config, model):
        if known >= seq or model.rope_scaling == "yarn":
            return content
    elif model.rope_scaling != LONGROPE:
        known = round(model.rope_original_seq * model.rope_factor)
    old = ("rope_parameters", "rope_scaling", "rope_theta", hf_config.LOCAL_THETA)
    content = {key: value for key, value in content.items() if key not in old} | hf_config.rope_json(
        model, config.architecture
    )
    return content | {"max_position_embeddings": hf_config.context_of(model, max(known, seq))}


# ---- special tokens and generation


def _generation(texts: Mapping[str, str], where: object) -> dict[str, Any]:
    """What the file that configures generation says; CheckpointError unless it is a JSON object."""
    with errors_as(CheckpointError, f"{where} cannot be read: ", "; mend it, and import it again", ValueError):
        return files.object_of(texts.get(GENERATION_CONFIG, "{}"))


def _special_ids(tokenizer: Tokenizer, ends: Sequence[int]) -> dict[str, Any]:
    """Ids of special tokens for config.json; null if there is none, since an absent field has another default."""
    begin = tokenizer.begin[0] if tokenizer.begin else None
    return {"bos_token_id": begin, "eos_token_id": ends[0] if len(ends) == 1 else list(ends), "pad_token_id": None}


def _texts_beside(
    content: Mapping[str, Any], context: int, tokenizer: Tokenizer, imported: Mapping[str, str], *, trained: bool
) -> dict[str, str]:
    """Files by name that configure the tokenizer, and generation so that it stops at the end of a document.

    `imported` files are unchanged, except that a model that was trained here also stops at the end of a document.
    Missing files are added.

    Raises:
        CheckpointError: the imported generation config is not a JSON object.
    """
    texts, end = dict(imported), tokenizer.end
    if tokenizer.name == Bytes.name:
        texts[TOKENIZER_FILE] = json_text(Bytes().as_bpe())
    if tokenizer.template:
        texts[TEMPLATE_FILE] = tokenizer.template
    if TOKENIZER_CONFIG not in texts:
        length = content.get("max_position_embeddings", context)
        texts[TOKENIZER_CONFIG] = json_text(_tokenizer_config(tokenizer, length))
    if GENERATION_CONFIG not in texts:
        said = {key: content.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        known = {key: ids for key, ids in said.items() if ids is not None}
        texts[GENERATION_CONFIG] = json_text({"eos_token_id": end, "pad_token_id": end} | known)
    if trained:
        generation = _generation(texts, f"the imported {GENERATION_CONFIG}")
        ids = eos_ids(GENERATION_CONFIG, generation)
        if end not in ids:
            texts[GENERATION_CONFIG] = json_text(generation | {"eos_token_id": [*ids, end] if ids else end})
    return texts


def _tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    # With tokenizer.json unchanged for every model.
    reader = {} if isinstance(tokenizer, SentencePiece) else {"tokenizer_class": "PreTrainedTokenizerFast"}
    end = tokenizer.token(tokenizer.end)
    begin = {"bos_token": tokenizer.token(tokenizer.begin[0])} if tokenizer.begin else {}
    return {
        **reader,
        **begin,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",  # generation continues at the right end
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],  # the inputs of these models
        "clean_up_tokenization_spaces": False,  # it would remove spaces from decoded text
    }
