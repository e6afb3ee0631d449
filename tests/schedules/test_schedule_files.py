"""Schedules in CSV files, and the command that prints, prices and saves them."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from support.random_schedules import random_schedules

from parallax.cli.schedules import main
from parallax.errors import ConfigError
from parallax.schedules import SCHEDULES, ScheduleError, accumulate, by_name, figures, gpipe, load_csv, save_csv

GOOD = "0F0,0F1,,0B0,0B1\n,1F0+1B0,1F1+1B1\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "mine.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@given(random_schedules())
def test_a_schedule_comes_back_from_its_file(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("csv") / "random.csv"
    save_csv(schedule, path)
    loaded = load_csv(path)
    assert loaded.tick_of == schedule.tick_of
    assert (loaded.name, loaded.placement, loaded.head) == (schedule.name, schedule.placement, "inside")
    assert figures(loaded) == figures(schedule)
    save_csv(loaded, path)
    assert load_csv(path) == loaded
    assert [file.name for file in path.parent.iterdir()] == ["random.csv"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_named_schedules_come_back_from_their_files(tmp_path, name):
    for ranks, microbatches in [(2, 1), (4, 8), (3, 7)]:
        save_csv(by_name(name, ranks, microbatches), tmp_path / f"{name}.csv")
        assert load_csv(tmp_path / f"{name}.csv").grid() == by_name(name, ranks, microbatches).grid()


def test_a_cell_says_whether_forward_and_backward_are_one_pass(write):
    apart, joint = "0F0,0F1,,0B0,0B1\n,1F0,1F1+1B0,1B1\n", "0F0,0F1,,0B0,0B1\n,1F0,1F1 & 1B0,1B1\n"
    assert not load_csv(write(apart)).joint
    assert load_csv(write(joint)).joint and load_csv(write(joint)).grid() == load_csv(write(apart)).grid()


def test_ticks_stay_where_they_were_written(write):
    schedule = load_csv(write("0F0,,,,0B0\n,,1F0,1B0\n"))
    assert sorted(schedule.tick_of.values()) == [0, 2, 3, 4]


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("+", " + ").replace(",", " , "),
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("1F0+1B0", '"1B0+1F0"'),
        GOOD.replace("\n", ",,,\n") + ",,,,,,\n\n",
        "\ufeff" + GOOD,
    ],
)
def test_spaces_line_ends_quotes_and_empty_cells_at_the_end_make_no_difference(write, text):
    assert load_csv(write(text)) == load_csv(write(GOOD))


@pytest.mark.parametrize(
    ("text", "message", "marked"),
    [
        (GOOD.replace("1F1", "1X1"), "unreadable, rank 1, tick 2: '1X1' is not an action", {">1X1+1B1<"}),
        (GOOD.replace("1F1", "9" * 5000 + "F1"), "unreadable, rank 1, tick 2", None),
        (GOOD.replace(",0B1", ""), "missing: 0B1 on rank 0", set()),
        (GOOD.replace("0F1", "0F0"), "repeated: 0F0 on rank 0", {">0F0<"}),
        (
            "0F0,0F1+0B0,,0B1\n,1F0+1B0,1F1+1B1\n",
            "dependency broken: 0B0 in tick 1 reads 1B0 of tick 1, so tick 2 is its soonest",
            {"0F1+>0B0<"},
        ),
        ("0F0,0F1,,0B0+0B1\n,1F0+1B0,1F1+1B1\n", "slot clash: 0B0 and 0B1 are both in tick 3", {">0B0<+>0B1<"}),
        ("0F0,1F1\n,1F0,1B0", "stage 1 is on rank 0 and rank 1", {">1F1<"}),
        ("0F0\n2F0\n", "missing: stage 1, though there is stage 2", {">2F0<"}),
        ("0F0,0F1000000000\n1F0\n", "missing: microbatch 1, though", {">0F1000000000<"}),
        ("0F0,1F0,1B0,0B0\n\n2F0,2B0\n", "do not fit 3 ranks", set()),
        (
            "0F0,0F1,,0B0&0B1\n,1F0,1F1,1B0+1B1\n",
            "'0B0&0B1' is not F&B; write & between one F and one B",
            {">0B0&0B1<"},
        ),
        (
            "0F0,0F1,,0F2,0B0,0B1,0B2\n,1F0,1F1&1B0,1B1,1F2+1B2\n",
            "'1F1&1B0' is one pass, '1F2+1B2' is two; write & in all cells with F and B, or + in all",
            {">1F2+1B2<"},
        ),
        ("0F0,0F1,,0B0,0B1\n,1F0&1B0,1F1,1B1\n", "1B0 in tick 1 reads 1F0 of tick 1, so tick 2 is", {"1F0&>1B0<"}),
    ],
)
def test_a_wrong_file_is_refused_with_its_grid_and_the_cell(write, text, message, marked):
    path = write(text)
    with pytest.raises(ScheduleError) as caught:
        load_csv(path)
    first, *grid = str(caught.value).splitlines()
    assert first.startswith("schedule 'mine': ") and message in first
    assert [line.split()[0] for line in grid] == ["tick", *["rank"] * (text.rstrip().count("\n") + 1)]
    assert marked is None or {cell for line in grid for cell in line.split() if ">" in cell} == marked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b",,\n\n", "is empty"),
        (b"\xff\xfe0F0", "is not a text file in UTF-8"),
        (b"," * (1 << 24) + b"0F0", "cannot be read: it has more than"),
    ],
)
def test_a_file_without_a_schedule_is_refused(write, content, message):
    with pytest.raises(ScheduleError, match=message):
        load_csv(write(content))


def test_a_file_that_cannot_be_opened_is_refused(write, tmp_path):
    write(GOOD, "mine.csv")
    with pytest.raises(ScheduleError, match="mein.csv does not exist; did you mean '.*mine.csv'"):
        load_csv(tmp_path / "mein.csv")
    (tmp_path / "their.csv").symlink_to("nowhere")
    with pytest.raises(ScheduleError, match=r"their\.csv does not exist\."):
        load_csv(tmp_path / "their.csv")
    with pytest.raises(ScheduleError, match="cannot be read: Is a directory"):
        load_csv(tmp_path)
    with pytest.raises(ScheduleError, match="nowhere.*cannot be written: No such file"):
        save_csv(gpipe(2, 2), tmp_path / "nowhere" / "x.csv")


def test_a_file_takes_the_place_of_a_name(write):
    path = str(write(GOOD))
    assert by_name(path, 2, 2) == load_csv(path)
    assert by_name(path, 1, 2) == accumulate(2)
    with pytest.raises(ConfigError, match="mine.csv' is of 2 ranks, and mesh.pp=4; use mesh.pp=2"):
        by_name(path, 4, 2)
    for ranks in (1, 2):
        with pytest.raises(
            ConfigError, match="2 microbatches, and pipeline.microbatches=3; use pipeline.microbatches=2"
        ):
            by_name(path, ranks, 3)
    with pytest.raises(ConfigError, match="pipeline.virtual=2 does nothing"):
        by_name(path, 2, 2, virtual=2)


# ---- python -m parallax.schedules


def run(arguments: str) -> int:
    return main(arguments.split())


def test_the_command_prints_the_grid_and_the_figures(capsys):
    assert run("one_f_one_b --stages 4 --microbatches 8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one_f_one_b ranks=4 stages=4 microbatches=8"
    assert {
        "ticks 14",
        "lockstep bubble 27.3 %",
        "asynchronous bubble 27.3 %",
        "slots F to B 7",
    } <= set(lines)
    assert lines[2].split()[:5] == ["rank", "0", "0F0", "0F1", "0F2"]
    assert "\033" not in "".join(lines)


def test_the_command_saves_draws_and_reads_what_it_saved(capsys, tmp_path):
    csv, svg = tmp_path / "mine.csv", tmp_path / "mine.svg"
    assert run(f"interleaved --stages 2 --microbatches 4 --virtual 2 --csv {csv} --svg {svg}") == 0
    printed = capsys.readouterr().out.splitlines()[1:]
    assert svg.read_text().startswith("<svg")
    assert main([str(csv)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == printed
    assert main([str(csv), "--svg", str(svg), "--asynchronous", "--tf", "2", "--send", "0.5"]) == 0
    assert "drawn asynchronous" in svg.read_text()


def test_the_command_compares_all_schedules(capsys):
    assert run("--compare --stages 4 --microbatches 8") == 0
    table, _, beneath = capsys.readouterr().out.partition("\n\n")
    heading, *rows = table.splitlines()
    assert " ".join(heading.split()) == "schedule ticks lockstep bubble asynchronous bubble most activations most sends"
    both = ["interleaved v=2", "interleaved v=4"]
    assert [row[:15].strip() for row in rows] == [
        "gpipe",
        "one_f_one_b",
        *both,
        "zero_bubble",
        "zero_bubble_v",
        "dualpipe_v",
    ]
    assert rows[4].split() == ["zero_bubble", "14", "20.0", "%", "11.1", "%", "7", "16"]
    assert beneath.startswith("The executor runs in lockstep; papers count asynchronous.\nzero_bubble_v has ZB-V's")


def test_a_terminal_gets_colours_and_lines_that_fit_it(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("zero_bubble --stages 4 --microbatches 8") == 0
    grid = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("tick ", "rank "))]
    assert all(len(line) <= 60 for line in grid)
    assert [t for line in grid if line.startswith("tick") for t in line.split()[1:]] == [str(t) for t in range(14)]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    assert run("zero_bubble --stages 4 --microbatches 8") == 0
    assert "\033[34m0F0\033[0m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("one_f_one --stages 4 --microbatches 8", "did you mean 'one_f_one_b'"),
        ("gpipe --stages 4", "--microbatches is missing"),
        ("--stages 4 --microbatches 8", "no schedule was named"),
        ("gpipe --stages 4 --microbatches 8 --virtual 2", "virtual=2 does nothing"),
        ("gpipe --stages 4 --microbatches 8 --tw 3", "--tw=3 is more than --tb=2"),
        ("gpipe --stages 4 --microbatches 8 --tf 0 --tb 0 --tw 0", "--tf=0 and --tb=0: there is no work"),
        ("gpipe --stages 4 --microbatches 8 --hidden 1", "--hidden=1 does nothing: of gpipe no F and B are one pass"),
        ("gpipe --stages 4 --microbatches 8 --csv=", "--csv='' names no file"),
        ("gpipe --stages 4 --microbatches 8 --asynchronous", "--asynchronous says how --svg=FILE is drawn"),
        ("gpipe --stages 4 --microbatches 8 --svg nowhere/a.svg", "nowhere/a.svg cannot be written"),
        ("--compare --stages 4 --microbatches 8 --csv a.csv", "--csv=a.csv needs the name"),
        ("absent.csv", "absent.csv does not exist"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(capsys, arguments, message):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and "Error: " in error


@pytest.mark.parametrize("wrong", ["0", "-1", "x", "1.5"])
def test_numbers_below_one_are_refused(capsys, wrong):
    assert main(["gpipe", f"--stages={wrong}", "--microbatches", "8"]) == 2
    assert f"'{wrong}' is not a whole number from 1" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["-1", "nan", "x", "1e-300", "inf"])
def test_times_that_cannot_be_are_refused(capsys, wrong):
    assert main(["gpipe", "--stages=2", "--microbatches=8", f"--tf={wrong}"]) == 2
    assert f"--tf: '{wrong}' is not a time: 0, or a number from 1e-09 to 1e+09" in capsys.readouterr().err


def test_a_file_of_other_sizes_than_the_command_says_is_refused(capsys, write):
    assert main([str(write(GOOD)), "--stages", "3"]) == 2
    assert "--stages=3, but" in capsys.readouterr().err


def test_the_command_runs_as_a_module_and_minds_no_closed_pipe():
    command = [sys.executable, "-m", "parallax.schedules", "gpipe", "--stages=8", "--microbatches=400"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root) as process:
        assert process.stdout.readline() == b"gpipe ranks=8 stages=8 microbatches=400\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
