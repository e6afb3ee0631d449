"""What --help prints, of every command; flags have dashes, and the underscores of other projects are taken, too."""

import pathlib
import re
import subprocess
import sys

import pytest
from support.command_modules import command

from parallax.cli import train
from parallax.cli.command import Flag, read_line

ROOT = pathlib.Path(train.__file__).parents[2]
ABSL = ("plan", "report", "evaluate", "parity", "replay")
PARSED = ("generate", "convert", "watch", "data", "schedules")
COMMANDS = {"train": train, **{name: command(name) for name in (*ABSL, *PARSED, "launch")}}
PARTS = [("convert", act) for act in ("export", "import", "from-hf", "to-hf")]
PARTS += [("data", act) for act in ("prepare", "inspect")]


def printed(name, *words, capsys, monkeypatch):
    """What a command prints; its status is 0, and nothing is on stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    main = COMMANDS[name].main
    try:
        status = main([name, *words]) if name == "train" or name in ABSL else main([*words])
    except SystemExit as ended:
        status = ended.code or 0
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return captured.out


@pytest.mark.parametrize("words", [(name,) for name in COMMANDS] + PARTS, ids=" ".join)
def test_help_says_what_a_command_does_shows_examples_and_ends_with_its_flags(words, capsys, monkeypatch):
    out = printed(*words, "--help", capsys=capsys, monkeypatch=monkeypatch)
    about, _, rest = out.partition("usage: ")
    sentence, *others = about.split("\n")
    assert re.fullmatch(r"[A-Z][^`]{20,}[.,:;][^`]*", sentence) and "".join(others).strip()
    example = f"    python -m parallax.{words[0].removesuffix('.__main__')} "
    assert ("    python train.py " if words[0] == "train" else example) in about
    *_, flags = rest.strip().split("\n\n")
    assert re.match(r"(flags|options):\n  -", flags)
    assert max(map(len, rest.splitlines())) <= 82  # argparse breaks no pair of flags


@pytest.mark.parametrize("name", ["train", *ABSL])
def test_help_has_every_flag_of_a_command_and_no_key_of_configs(name, capsys, monkeypatch):
    out = printed(name, "--help", capsys=capsys, monkeypatch=monkeypatch)
    lines = out.partition("flags:\n")[2].splitlines()
    shown = [found[1] for line in lines if (found := re.match(r"  --([\w.=-]+)  ", line))]
    named = {flag for flag in shown if not flag.startswith("config")}
    assert named == {*COMMANDS[name].FLAGS, "help", "help-config"}
    assert "config.model" not in out and max(map(len, lines)) <= 80
    keys = printed(name, "--help-config", capsys=capsys, monkeypatch=monkeypatch)
    assert "  --config.model.layers = 4  # number of blocks of attention and MLP" in keys


def test_help_config_is_there_where_argparse_reads_the_line(capsys, monkeypatch):
    keys = printed("convert", "from-hf", "--help-config", capsys=capsys, monkeypatch=monkeypatch)
    assert "  --config.model.layers = 4  # number of blocks of attention and MLP" in keys


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_have_dashes(name, capsys, monkeypatch):
    out = printed(name, "--help", capsys=capsys, monkeypatch=monkeypatch)
    assert not re.findall(r"--(?!config\.)[\w.-]*_", out)


def test_the_package_as_a_program_lists_every_command_and_what_it_does():
    run = lambda *words: subprocess.run(  # noqa: E731
        [sys.executable, "-X", "importtime", "-m", "parallax", *words], cwd=ROOT, capture_output=True, text=True
    )
    listed = run()
    names = [line.split("  ")[0] for line in listed.stdout.splitlines()[:-2]]
    assert names == [f"python -m parallax.{name}" for name in sorted({*COMMANDS, "firstrun"})]
    assert "python -m parallax.generate   Generate text with a trained model.\n" in listed.stdout
    assert listed.returncode == 0 and "| jax\n" not in listed.stderr and run("--help").stdout == listed.stdout
    for word, said in {"generate": "write python -m parallax.generate", "genrate": "did you mean 'generate'?"}.items():
        wrong = run(word)
        assert wrong.returncode == 2 and not wrong.stdout and said in wrong.stderr.splitlines()[-1]


OWN = {"run-name": Flag(""), "trace-only": Flag("", False), "workdir": Flag("")}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--run_name=a_b"], ("a_b", False)),
        (["--run-name", "a_b", "--trace_only"], ("a_b", True)),
        (["--trace-only", "--notrace_only"], (None, False)),
    ],
    ids=str,
)
def test_flags_are_read_with_underscores_too_and_values_keep_theirs(words, values):
    found = read_line(["train.py", "--config=configs/base.py", *words], OWN).values
    assert (found["run-name"], found["trace-only"]) == values


def test_flags_that_argparse_reads_have_underscores_too_and_what_is_launched_keeps_its_own():
    words = ["prepare", "--source=moby", "--bpe_vocab=300", "--out=o", "--tokenizer=bpe"]
    assert COMMANDS["data"].parser().parse_args(words).bpe_vocab == 300
    words = ["--processes=2", "--grace_secs=3", "--", "train.py", "--run_name=a", "--grace_secs=4"]
    started = COMMANDS["launch"].parser().parse_args(words)
    assert started.grace_secs == 3 and started.command[-2:] == ["--run_name=a", "--grace_secs=4"]


@pytest.mark.parametrize(("name", "words"), [("data", ["prepare"]), ("launch", ["train.py"]), ("schedules", ["--x"])])
def test_a_line_that_argparse_cannot_read_is_one_line(name, words, capsys):
    assert COMMANDS[name].main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ") and error.count("\n") == 1
