"""Runs on conversations: what they write, how they go on, and the same losses on another mesh."""

import io
import json
import sys

import numpy as np
import pytest
from support.chat_examples import conversations, turn, write_chats
from support.run_examples import losses, stop_at, tiny_config

import parallax as px
from parallax.cli import generate
from parallax.cli.evaluate import evaluate
from parallax.config.settings import load_settings
from parallax.data.chat import ChatTemplate
from parallax.errors import DataError
from parallax.training.run import train


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("chats") / "c.jsonl", conversations(90, turns=2))


def of_chats(chats, **changes):
    data = {"data.source": "jsonl", "data.path": str(chats), "data.format": "chat", "data.chat_template": "chatml"}
    return tiny_config(chats.parent, **data | {"data.seq": 160, "data.tokenizer": "bytes"} | changes)


@pytest.fixture(scope="module")
def whole(chats, tmp_path_factory):
    """A finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("chat_run")
    assert train(of_chats(chats), folder).reason == "finished"
    return folder


@pytest.mark.slow
def test_the_template_goes_with_the_run(whole):
    chatml = ChatTemplate.named("chatml")
    for folder in (whole, whole / "checkpoints" / "8"):
        assert ChatTemplate.of_tokenizer(folder).text == chatml.text
    log = (whole / "log.txt").read_text()
    assert "documents packed whole, " in log and "27 are longer than one, data.too_long='cut'" in log


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_bitwise(chats, whole, tmp_path, monkeypatch):
    stop_at(monkeypatch, 5)
    assert train(of_chats(chats), tmp_path).reason != "finished"
    monkeypatch.undo()
    assert train(of_chats(chats), tmp_path).reason == "finished"
    assert losses(tmp_path) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}], ids=str)
def test_losses_are_the_same_on_other_meshes(chats, whole, tmp_path, mesh):
    changes = {f"mesh.{axis}": ranks for axis, ranks in mesh.items()} | {"pipeline.microbatches": 2}
    assert train(of_chats(chats, **changes), tmp_path).reason == "finished"
    np.testing.assert_allclose(losses(tmp_path), losses(whole), rtol=1e-5)


@pytest.mark.slow
def test_a_tuned_run_answers_with_the_template_of_its_chats(whole, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("qqq\n"))
    one_device = ["--pp=1", "--dp=1", "--tp=1", "--simulate=0"]
    assert generate.main([f"--workdir={whole}", "--chat", "--tokens=12", "--temperature=0", *one_device]) == 0
    printed = capsys.readouterr()
    template = whole / "checkpoints" / "8" / "chat_template.jinja"
    assert f"{template}; 160 tokens of context" in printed.err
    prompt = "<|im_start|>user\nqqq<|im_end|>\n<|im_start|>assistant\n"
    after = px.load(whole).generate(prompt, tokens=12, temperature=0.0, stop="<|im_end|>").removeprefix(prompt)
    assert printed.out == f"{after}\n" and after


@pytest.mark.slow
def test_other_text_is_evaluated_with_the_settings_that_it_has(whole, chats, corpus):
    settings = load_settings(whole)
    of_text = evaluate(whole, settings, data=str(corpus / "00.txt"))
    assert of_text.tokens == len((corpus / "00.txt").read_text())
    of_chat = evaluate(whole, settings, data=str(chats))
    assert 0 < of_chat.tokens < chats.stat().st_size


def test_a_wrong_conversation_stops_a_run_before_anything_is_compiled(tmp_path):
    file = write_chats(tmp_path / "c.jsonl", [turn("Hi", "Yes")] * 9)
    with file.open("a") as opened:
        opened.write(json.dumps({"messages": [{"role": "bot", "content": "Hi"}]}) + "\n")
    with pytest.raises(DataError, match="c.jsonl:10: message 1 has the role 'bot'"):
        train(of_chats(file), tmp_path / "run")
