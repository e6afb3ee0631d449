"""docs/text-to-chat.md at its smallest size: text, tokenizer, pretraining, conversations, fine-tuning, answers."""

import json

import pytest

from configs.text_to_chat import get_config
from parallax.cli import data, generate
from parallax.cli.evaluate import evaluate
from parallax.config.settings import load_settings
from parallax.data.stdlib_chats import conversations
from parallax.data.tokenizer import load_tokenizer
from parallax.training.run import train

MARKS = ["<|im_start|>", "<|im_end|>"]
DOCUMENTED = {
    "area": "The size of a surface.",
    "weight": "How heavy a body is.",
    "colour": "What the eye sees of light.",
    "sound": "Waves that an ear can hear.",
    "speed": "The way that is gone in a second.",
    "warmth": "What a stove gives to a room.",
}
SIZES = {"layers": 2, "d_model": 64, "d_ff": 128, "heads": 4, "kv_heads": 2, "d_head": 16, "vocab": 400}


def write_module(folder):
    folder.mkdir()
    text = "\n\n\n".join(f'def {name}(body):\n    """{said}"""\n' for name, said in DOCUMENTED.items())
    (folder / "physics.py").write_text(text)
    return folder


def write_chats(file, **options):
    file.write_text("".join(json.dumps(chat) + "\n" for chat in conversations(file.parent / "text", **options)))
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a text, its shards and tokenizer, and conversations about it."""
    folder = tmp_path_factory.mktemp("recipe")
    text = write_module(folder / "text")
    flags = ["--source", "text", "--path", str(text), "--tokenizer", "bpe", "--bpe-vocab", "400", "--reserve", *MARKS]
    assert data.main(["prepare", *flags, "--out", str(folder / "shards")]) == 0
    write_chats(folder / "chats.jsonl")
    write_chats(folder / "held_out.jsonl", held_out=True)
    return folder


def smallest(changes):
    """The recipe's config with a model and windows of a test."""
    config = get_config()
    config.mesh.simulate = 1
    config.model.update(SIZES)
    config.data.update({"seq": 96, "global_batch": 4, "eval_fraction": 0.0} | changes)
    config.train.update({"eval_batches": 0, "eval_every_steps": 0})
    config.optimizer.warmup_steps = 2
    return config


def of_text(made):
    config = smallest({"path": str(made / "shards"), "global_batch": 1})
    config.train.steps = 10
    return config


def of_chats(made, run):
    about = {"source": "jsonl", "path": str(made / "chats.jsonl"), "format": "chat", "chat_template": "chatml"}
    config = smallest(about)
    config.train.update({"steps": 120, "init_from": str(run)})
    return config


def test_the_marks_of_a_chat_are_tokens_of_the_texts_own_tokenizer(made):
    tokenizer = load_tokenizer(made / "shards")
    marks = [tokenizer.special_id(mark) for mark in MARKS]
    ids = tokenizer.encode(f"{MARKS[0]}user\nHi{MARKS[1]}\n", special_tokens="tokens").tolist()
    assert [ids[0], ids[-2]] == marks
    assert not {*marks} & {*tokenizer.encode("".join(MARKS)).tolist()}  # of a text they are none


@pytest.mark.slow
def test_a_model_of_text_learns_to_answer_in_words_that_it_was_not_asked_in(made, tmp_path, capsys):
    text, chat = tmp_path / "runs" / "text", tmp_path / "runs" / "chat"
    assert train(of_text(made), text).reason == "finished"
    assert train(of_chats(made, text), chat).reason == "finished"

    settings, held_out = load_settings(chat), str(made / "held_out.jsonl")
    before, after = (evaluate(run, settings, data=held_out) for run in (text, chat))
    assert before.tokens == after.tokens and after.loss < before.loss / 4

    asked = [json.loads(line)["messages"] for line in (made / "held_out.jsonl").open()]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"messages": chat[:1]}) + "\n" for chat in asked))
    capsys.readouterr()
    flags = [f"--workdir={chat}", f"--prompts={tmp_path / 'q.jsonl'}", "--temperature=0", "--tokens=40"]
    assert generate.main(flags) == 0
    answers = [json.loads(line)["messages"][-1]["content"] for line in capsys.readouterr().out.splitlines()]
    assert answers == [chat[1]["content"] for chat in asked]
