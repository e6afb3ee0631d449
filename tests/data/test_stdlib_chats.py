"""Conversations made from documentation strings."""

import json

import pytest

from parallax.cli import data
from parallax.data.stdlib_chats import HOW, WHAT, conversations

MODULE = '''
"""A module."""
import not_there_at_all


def area(width, *, height=1):
    """The area of a rectangle,
    in squares.

    More about it.
    """


def _hidden():
    """No public function."""


def silent():
    pass


class Shape:
    """A closed curve."""

    def turned(self, degrees):
        """The shape after a turn."""

    def long(self):
        """LONG"""
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shapes.py").write_text(MODULE.replace("LONG", "Much " * 100))
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "test_shapes.py").write_text('def f():\n    """A test."""\n')
    return tmp_path


def told(made):
    return [[message["content"] for message in conversation["messages"]] for conversation in made]


def test_each_documented_name_is_asked_for_in_all_words_but_one_and_in_that_one_where_held_out(folder):
    answers = ["The area of a rectangle, in squares.", "A closed curve.", "The shape after a turn."]
    names = ["shapes.area", "shapes.Shape", "shapes.Shape.turned"]
    calls = [["shapes.area(width, *, height=1)"], [], ["shapes.Shape.turned(self, degrees)"]]
    rows = list(zip(names, answers, calls, strict=True))
    asked = told(conversations(folder, held_out=True))
    assert asked == [
        [WHAT[place].format(name), answer, *[text for call in calls for text in (HOW[place], call)]]
        for place, (name, answer, calls) in enumerate(rows)
    ]
    trained = told(conversations(folder))
    assert len(trained) == 3 * len(rows) and not {one[0] for one in trained} & {one[0] for one in asked}
    assert {(one[0], one[1]) for one in trained + asked} == {
        (words.format(name), answer) for name, answer, _ in rows for words in WHAT
    }


def test_the_command_writes_a_conversation_a_line(tmp_path, capsys):
    out = tmp_path / "asked.jsonl"
    assert data.main(["conversations", f"--out={out}", "--held-out"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert capsys.readouterr().out == f"{len(lines)} conversations in {out}\n" and len(lines) > 1000
    assert {message["role"] for line in lines for message in line["messages"]} == {"user", "assistant"}


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, capsys):
    assert data.main(["conversations", f"--out={tmp_path / 'none' / 'x.jsonl'}"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: --out=")
