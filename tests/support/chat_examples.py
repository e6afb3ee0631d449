"""Conversations, files of them, and readers of these files."""

import json

import numpy as np

from parallax.data import open_reader
from support.data_examples import data_config

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds <b>.", "parameters": {}}}


def turn(user, assistant):
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def conversations(count, *, turns=3, letters=20, seed=0):
    """Conversations whose users say q and whose assistants say a, of different lengths."""
    random = np.random.default_rng(seed)

    def text(letter):
        return letter * int(random.integers(1, letters))

    counts = random.integers(1, turns + 1, count)
    return [[each for _ in range(many) for each in turn(text("q"), text("a"))] for many in counts]


def write_chats(file, chats, **fields):
    file.write_text("".join(json.dumps({"messages": chat, **fields}, ensure_ascii=False) + "\n" for chat in chats))
    return file


def chat_config(file, **changes):
    defaults = dict(source="jsonl", format="chat", chat_template="chatml", seq=128, global_batch=4, eval_fraction=0.0)
    return data_config(path=str(file), **(defaults | changes))


def chat_reader(file, folder, *, split="train", rows=None, columns=None, **changes):
    config = chat_config(file, **changes)
    return open_reader(config, folder=folder, vocab=None, split=split, rows=rows, columns=columns)


def learned_text(batch, row):
    """The letters that are predicted in a row, with a line between parts that do not touch."""
    labels = batch["labels"][row]
    text = "".join(chr(label) if 0 <= label < 256 else "\n" for label in labels)
    return [part for part in text.split("\n") if part]
