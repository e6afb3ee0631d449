"""A conversation on the terminal, text as it comes, and a file of prompts in batches."""

import dataclasses
import io
import json
import shutil
import sys

import pytest

import parallax as px
from parallax.cli.generate import main
from parallax.data.chat import ChatTemplate
from parallax.data.tokenizer import Bytes
from parallax.inference.chat import Conversation, texts_as_they_come

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
ONE_DEVICE = ["--pp=1", "--dp=1", "--tp=1", "--simulate=0"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_are_whole_letters_and_hold_no_part_of_a_stop(size):
    text = "Zażółć 🙂 gęślą<|end|>jaźń"
    ids = Bytes().encode(text).tolist()
    batches = [ids[place : place + size] for place in range(0, len(ids), size)]
    pieces = list(texts_as_they_come(Bytes().decode, batches, ["<|end|>", "nowhere"]))
    assert "".join(pieces) == "Zażółć 🙂 gęślą" and len(pieces) > 2
    assert not any("\ufffd" in piece for piece in pieces)
    cut = "".join(texts_as_they_come(Bytes().decode, [ids[:3], [0xC5]], ["<|end|>"]))
    assert cut == "Za\ufffd\ufffd", "what stays broken is shown at the end"


@pytest.fixture
def chatting(whole_run, tmp_path, monkeypatch, capsys):
    """A conversation of these lines: its status, stdout and stderr."""
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN_TEMPLATE)

    def chat(*lines, flags=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        words = [f"--workdir={whole_run}", "--chat", f"--template={template}", "--temperature=0", *ONE_DEVICE, *flags]
        return main(words), *capsys.readouterr()

    return chat


def test_a_conversation_has_its_history_until_it_is_reset(chatting, whole_run):
    status, out, err = chatting("It", "Is", "/reset", "It", "/exit", "never", flags=["--tokens=3"])
    run, template = px.load(whole_run), ChatTemplate(PLAIN_TEMPLATE, "plain")
    sample = dataclasses.replace(run.settings.sample, tokens=3, temperature=0.0)
    talk = Conversation(run, template, sample, context=32)
    first, second = ("".join(talk.answer(text)) for text in ("It", "Is"))
    assert status == 0 and out == f"{first}\n{second}\n{first}\n" and "context; /reset begins anew" in err
    prompt = "".join(f"{message['content']}\n" for message in talk.messages[:3])
    assert run.generate(prompt, tokens=3, temperature=0.0) == prompt + second


def test_a_context_that_is_full_is_said_and_a_system_message_stands_first(chatting):
    status, out, err = chatting("a" * 40, "/reset", "It", flags=["--tokens=2", "--system=s"])
    assert status == 0 and "the context is full: 43 of 32 tokens (data.seq); /reset begins anew" in err
    assert len(out.encode()) > 2


FILE = ["It is", "A truth universally acknowledged, that", "x", "It is not"]


def test_a_file_of_prompts_is_answered_as_one_after_another(whole_run, tmp_path, capsys):
    texts, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    texts.write_text("\n\n".join(FILE))
    lines.write_text("".join(json.dumps({"prompt": prompt, "id": prompt[:2]}) + "\n" for prompt in FILE))
    common = [f"--workdir={whole_run}", "--tokens=6", "--temperature=0", "--rows=2", *ONE_DEVICE]
    assert main([*common, f"--prompts={texts}"]) == 0
    printed = capsys.readouterr()
    assert main([*common, f"--prompts={lines}", f"--out={tmp_path / 'out.jsonl'}"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    run = px.load(whole_run)
    alone = [run.generate(prompt, tokens=6, temperature=0.0) for prompt in FILE]
    assert [line["prompt"] + line["completion"] for line in answers] == alone
    assert [line["id"] for line in answers] == [prompt[:2] for prompt in FILE]
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line | {"id": line["prompt"][:2]} for line in lines] == answers
    assert "tokens in " in printed.err and "tokens/s" in printed.err


def test_answers_that_are_there_stay_until_there_are_others(whole_run, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("It is\n")
    (tmp_path / "out.jsonl").write_text("of yesterday\n")
    files = [f"--prompts={tmp_path / 'prompts.txt'}", f"--out={tmp_path / 'out.jsonl'}"]
    assert main([f"--workdir={whole_run}", "--step=999", *files, *ONE_DEVICE]) > 0
    assert (tmp_path / "out.jsonl").read_text() == "of yesterday\n"
    assert main([f"--workdir={whole_run}", files[0], f"--out={tmp_path}", *ONE_DEVICE]) == 2
    assert f"ConfigError: --out={tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


def test_messages_in_a_file_get_an_answer(whole_run, tmp_path, capsys):
    template, lines = tmp_path / "plain.jinja", tmp_path / "asked.jsonl"
    template.write_text(PLAIN_TEMPLATE)
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "It"}]}))
    words = [f"--workdir={whole_run}", f"--prompts={lines}", f"--template={template}", "--tokens=2", "--rows=2"]
    assert main([*words, "--temperature=0", *ONE_DEVICE]) == 0
    asked, answered = json.loads(capsys.readouterr().out)["messages"]
    assert asked["content"] == "It" and answered["role"] == "assistant"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "missing.txt", "missing.txt does not exist"),
        ("\n \n", "empty.txt", "empty.txt has no prompts; write one in each line"),
        ('{"prompt": "a"}\n{', "half.jsonl", "half.jsonl, line 2 is not JSON: "),
        ('{"prompt": 3}', "number.jsonl", 'line 1 is {\'prompt\': 3}; write {"prompt": "text"} or '),
        ('{"messages": ["a"]}', "word.jsonl", 'line 1 has the message \'a\'; write {"role": "user"'),
    ],
)
def test_a_wrong_file_of_prompts_is_one_line(whole_run, tmp_path, capsys, content, name, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main([f"--workdir={whole_run}", f"--prompts={tmp_path / name}"]) > 0
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat", "--prompt=a"], "--chat and --prompt are two ways to generate; leave one out"),
        (["--prompt=a", "--system=b"], "--system needs --chat"),
        (["--prompt=a", "--out=b"], "--out needs --prompts"),
        (["--prompts=a", "--rows=0"], "--rows=0 must be 1 or more"),
        (["--prompts=a", "--template=chatml"], "--template=chatml is for messages, and a has none; leave it out"),
        (["--chat", "--template=nothing"], "--template='nothing' is no file; name one, or one of chatml, gemma"),
        (["--chat"], "has no chat template"),
    ],
)
def test_what_does_not_fit_together_is_one_line(whole_run, tmp_path, capsys, monkeypatch, flags, message):
    (tmp_path / "a").write_text("It")
    monkeypatch.chdir(tmp_path)
    assert main([f"--workdir={whole_run}", *flags, *ONE_DEVICE]) > 0
    assert message in capsys.readouterr().err.splitlines()[-1]


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + PLAIN_TEMPLATE
OF_SYSTEM = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "It"}]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat"], "has no chat template"),
        (["--chat", "--template=nothing"], "--template='nothing' is no file; name one, or one of chatml"),
        (["--chat", "--template=no_system.jinja", "--system=s"], "refuses the messages: no system here"),
        (["--prompts=asked.jsonl", "--template=no_system.jinja"], "refuses the messages: no system here"),
        (["--prompts=asked.jsonl"], "has no chat template"),
    ],
)
def test_a_template_is_refused_before_a_model_is_loaded(whole_run, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parallax.cli.generate.load_trained", lambda *_: pytest.fail("it was loaded"))
    (tmp_path / "no_system.jinja").write_text(NO_SYSTEM)
    (tmp_path / "asked.jsonl").write_text(json.dumps(OF_SYSTEM))
    assert main([f"--workdir={whole_run}", *flags, *ONE_DEVICE]) > 0
    assert message in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(pytest.fail.Exception):  # without a system's message it answers
        main([f"--workdir={whole_run}", "--chat", "--template=no_system.jinja", *ONE_DEVICE])


def test_a_step_whose_template_is_damaged_does_not_end_a_conversation_with_the_one_before(
    whole_run, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    newest = max((run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    shutil.copytree(newest, newest.with_name(str(int(newest.name) + 1)))
    (newest / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    (newest.with_name(str(int(newest.name) + 1)) / "chat_template.jinja").write_text("{% for")
    monkeypatch.setattr("parallax.cli.generate.load_trained", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(pytest.fail.Exception):
        main([f"--workdir={run}", "--chat", *ONE_DEVICE])
