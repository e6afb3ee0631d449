"""Parameters go out to safetensors and come back bit for bit, and files of strangers are not believed."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support.checkpoint_examples import flip, truncate
from support.run_examples import first_state, tiny_config

from parallax.checkpoint.arrays import ArrayReader, flatten
from parallax.checkpoint.save import CheckpointWriter
from parallax.checkpoint.steps import read_manifest
from parallax.cli.convert import main
from parallax.config.sections import CheckpointConfig
from parallax.errors import CheckpointError
from parallax.interop.safetensors import (
    DTYPE_NAMES,
    INDEX,
    read_header,
    read_model,
    write_model,
    write_tensors,
)
from parallax.training.run import train


@pytest.fixture
def exported(whole_run, tmp_path):
    # 1 MiB holds all of it; the tests of shards cut it smaller.
    assert main(["export", str(whole_run), str(tmp_path / "out"), "--shard-mbytes=1"]) == 0
    return tmp_path / "out"


def params_of(folder, step):
    arrays = read_manifest(folder / "checkpoints", step)["arrays"]["params"]
    at = folder / "checkpoints" / str(step) / "params"
    return {name: ArrayReader(at, name, about).read(...) for name, about in arrays.items()}


def tensors_of(path):
    """A safetensors file as the format's description has it, in a few lines."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
    return {
        name: np.frombuffer(content[8 + length :][slice(*t["data_offsets"])], kinds[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
        if name != "__metadata__"
    }


def test_an_export_has_every_layer_under_its_plain_name(whole_run, exported):
    (path,) = exported.glob("*.safetensors")
    found, params = tensors_of(path), params_of(whole_run, 8)
    assert found["embedding.table"].tobytes() == params["embedding.table"].tobytes()
    for layer in range(2):
        name = f"blocks.{layer}.attention.q.kernel"
        assert found[name].tobytes() == params["blocks.attention.q.kernel"][layer].tobytes()
    assert sum(x.size for x in found.values()) == sum(x.size for x in params.values())
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(found, path.name)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    assert (exported / "config.json").is_file() and (exported / "tokenizer.json").is_file()


def test_an_import_has_the_bits_of_the_export_and_a_run_starts_from_it(corpus, whole_run, exported, tmp_path, capsys):
    workdir = tmp_path / "imported"
    assert main(["import", str(exported), str(workdir)]) == 0
    assert f"train.init_from={workdir}" in capsys.readouterr().out
    there, here = params_of(whole_run, 8), params_of(workdir, 0)
    assert {name: x.tobytes() for name, x in there.items()} == {name: x.tobytes() for name, x in here.items()}
    marks = [
        read_manifest(folder / "checkpoints", step)["arrays"]["params"]
        for folder, step in ((whole_run, 8), (workdir, 0))
    ]
    assert marks[0] == marks[1]
    state, start = first_state(tiny_config(corpus, **{"train.init_from": str(workdir)}), tmp_path / "on")
    assert start == 0 and not any(x.any() for x in jax.tree.leaves(jax.device_get(state.opt_state)))
    assert {name: np.asarray(x).tobytes() for name, x in flatten(state.params).items()} == {
        name: x.tobytes() for name, x in there.items()
    }


def test_imported_weights_are_not_taken_for_a_run(corpus, exported, tmp_path):
    main(["import", str(exported), str(tmp_path / "imported")])
    with pytest.raises(CheckpointError, match="holds imported weights, not a run; start one elsewhere"):
        train(tiny_config(corpus), tmp_path / "imported")


def test_shards_hold_at_most_their_size_and_the_index_leads_to_each(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(size, 4)).astype(np.float32) for name, size in zip("abcde", (4, 4, 9, 1, 2))}
    index = write_model(tmp_path, tensors, lambda name: [tensors[name][:1], tensors[name][1:]], shard_bytes=128)
    (tmp_path / INDEX).write_text(index)
    names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    found = read_model(tmp_path)
    assert [found[name].path.name for name in "abcde"] == [names[at] for at in (0, 0, 1, 2, 2)]
    for name, tensor in found.items():
        assert tensor.whole().tobytes() == tensors[name].tobytes() == tensors_of(tensor.path)[name].tobytes()


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_round_trips_bit_for_bit(tmp_path, dtype):
    bits = np.random.default_rng(0).integers(0, 2 if dtype.kind == "b" else 256, 24 * dtype.itemsize, np.uint8)
    x = {"x": bits.view(dtype).reshape(2, 3, 4), "scalar": bits.view(dtype)[0], "empty": np.zeros((0, 3), dtype)}
    write_tensors(tmp_path / "file", x, lambda name: [x[name]])
    header = read_header(tmp_path / "file")
    for name, array in x.items():
        found = header[name].whole()
        assert found.dtype == dtype and found.shape == array.shape and found.tobytes() == array.tobytes()
        pieces = list(header[name].pieces(1))
        assert len(pieces) == (len(array) if array.ndim else 1)
        assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()


def test_the_library_of_the_format_reads_what_is_written_and_writes_what_is_read(tmp_path):
    rng = np.random.default_rng(0)
    x = {"b": rng.normal(size=(4, 2)).astype(np.float32), "a": rng.normal(size=3).astype(ml_dtypes.bfloat16)}
    write_tensors(tmp_path / "ours", x, lambda name: [x[name]])
    safetensors.numpy.save_file({name: array.view(np.uint16) for name, array in x.items()}, tmp_path / "theirs")
    with safetensors.safe_open(tmp_path / "ours", framework="numpy") as file:
        assert {name: file.get_tensor(name).tobytes() for name in file.offset_keys()} == {
            n: a.tobytes() for n, a in x.items()
        }
    for name, tensor in read_header(tmp_path / "theirs").items():
        assert tensor.whole().tobytes() == x[name].tobytes()


def test_bfloat16_of_a_checkpoint_is_stored_and_read_bit_for_bit(tmp_path):
    x = np.random.default_rng(0).integers(0, 1 << 16, (4, 8), np.uint16).view(ml_dtypes.bfloat16)
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with CheckpointWriter(tmp_path, config, settings={}) as checkpoints:
        checkpoints.save(1, {"params": {"x": jax.numpy.asarray(x)}})
    about = read_manifest(tmp_path, 1)["arrays"]["params"]["x"]
    stored = ArrayReader(tmp_path / "1" / "params", "x", about)
    write_tensors(tmp_path / "file", {"x": stored}, lambda name: stored.pieces())
    assert tensors_of(tmp_path / "file")["x"].tobytes() == x.tobytes()


def test_an_export_holds_no_more_than_a_piece_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("parallax.checkpoint.arrays.PIECE_BYTES", 4096)
    x = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with CheckpointWriter(tmp_path, config, settings={}) as checkpoints:
        checkpoints.save(1, {"params": {"x": jax.numpy.asarray(x)}})
    about = read_manifest(tmp_path, 1)["arrays"]["params"]["x"]
    pieces = list(ArrayReader(tmp_path / "1" / "params", "x", about).pieces())
    assert len(pieces) == 64 and max(piece.nbytes for piece in pieces) == 4096


EXPORT = """
import pathlib, re, sys
from parallax.checkpoint import stored
from parallax.interop.export import export_params
stored.CACHE_BYTES = 1 << 26
# Of this process alone: getrusage begins with the memory of the one that started it.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
before = peak()
export_params(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), step=1, shard_bytes=1 << 28)
print(peak() - before)
"""


@pytest.mark.slow
def test_an_export_of_640_mib_takes_the_memory_of_its_cache_and_a_few_pieces(tmp_path):
    """With a cache of 64 MiB, as ten arrays of 64 MiB take the time that they do."""
    rng = np.random.default_rng(0)
    params = {f"array_{n}": jax.numpy.asarray(rng.normal(size=(64, 1 << 18)).astype(np.float32)) for n in range(10)}
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    carry = lambda at: [(at / name).write_text("{}") for name in ("config.json", "tokenizer.json")]  # noqa: E731
    with CheckpointWriter(tmp_path / "run" / "checkpoints", config, settings={}, carry=carry) as checkpoints:
        checkpoints.save(1, {"params": params})
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "run"), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) > 640 << 20
    # The cache, the piece that is decoded, the piece that is summed with its 8 bytes an element, and what is written.
    print(int(ended.stdout) >> 20, "MiB")
    assert int(ended.stdout) < 400 << 20


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_checkpoint_is_not_exported(whole_run, tmp_path, capsys, damage):
    shutil.copytree(whole_run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "8" / "params" / "d").iterdir():  # some are of no array any more
        damage(path)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert "the checkpoint of step 8 in" in error and "is damaged: " in error and "use another step\n" in error
    assert not list(tmp_path.glob("out*"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--step=4"]) == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_step_whose_config_or_tokenizer_is_damaged_is_not_exported(whole_run, tmp_path, capsys, name):
    shutil.copytree(whole_run, tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "8" / name)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 3
    assert f"is damaged: its file {name} does not match its checksum" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_nothing_is_written_over(whole_run, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["export", str(whole_run), str(tmp_path)]) == 3
    assert f"{tmp_path} exists already; choose another name" in capsys.readouterr().err


def test_an_export_leaves_other_folders_alone(whole_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "mine").touch()
    assert main(["export", str(whole_run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out.unfinished" / "mine").exists()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["export", str(whole_run), "."]) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["empty", "out", "out.unfinished"] and list((tmp_path / "empty").glob("*.safetensors"))


def header_of(**tensors):
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": at} for name, (dtype, shape, at) in tensors.items()}


def file_of(header, data=b"\0" * 32, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = ("F32", [2, 4], [0, 32])
LONG = "x" * 5000
COVERED = "incomplete metadata, file not fully covered"
HOSTILE = {
    "nothing": (b"", "header too small"),
    "three bytes": (b"abc", "header too small"),
    "a header of no bytes": (file_of(b""), "invalid JSON in header: EOF"),
    "a header of 2^60 bytes": (file_of(b"{}", length=1 << 60), f"its header has {1 << 60} bytes by its own account"),
    "a header beyond the end": (file_of(b"{}", b"", length=3), "invalid header length"),
    "no JSON": (file_of(b"{'a'"), "invalid JSON in header: key must be a string"),
    "nested": (file_of(b"[" * 50_000), "invalid JSON in header: invalid type: sequence"),
    "a nested entry": (file_of(b'{"a":' + b"[" * 50_000), "invalid JSON in header: recursion limit exceeded"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "invalid UTF-8 in header"),
    "half a surrogate pair": (file_of(b'{"\\ud800": 1}'), "invalid JSON in header: unexpected end of hex escape"),
    "a list": (file_of(b"[]"), "invalid JSON in header: invalid type: sequence"),
    "a number for a tensor": (file_of(b'{"a": 1}'), "invalid JSON in header: invalid type: integer `1`"),
    "twice": (
        file_of(b'{"a": %b, "a": %b}' % ((json.dumps(header_of(a=GOOD)["a"]).encode(),) * 2)),
        "'a' is there twice",
    ),
    "metadata that is no text": (file_of({"__metadata__": {"a": [1]}, **header_of(a=GOOD)}), "expected a string"),
    "metadata that is a number": (file_of({"__metadata__": 3, **header_of(a=GOOD)}), "expected a map"),
    "an absurd shape": (file_of(header_of(a=("F32", [10**6, 10**6], [0, 32]))), "invalid shape, data type, or offset"),
    "an overflowing shape": (file_of(header_of(a=("F32", [2**62, 4], [0, 32]))), "overflow computing buffer size"),
    "2^63 entries by 0": (
        file_of(header_of(a=("F32", [2**63, 0], [0, 0])), b""),
        "has the shape [9223372036854775808, 0]",
    ),
    "2^62 entries by 0": (
        file_of(header_of(a=("F32", [2**62, 0], [0, 0])), b""),
        "has the shape [4611686018427387904, 0]",
    ),
    "2^64": (file_of(header_of(a=("F32", [2**64, 0], [0, 0])), b""), "expected usize"),
    "a size of 5,000 digits": (file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"), "number out of range"),
    "a negative shape": (
        file_of(header_of(a=("F32", [-2, -4], [0, 32]))),
        "invalid value: integer `-2`, expected usize",
    ),
    "a shape of floats": (file_of(header_of(a=("F32", [2.0, 4.0], [0, 32]))), "floating point `2.0`, expected usize"),
    "a negative offset": (file_of(header_of(a=("F32", [2, 4], [-32, 0]))), "integer `-32`, expected usize"),
    "too few bytes": (file_of(header_of(a=("F32", [2, 4], [0, 16]))), "invalid shape, data type, or offset"),
    "beyond the file": (file_of(header_of(a=("F32", [2, 8], [0, 64]))), COVERED),
    "backwards": (file_of(header_of(a=("F32", [2, 4], [32, 0]))), "invalid offset for tensor `a`"),
    "overlap": (file_of(header_of(a=GOOD, b=("F32", [4], [16, 32]))), "invalid offset for tensor `b`"),
    "the same bytes": (file_of(header_of(a=GOOD, b=GOOD)), "invalid offset for tensor `"),
    "a hole": (file_of(header_of(a=("F32", [2], [0, 8]), b=("F32", [4], [16, 32]))), "invalid offset for tensor `b`"),
    "more at the end": (file_of(header_of(a=GOOD), b"\0" * 40), COVERED),
    "less at the end": (file_of(header_of(a=GOOD), b"\0" * 24), COVERED),
    "an unknown dtype": (file_of(header_of(a=("X", [64], [0, 32]))), "unknown variant `X`, expected one of `BOOL`"),
    "a dtype of 5,000 letters": (file_of(header_of(a=(LONG, [64], [0, 32]))), "unknown variant `xxx"),
    "a dtype that NumPy has not": (
        file_of(header_of(a=("F8_E5M2", [32], [0, 32]))),
        "'a' has dtype 'F8_E5M2'; known: F64",
    ),
    "a dtype that is a list": (file_of(header_of(a=([], [8], [0, 32]))), "invalid type: sequence, expected string"),
    "more keys": (
        file_of({"a": {**header_of(a=GOOD)["a"], "run": "rm"}}),
        "must have exactly dtype, shape and data_offsets",
    ),
    "a million of further numbers": (
        file_of({"a": {**header_of(a=GOOD)["a"], "run": [1] * 10**6}}),
        "must have exactly dtype, shape and data_offsets",
    ),
    "a further number of 5,000 digits": (
        file_of(json.dumps(header_of(a=GOOD)).encode()[:-2] + b', "run":' + b"9" * 5000 + b"}}"),
        "invalid JSON in header: number out of range",
    ),
    "a million dims": (
        file_of(header_of(a=("U8", [1] * 10**6, [0, 1])), b"\0"),
        "tensor 'a' has the shape [1, 1, 1, ",
    ),
    "65 dims": (
        file_of(header_of(a=("U8", [1] * 65, [0, 1])), b"\0"),
        "tensor 'a' has the shape [1, 1, 1, ",
    ),
    "a name of 5,000 letters": (
        file_of(header_of(**{LONG: ("U8", [1] * 65, [0, 1])}), b"\0"),
        f"tensor '{'x' * 80}'… (5000 letters) has the shape [1, 1, ",
    ),
    "a name of 5,000 letters, at a wrong place": (
        file_of(header_of(**{LONG: ("F32", [2, 4], [32, 0])})),
        "'invalid offset for tensor `xxx",
    ),
    "a name of two lines": (
        file_of(header_of(**{"a\nb": ("F32", [2, 4], [32, 0])})),
        r"invalid offset for tensor `a\nb`",
    ),
    "30,000 names, the last of them twice": (
        file_of(
            json.dumps(header_of(**{f"n{n}": ("U8", [1], [n, n + 1]) for n in range(30_000)})).encode()[:-1]
            + b',"n29999":{"dtype":"U8","shape":[1],"data_offsets":[29999,30000]}}',
            b"\0" * 30_000,
        ),
        "'n29999' is there twice",
    ),
}


@pytest.mark.parametrize("trick", HOSTILE)
def test_a_header_that_does_not_fit_its_file_is_refused_at_once_in_one_line(tmp_path, trick):
    content, message = HOSTILE[trick]
    (tmp_path / "model.safetensors").write_bytes(content)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        read_model(tmp_path)
    assert time.monotonic() - began < 2
    said = str(error.value)
    assert f"{tmp_path / 'model.safetensors'} is not a valid safetensors file: " in said and message in said
    assert len(said.splitlines()) == 1 and said.isprintable() and len(said) < 700


def test_30_000_names_and_a_name_of_5_000_letters_are_read_at_once(tmp_path):
    names = [*(f"n{n}" for n in range(30_000)), LONG]
    tensors = dict.fromkeys(names, np.zeros(1, np.uint8))
    began = time.monotonic()
    (tmp_path / INDEX).write_text(write_model(tmp_path, tensors, lambda name: [tensors[name]], shard_bytes=10_000))
    assert len(read_model(tmp_path)) == 30_001
    assert time.monotonic() - began < 5


def test_tensors_of_no_use_are_named_in_one_short_line(exported, tmp_path, capsys):
    (path,) = exported.glob("*.safetensors")
    names = [LONG, "two\nlines", *(f"n{n}" for n in range(30_000))]
    tensors = dict.fromkeys(names, np.zeros(1, np.uint8))
    (exported / INDEX).write_text(write_model(exported, tensors, lambda name: [tensors[name]], shard_bytes=1 << 20))
    assert main(["import", str(exported), str(tmp_path / "imported")]) == 3
    error = capsys.readouterr().err
    assert "is unexpected" in error and len(error.splitlines()) == 1 and len(error) < 2000


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path):
    x = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    write_tensors(tmp_path / "file", {"x": x}, lambda name: [x])
    (tensor,) = read_header(tmp_path / "file").values()
    pieces = tensor.pieces(1 << 20)
    next(pieces)
    truncate(tmp_path / "file")
    with pytest.raises(CheckpointError, match="it ends before byte .*, though it was as long when it was opened"):
        list(pieces)
    (tmp_path / "file").unlink()
    with pytest.raises(CheckpointError, match=r"file cannot be read \(No such file or directory\)"):
        tensor.whole()


def test_a_header_that_fits_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(file_of(header_of(a=GOOD)))
    (tensor,) = read_model(tmp_path).values()
    assert tensor[:3] == (tmp_path / "model.safetensors", np.dtype(np.float32), (2, 4))


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "x.bin",
        "\0",
        "\ud800",
        f"{LONG}.safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "model.safetensors").write_bytes(file_of(header_of(a=GOOD)))
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="which is not the name of a .safetensors file in its folder") as error:
        read_model(tmp_path / "in")
    assert len(str(error.value)) < 500 and str(error.value).isprintable()


def test_a_link_is_not_followed_and_a_missing_shard_is_named(tmp_path):
    (tmp_path / "secret").write_bytes(file_of(header_of(a=GOOD)))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "s.safetensors"}}))
    with pytest.raises(CheckpointError, match="s.safetensors is missing"):
        read_model(tmp_path / "in")
    (tmp_path / "in" / "s.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="s.safetensors is a link"):
        read_model(tmp_path / "in")


def test_an_index_and_its_shards_must_agree(exported):
    path = exported / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["embedding.table"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="do not agree about 'embedding.table'"):
        read_model(exported)
    path.unlink()
    with pytest.raises(CheckpointError, match="has neither model.safetensors.index.json nor"):
        read_model(exported)


def test_an_index_that_has_no_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"index\.json is no plain file"):
        read_model(tmp_path)


def test_an_index_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").mkdir()
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read \(Is a directory\)"):
        read_model(tmp_path)


def test_parameters_of_another_model_are_refused_by_name(exported, tmp_path, capsys):
    config = json.loads((exported / "config.json").read_text())
    config["model"]["d_ff"] = 128
    (exported / "config.json").write_text(json.dumps(config))
    assert main(["import", str(exported), str(tmp_path / "imported")]) == 3
    assert "blocks.0.mlp.down.kernel is float32[64, 32] there and float32[128, 32] here" in capsys.readouterr().err
    assert not list(tmp_path.glob("imported*"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_weights_that_are_not_finite_are_not_imported(value, exported, tmp_path, capsys):
    (path,) = exported.glob("*.safetensors")
    (last, tensor) = list(read_header(path).items())[-1]
    content = bytearray(path.read_bytes())
    content[-4:] = np.float32(value).tobytes()
    path.write_bytes(content)
    assert tensor.dtype == np.float32 and main(["import", str(exported), str(tmp_path / "imported")]) == 3
    assert f"{last} has values that are not finite, first {value}; fetch or export it" in capsys.readouterr().err
    assert not list(tmp_path.glob("imported*"))


def test_an_import_without_its_tokenizer_is_refused(exported, tmp_path, capsys):
    (exported / "tokenizer.json").unlink()
    assert main(["import", str(exported), str(tmp_path / "imported")]) == 5
    assert "tokenizer" in capsys.readouterr().err and not list(tmp_path.glob("imported*"))
