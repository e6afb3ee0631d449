"""Weights in float8 by blocks, and layers for further tokens, as DeepSeek-V3 is published, and in MXFP4, as gpt-oss is:
what comes in of them."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.hf_folders import (
    KINDS,
    MIXTURES,
    config_of,
    in_blocks,
    random_tensors,
    read_folder,
    shapes_of,
    write_folder,
)
from test_convert import params_of
from test_huggingface import CONVERT, ENVIRONMENT

from parallax.cli.convert import main
from parallax.interop.hf_weights import WHOLE_PIECE_BYTES, ScaledTensor, scales_shape
from parallax.interop.safetensors import read_header

V3, QWEN3 = "DeepseekV3ForCausalLM", "Qwen3ForCausalLM"
# No side of a matrix is a multiple of the first; the second is larger than all of them.
BLOCKS = [(7, 5), (128, 128)]
FURTHER = "model.layers.2."  # behind the two that the model has


def quantized_config(architecture, block, **changes):
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    return config_of(architecture, torch_dtype="bfloat16", quantization_config=how, **changes)


def quantized(architecture, block, **changes):
    """(config, tensors as they are stored, and as they are meant)."""
    config = quantized_config(architecture, block, **changes)
    tensors = random_tensors(shapes_of(config))
    plain = {name: x if x.ndim == 2 and ".layers." in name else x.astype(KINDS["BF16"]) for name, x in tensors.items()}
    return config, *in_blocks(plain, block)


def imported(folder, config, tensors, **how):
    write_folder(folder / "theirs", config, tensors, **how)
    return main(["from-hf", str(folder / "theirs"), "--workdir", str(folder / "run")])


@pytest.mark.fast(2)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("architecture", [V3, QWEN3])
def test_float8_weights_come_in_as_the_values_that_they_stand_for(tmp_path, capsys, architecture, block):
    config, stored, meant = quantized(architecture, block)
    assert {str(x.dtype) for x in stored.values()} == {"float8_e4m3fn", "float32", "bfloat16"}
    assert imported(tmp_path / "small", config, stored, shards=2) == 0
    assert f"each block of {block[0]} x {block[1]} times its scale" in capsys.readouterr().out
    assert imported(tmp_path / "wide", config_of(architecture), meant) == 0
    small, wide = (params_of(tmp_path / which / "run", 0) for which in ("small", "wide"))
    assert small.keys() == wide.keys()
    for name in wide:
        np.testing.assert_array_equal(small[name], wide[name], err_msg=name)


@pytest.mark.slow
def test_experts_in_float8_come_in_as_the_values_that_they_stand_for(tmp_path):
    """Beside a layer for multi-token prediction, which has experts, too."""
    architecture, changes = MIXTURES["DeepSeek-V3"]
    changes = changes | {"num_hidden_layers": 2}
    config, stored, meant = quantized(architecture, (7, 5), num_nextn_predict_layers=1, **changes)
    experts = [name for name in stored if ".mlp.experts." in name and name.endswith("_scale_inv")]
    assert len(experts) == 3 * 8
    assert imported(tmp_path / "small", config, stored | further_layer(config, (7, 5)), shards=2) == 0
    assert imported(tmp_path / "wide", config_of(architecture, **changes), meant) == 0
    small, wide = (params_of(tmp_path / which / "run", 0) for which in ("small", "wide"))
    assert small.keys() == wide.keys() and "blocks.moe.mlp.experts.up" in small
    for name in wide:
        np.testing.assert_array_equal(small[name], wide[name], err_msg=name)
    assert main(["to-hf", str(tmp_path / "small" / "run"), str(tmp_path / "out")]) == 0
    found = read_folder(tmp_path / "out")
    assert found.keys() == meant.keys()
    assert all((found[name] == x.astype(KINDS["BF16"])).all() for name, x in meant.items())


def test_they_go_out_in_the_dtype_of_the_rest_and_say_nothing_of_blocks(tmp_path):
    config, stored, meant = quantized(V3, (7, 5), num_nextn_predict_layers=1)
    assert imported(tmp_path, config, stored) == 0
    for dtype, kind in ({}, "BF16"), ({"--dtype": "float32"}, "F32"):
        out = tmp_path / kind
        assert main(["to-hf", str(tmp_path / "run"), str(out), *map("=".join, dtype.items())]) == 0
        found, said = read_folder(out), json.loads((out / "config.json").read_text())
        assert found.keys() == meant.keys()
        assert all((found[name] == x.astype(KINDS[kind])).all() for name, x in meant.items())
        assert "quantization_config" not in said and said["num_nextn_predict_layers"] == 1
        assert main(["from-hf", str(out), "--workdir", str(tmp_path / f"back_{kind}")]) == 0


def further_layer(config, block):
    """Tensors of a layer for multi-token prediction: a block of its own, and what stands around it."""
    d, names = config["hidden_size"], {}
    for name, shape in shapes_of(config | {"num_hidden_layers": 3}).items():
        if FURTHER in name:
            names[name] = shape
    around = {"enorm.weight": (d,), "hnorm.weight": (d,), "eh_proj.weight": (d, 2 * d), "shared_head.norm.weight": (d,)}
    around |= {"embed_tokens.weight": (config["vocab_size"], d), "shared_head.head.weight": (config["vocab_size"], d)}
    names |= {FURTHER + name: shape for name, shape in around.items()}
    return in_blocks(random_tensors(names, seed=1), block)[0]


def test_layers_for_further_tokens_are_left_out_with_a_line(tmp_path, capsys):
    config, stored, _ = quantized(V3, (7, 5), num_nextn_predict_layers=1)
    more = further_layer(config, (7, 5))
    assert len(more) > 15 and all(name.startswith(FURTHER) for name in more)
    assert imported(tmp_path / "with", config, stored | more) == 0
    assert "1 layer for multi-token prediction, after the model's, left out\n" in capsys.readouterr().out
    assert imported(tmp_path / "without", config, stored) == 0
    one, other = (params_of(tmp_path / which / "run", 0) for which in ("with", "without"))
    assert all((one[name] == other[name]).all() for name in other)
    for which, layers in (("with", 0), ("without", 1)):  # where the folder has none, its config.json stays as it is
        assert main(["to-hf", str(tmp_path / which / "run"), str(tmp_path / which / "out")]) == 0
        said = json.loads((tmp_path / which / "out" / "config.json").read_text())
        assert said["num_nextn_predict_layers"] == layers


def test_such_layers_are_of_no_use_where_the_config_has_none(tmp_path, capsys):
    config, stored, _ = quantized(V3, (7, 5))
    assert imported(tmp_path, config, stored | further_layer(config, (7, 5))) == 3
    assert f"{FURTHER}embed_tokens.weight is unexpected" in capsys.readouterr().err


def wrong_scales(stored, how):
    name = "model.layers.0.mlp.up_proj.weight"
    scales = stored[f"{name}_scale_inv"]
    changed = {
        "none": None,
        "a shape": scales[:-1],
        "a dtype": scales.astype(np.float16),
    }[how]
    return {key: changed if key == f"{name}_scale_inv" else x for key, x in stored.items()}


@pytest.mark.parametrize("how", ["none", "a shape", "a dtype"])
def test_float8_without_scales_that_fit_is_refused_by_name(tmp_path, capsys, how):
    config, stored, _ = quantized(V3, (7, 5))
    tensors = {name: x for name, x in wrong_scales(stored, how).items() if x is not None}
    assert imported(tmp_path, config, tensors) == 3
    error = capsys.readouterr().err
    assert "model.layers.0.mlp.up_proj.weight is float8_e4m3fn, not one of float32, bfloat16, float16" in error
    assert ("up_proj.weight_scale_inv is unexpected" in error) == (how != "none")


def test_float8_that_no_config_explains_is_refused(tmp_path, capsys):
    config, stored, _ = quantized(QWEN3, (7, 5))
    assert imported(tmp_path, config_of(QWEN3), stored) == 3
    assert "_scale_inv is unexpected" in capsys.readouterr().err


def test_a_weight_in_pieces_is_the_weight_whole(tmp_path):
    config, stored, meant = quantized(QWEN3, (7, 5))
    write_folder(tmp_path / "theirs", config, stored)
    path, name = tmp_path / "theirs" / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    header = read_header(path)
    weight = ScaledTensor(header[name], header[f"{name}_scale_inv"], (7, 5))
    assert weight.shape == (16, 24)
    pieces = list(weight.pieces(4 * 24 * 3))  # three rows in float32
    assert [len(piece) for piece in pieces] == [3, 3, 3, 3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(pieces), meant[name])
    np.testing.assert_array_equal(weight.whole(), meant[name])
    assert WHOLE_PIECE_BYTES <= 1 << 24


@pytest.mark.slow
def test_float8_takes_the_memory_of_a_few_pieces_too(tmp_path):
    """128 MiB that become 512: a cache of 64 MiB, a matrix of a layer in float32, pieces of at most 64 MiB."""
    draw = np.random.default_rng(0)
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    config = quantized_config(QWEN3, (128, 128), **sizes, head_dim=64)
    stored = {}
    for name, shape in shapes_of(config).items():
        if len(shape) == 2 and ".layers." in name:
            bits = draw.integers(0, 0x7F, shape, np.uint8)  # all but NaN, which 0x7f is
            stored[name] = bits.view(KINDS["F8_E4M3"])
            stored[f"{name}_scale_inv"] = np.full(scales_shape(shape, (128, 128)), 0.001, np.float32)
        else:
            stored[name] = draw.normal(size=shape).astype(KINDS["BF16"])
    assert sum(x.nbytes for x in stored.values()) > 100 << 20
    write_folder(tmp_path / "theirs", config, stored, shards=4)
    command = [sys.executable, "-c", CONVERT, "from-hf", "theirs", "--workdir", "run"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    grown = int(ended.stdout.split("grew ")[1])
    print(f"{grown >> 20} MiB")
    assert grown < 350 << 20


# ---- MXFP4

GPT_OSS, MXFP4 = "GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}


def in_mxfp4(tensors):
    """Random bits in the place of experts' kernels, each exponent with all numbers in bfloat16, beside what
    they stand for by the format's definition, entry by entry."""
    draw, stored, meant = np.random.default_rng(0), {}, {}
    for name, array in tensors.items():
        stored[name] = meant[name] = array.astype(KINDS["BF16"])
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, into, out = array.shape
            del stored[name]
            blocks = draw.integers(0, 256, (experts, out, into // 32, 16), np.uint8)
            exponents = draw.integers(3, 252, (experts, out, into // 32)).astype(np.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
            values = np.zeros(array.shape, np.float64)
            for (e, o, block, byte), bits in np.ndenumerate(blocks):
                for half, four in enumerate((int(bits) % 16, int(bits) // 16)):
                    sign, exponent, mantissa = four // 8, four // 2 % 4, four % 2
                    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                    size *= 2.0 ** (int(exponents[e, o, block]) - 127)
                    values[e, 32 * block + 2 * byte + half, o] = -size if sign else size
            meant[name] = values.astype(KINDS["BF16"])
            assert (meant[name].astype(np.float64) == values).all()
    return stored, meant


def test_mxfp4_comes_in_as_what_it_stands_for_and_goes_out_as_that(tmp_path, capsys):
    """Bitwise: gate and up, in turn in their tensor, and down; and what goes out comes in as the same."""
    config = config_of(GPT_OSS)
    stored, meant = in_mxfp4(random_tensors(shapes_of(config)))
    assert imported(tmp_path, config | MXFP4, stored, shards=2) == 0
    assert "MXFP4 weights become bfloat16" in capsys.readouterr().out
    ours, prefix = params_of(tmp_path / "run", 0), "model.layers.1.mlp.experts"
    experts = {name.removeprefix("blocks.mlp."): x[1] for name, x in ours.items() if name.startswith("blocks.mlp.")}
    for first, name in enumerate(("gate", "up")):
        assert (experts[f"experts.{name}"] == meant[f"{prefix}.gate_up_proj"][..., first::2]).all()
        assert (experts[f"experts.{name}_bias"] == meant[f"{prefix}.gate_up_proj_bias"][..., first::2]).all()
    assert (experts["experts.down"] == meant[f"{prefix}.down_proj"]).all()
    assert (experts["down_bias"] == meant[f"{prefix}.down_proj_bias"]).all()
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found = read_folder(tmp_path / "out")
    assert {name: x.tobytes() for name, x in found.items()} == {name: x.tobytes() for name, x in meant.items()}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert main(["from-hf", str(tmp_path / "out"), "--workdir", str(tmp_path / "back")]) == 0
    back = params_of(tmp_path / "back", 0)
    assert all((back[name] == x).all() for name, x in ours.items())


BLOCKS_OF_ONE = "model.layers.0.mlp.experts.down_proj_blocks"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (config_of(GPT_OSS), {}, "down_proj is missing"),
        (config_of(GPT_OSS) | MXFP4, {BLOCKS_OF_ONE: np.zeros((3, 32, 2, 8), np.uint8)}, "down_proj is missing"),
        (config_of(QWEN3) | MXFP4, {}, "quantization_config: quant_method='mxfp4' is not supported"),
    ],
    ids=["no config says it", "half a block", "another architecture"],
)
def test_mxfp4_that_is_not_as_gpt_oss_has_it_is_refused(tmp_path, capsys, config, change, message):
    stored, _ = in_mxfp4(random_tensors(shapes_of(config_of(GPT_OSS))))
    assert imported(tmp_path, config, stored | change) in (2, 3)
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
