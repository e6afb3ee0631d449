"""hf:// and http:// are read from a server of this machine, which answers as huggingface.co does."""

import json

import pytest
from support.hub import serving

from parallax.data.sources import open_source
from parallax.errors import DataError
from parallax.storage import files, remote
from parallax.storage.remote import source_path

TOKEN = "hf_a-secret-that-is-never-shown"
LINES = [f"Text {number}, which is a line." for number in range(50)]
CORPUS = {
    "data/a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in LINES[:30]).encode(),
    "data/more/b.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in LINES[30:]).encode(),
    "README.md": b"About it.",
}
MODEL = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(3000)}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set and a model, both for those with a token; the environment says where and which."""
    constants = pytest.importorskip(
        "huggingface_hub.constants", reason="hf:// needs huggingface_hub, of the extra urls"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    remote._file_system.cache_clear()
    with serving({"them/corpus": CORPUS, "them/model": MODEL}, token=TOKEN) as url:
        # HF_ENDPOINT sets both when the library is imported.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        remote._file_system("hf").clear_instance_cache()
        remote._file_system.cache_clear()
        yield url
    remote._file_system("hf").clear_instance_cache()
    remote._file_system.cache_clear()


def texts_of(path):
    return [*open_source("jsonl", path=path, field="text", synthetic_tokens=0).documents()]


def test_a_data_set_is_read_by_pattern_through_copies(hub):
    assert texts_of("hf://datasets/them/corpus/**/*.jsonl") == LINES
    assert texts_of("hf://datasets/them/corpus/data/*.jsonl") == LINES[:30]


def test_files_of_a_model_are_there_with_size_and_state(hub):
    folder = source_path("hf://them/model")
    assert folder.is_dir() and files.names_in(folder) == [*MODEL]
    weights = folder / "model.safetensors"
    assert weights.is_file() and files.size_of(weights) == 3000 and files.state_of(weights)
    assert files.local_copy(weights).read_bytes() == MODEL["model.safetensors"]
    assert files.read_object(folder / "config.json") == {"model_type": "llama"}
    assert not (folder / "none").exists()


@pytest.mark.parametrize("url", ["hf://datasets/them/corpus/none.jsonl", "hf://datasets/them/nothing/a.jsonl"])
def test_what_is_not_there_is_one_line(hub, url):
    with pytest.raises(DataError, match=url) as refused:
        texts_of(url)
    assert "\n" not in str(refused.value)


def test_who_is_refused_hears_it_in_one_line_without_the_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}-which-has-expired")
    with pytest.raises(DataError, match="hf://datasets/them/corpus/data/a.jsonl.*401") as refused:
        texts_of("hf://datasets/them/corpus/data/a.jsonl")
    assert TOKEN not in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_behind_http_is_read_through_a_copy(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="http:// needs aiohttp, of the extra urls")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving({"them/corpus": CORPUS}) as url:
        assert texts_of(f"{url}/them/corpus/resolve/main/data/a.jsonl") == LINES[:30]
        with pytest.raises(DataError, match="none.jsonl"):
            texts_of(f"{url}/them/corpus/resolve/main/none.jsonl")
