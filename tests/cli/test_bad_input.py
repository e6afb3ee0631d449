"""What a user can get wrong is one line that quotes, measures and advises, before anything is compiled."""

import os
import pathlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_modules import command as module_of
from support.run_examples import tiny_config

from parallax.cli import train as command_line
from parallax.cli.command import read_line
from parallax.errors import ConfigError, ParallaxError, why_not_local
from parallax.inference.run import load
from parallax.training.run import train

ROOT = pathlib.Path(command_line.__file__).parents[2]
BASE = "--config=configs/tiny_gqa.py"


def command(*arguments, capsys):
    """Exit status and the error of a command line, run in this process."""
    status = command_line.main(["train.py", *arguments])
    captured = capsys.readouterr()
    assert not captured.out and len(captured.err.splitlines()) == 1
    return status, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [BASE, "--config.mesh.tpp=4"],
            "unknown key --config.mesh.tpp; did you mean 'tp'? Known: pp, dp, tp, simulate",
        ),
        ([BASE, "--config.messh.tp=4"], "unknown key --config.messh.tp; did you mean --config.mesh.tp?"),
        ([BASE, "--config.steps=5"], "unknown key --config.steps; did you mean --config.train.steps?"),
        ([BASE, "--config.mesh=4"], "--config.mesh is a section; write --config.mesh.<key>, one of pp, dp, tp"),
        ([BASE, "--config.mesh.tp=two"], "--config.mesh.tp=two must be a whole number"),
        ([BASE, "--config.train.steps=4.5"], "--config.train.steps=4.5 must be a whole number"),
        ([BASE, "--config.train.tensorboard=perhaps"], "--config.train.tensorboard=perhaps must be True or False"),
        ([BASE, "--config.mesh.tp"], "Missing value for flag --config.mesh.tp"),
        (["lr=3"], "stray argument 'lr=3'; did you mean --config.optimizer.learning_rate=3?"),
        (["configs/base.py"], "stray argument 'configs/base.py'; did you mean --config=configs/base.py?"),
        ([BASE, "lr=3"], "stray argument 'lr=3'; did you mean --config.optimizer.learning_rate=3?"),
        ([BASE, "config.mesh.tp=4"], "stray argument 'config.mesh.tp=4'; did you mean --config.mesh.tp=4?"),
        ([BASE, "--workdirr=x"], "unknown flag --workdirr; did you mean '--workdir'?"),
        ([BASE, "--model.layers=8"], "unknown flag --model.layers; did you mean --config.model.layers?"),
        ([BASE, "--modl.layer=8"], "unknown flag --modl.layer; did you mean --config.model.layers?"),
        ([BASE, "--learning-rate=1"], "unknown flag --learning-rate; did you mean --config.optimizer.learning_rate?"),
        ([BASE, "--distributed.cordinator=a"], "did you mean '--distributed.coordinator'? Known: --config, --workdir"),
        ([BASE, "--resume=maybe"], "value should be one of <auto|must|never>"),
        ([BASE, "--run-name=../x"], "--run-name='../x' is not a valid name of a run"),
        ([BASE, "--run-name=" + "x" * 101], "is not a valid name of a run; use 1 to 100 letters"),
        ([BASE, "--run-name=a", "--workdir=b"], "--workdir=b and --run-name=a both name the run's folder; give one"),
        ([BASE, "--workdir="], "--workdir='' is empty; leave it out, or write a value: the folder of the run"),
        (["--config=configs/quikstart.py"], "does not exist; did you mean 'configs/quickstart.py'?"),
        (
            ["--workdir=nowhere"],
            "--config is missing, and --workdir=nowhere holds no run to resume; use one of configs/base.py",
        ),
        ([BASE, "--config.optimizer.learning_rate=nan"], "optimizer.learning_rate=nan is not a number that float"),
        ([BASE, "--config.train.steps=0"], "train.steps=0 is too small; use 1 or more"),
        ([BASE, "--config.checkpoint.keep_last=0"], "checkpoint.keep_last=0 is too small; use 1 or more"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_with_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    status, error = command(*arguments, capsys=capsys)
    assert status == 2 and message in error and error.startswith("ConfigError: ")


@pytest.mark.parametrize("folder", ["elsewhere", "configs", "notebooks"])
@pytest.mark.parametrize(
    "written", ["configs/quickstart.py", "configs/quikstart.py", "quikstart", "/nowhere/quickstart.py"]
)
def test_a_config_that_is_suggested_in_another_folder_works_there(folder, written, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path if folder == "elsewhere" else ROOT / folder)
    status, error = command(f"--config={written}", capsys=capsys)
    where = "" if written.startswith("/") else f" in {os.getcwd()}"
    assert status == 2 and f"--config={written} does not exist{where}; did you mean '" in error
    suggested = re.search("did you mean '(.*?)'", error)[1]
    assert suggested != written
    read_without_the_repository_on_the_path(suggested, monkeypatch)


def read_without_the_repository_on_the_path(config, monkeypatch):
    """As an installed `python -m parallax.report` has it, whose path has the folder that one is in, and no other."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if (path or os.getcwd()) != str(ROOT)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    assert read_line(["report", f"--config={config}"], {}).config.mesh.pp == 2


def test_without_a_config_those_that_work_here_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, error = command(capsys=capsys)
    listed = error.strip().removeprefix("ConfigError: --config is missing; use one of ").split(", ")
    assert len(listed) > 4 and all(read_line(["report", f"--config={name}"], {}) for name in listed)


def test_a_folder_is_no_config_and_that_of_a_run_has_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert "--config=mine is a folder; name a file in it\n" in command("--config=mine", capsys=capsys)[1]
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert "name a file in it, as 'mine/config.json'" in command("--config=mine", capsys=capsys)[1]


BUCKET = "abfss://bucket/runs/mine"
OWN = ROOT
HERE = f"--config={OWN}/configs/tiny_gqa.py"
# A program, and its words for each path that it takes.
PATHS = {
    "train": [
        [HERE, f"--workdir={BUCKET}"],
        [f"--workdir={BUCKET}"],
        [f"--config={BUCKET}/config.py"],
        [HERE, "--config.data.source=text", f"--config.data.path={BUCKET}/*.txt"],
        [HERE, f"--config.data.cache={BUCKET}"],
        [HERE, f"--config.data.tokenizer={BUCKET}/tokenizer.json"],
        [HERE, f"--config.train.init_from={BUCKET}"],
        [HERE, f"--config.pipeline.schedule={BUCKET}/mine.csv"],
    ],
    "parallax.report": [[HERE, f"--html={BUCKET}.html"], [f"--trace={BUCKET}"]],
    "parallax.plan": [[HERE, "--sweep", f"--cache={BUCKET}"], [HERE, "--sweep", f"--svg={BUCKET}.svg"]],
    "parallax.evaluate": [[f"--workdir={BUCKET}"]],
    "parallax.replay": [[f"--workdir={BUCKET}", "--step=1"]],
    "parallax.generate": [["--workdir", BUCKET]],
    "parallax.watch": [[BUCKET], ["runs", "--svg", BUCKET]],
    "parallax.convert": [
        ["export", BUCKET, "out"],
        ["export", "runs", BUCKET],
        ["import", BUCKET, "out"],
        ["import", "source", BUCKET],
        ["from-hf", BUCKET, "--workdir=out"],
        ["from-hf", "source", f"--workdir={BUCKET}"],
        ["from-hf", "source", "--workdir=out", f"--config.data.path={BUCKET}"],
        ["to-hf", BUCKET, "out"],
        ["to-hf", "runs", BUCKET],
        ["to-hf", "runs", "out", "--like", BUCKET],
    ],
    "parallax.data": [
        ["prepare", "--source=text", f"--path={BUCKET}", "--tokenizer=bytes", "--out=out"],
        ["prepare", "--source=moby", f"--tokenizer={BUCKET}/t.json", "--out=out"],
        ["prepare", "--source=moby", "--tokenizer=bytes", f"--out={BUCKET}"],
        ["inspect", BUCKET],
    ],
    "parallax.schedules": [
        [f"{BUCKET}.csv"],
        ["gpipe", "--stages=2", "--microbatches=2", f"--svg={BUCKET}"],
        ["gpipe", "--stages=2", "--microbatches=2", f"--csv={BUCKET}"],
    ],
}


@pytest.mark.parametrize(("program", "words"), [(name, words) for name, lines in PATHS.items() for words in lines])
def test_a_url_is_refused_at_once_where_a_path_is_asked_for(program, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = command_line.main if program == "train" else module_of(program.removeprefix("parallax.")).main
    reads_its_name = program in ("train", "parallax.report", "parallax.plan", "parallax.evaluate", "parallax.replay")
    try:
        status = main([program, *words] if reads_its_name else words)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status == 2 and f"{BUCKET}" in said and "is a URL, and a path is needed; mount the bucket" in said
    assert not list(tmp_path.iterdir())


def test_a_url_is_refused_by_the_library_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="workdir='abfss://bucket/runs/mine' is a URL"):
        train(tiny_config(tmp_path), BUCKET)
    with pytest.raises(ConfigError, match="workdir='abfss:/bucket/runs/mine' is a URL"):
        load(Path(BUCKET))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("written", "advice"),
    {
        "gs://bucket/run": "mount the bucket with gcsfuse and write that folder, or copy the files",
        "s3://bucket/run": "mount the bucket with mount-s3",
        "abfss://bucket/run": "mount the bucket and write that folder",
        "file:///data/my runs": "write '/data/my runs'",
        "https://host/a.json": "download the file, and write the path of the copy",
    }.items(),
)
def test_the_advice_about_a_url_is_that_for_its_kind(written, advice):
    assert advice in why_not_local(written)


@pytest.mark.parametrize(
    "written", ["", "runs/mine", "/data/a:b/c", "C:/runs", "./gs:/odd", "~/runs", "corpus/**/*.txt"]
)
def test_a_path_is_no_url(written):
    assert why_not_local(written) == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.model.d_modle = 3", "unknown key model.d_modle; did you mean 'd_model'?"),
        ("config.modle = 3", "unknown key modle; did you mean 'model'?"),
        ("config.model.layers = None", "model.layers=None is NoneType, but it must be a whole number"),
        ("config.model.layers = True", "model.layers=True is True or False, but it must be a whole number"),
        ("config.optimizer.eps = float('inf')", "optimizer.eps=inf is not a number that float32 holds"),
        ("del config.model.heads", "the config has no model.heads; start from get_config() of configs/base.py"),
        ("config.model = 3", "mine.py, line 4: TypeError: Could not override field 'model' (reference). 3 is of"),
        ("raise ValueError('x' * 5000 + chr(10))", "mine.py, line 4: ValueError: xxx"),
        ("config.nothing.here = 1", "mine.py, line 4: AttributeError"),
        ("1 / 0", "mine.py, line 4: ZeroDivisionError: division by zero"),
        ("not python", "mine.py"),
    ],
)
def test_a_wrong_config_file_is_one_line_with_status_2(line, message, tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs.base import get_config as base\n"
        f"def get_config():\n    config = base()\n    {line}\n    return config\n"
    )
    status, error = command(f"--config={path}", f"--workdir={tmp_path / 'run'}", capsys=capsys)
    assert status == 2 and message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config = 1", "mine.py: it has no get_config(), which returns the config; write it as in configs/base.py"),
        ("def get_config(): return {}", "mine.py: get_config() returns a dict, not a ConfigDict; begin with that of"),
        ("def get_config(size): return size", "mine.py: TypeError: get_config() missing 1 required positional"),
    ],
)
def test_a_config_file_that_gives_no_config_is_one_line(text, message, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(text)
    status, error = command(f"--config={tmp_path / 'mine.py'}", capsys=capsys)
    assert status == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.tp": 0}, "mesh.tp=0 is not a number of devices; use 1 or more, or -1"),
        ({"mesh.pp": -1}, "mesh.pp=-1, mesh.dp=-1: at most one axis can be inferred"),
        ({"mesh.pp": 3}, "wants a multiple of 3 devices, but there are 8; legal pp·dp·tp for 8"),
        ({"mesh.dp": 4}, "mesh.pp=1 mesh.dp=4 mesh.tp=1 wants 4 devices, but there are 8"),
        ({"mesh.simulate": 16}, "mesh.simulate=16 comes too late: JAX already runs with 8 cpu device(s)"),
        ({"mesh.tp": 8}, "model.heads=4 does not divide over mesh.tp=8; use tp in {1, 2, 4} or heads=8"),
        ({"mesh.pp": 8}, "model.layers=2 is less than mesh.pp=8; use layers=8 or more, or pp=2 or less"),
        (
            {"mesh.pp": 2, "model.layers": 3, "pipeline.schedule": "interleaved", "pipeline.virtual": 2},
            "model.layers=3 is less than mesh.pp=2 x 2 stages on each; use layers=4 or more.",
        ),
        ({"pipeline.virtual": 2}, "pipeline.virtual=2 does nothing with pipeline.schedule='gpipe'; use virtual=1"),
        (
            {"pipeline.schedule": "one_f_one_b"},
            "pipeline.schedule='one_f_one_b' does nothing with mesh.pp=1, where microbatches are gradient "
            "accumulation; use schedule='gpipe' and virtual=1, or mesh.pp=2 or more.",
        ),
        (
            {"pipeline.schedule": "interleaved", "pipeline.virtual": 7},
            "pipeline.schedule='interleaved' with virtual=7 does nothing with mesh.pp=1",
        ),
        ({"pipeline.schedule": "1f1b"}, "pipeline.schedule='1f1b' is unknown; did you mean 'one_f_one_b'?"),
        (
            {
                "mesh.pp": 8,
                "model.layers": 8,
                "pipeline.schedule": "one_f_one_b",
                "pipeline.microbatches": 8,
                "data.seq": 12,
            },
            "data.seq=12 does not divide over 8: mesh.pp=8 ranks and mesh.tp=1 share the head of a microbatch, which",
        ),
        ({"mesh.tp": 4, "model.d_ff": 30}, "model.d_ff=30 does not divide over mesh.tp=4; use tp in {1, 2, 3"),
        ({"model.attention": "mha"}, "model.attention='mha' is unknown; did you mean 'mla'? Known: mla, gqa"),
        ({"model.dtype": "float16"}, "model.dtype='float16' is unknown; did you mean 'bfloat16'? Known: float32"),
        ({"model.layers": -1}, "model.layers=-1 must be a whole number of 1 or more"),
        ({"model.kv_heads": 3}, "model.heads=4 does not divide over model.kv_heads=3; use kv_heads in {1, 2, 4}"),
        ({"model.d_head": 7}, "model.d_head=7 must be even"),
        ({"model.vocab": 200}, "is less than the 257 ids of tokenizer 'bytes'; use as many or more, or 0 to take them"),
        (
            {"layout.residual": "batch seq d_model/tq"},
            "'batch seq d_model/tq' is not a layout of the residual stream; use '",
        ),
        ({"pipeline.schedule": "gpip"}, "pipeline.schedule='gpip' is unknown; did you mean 'gpipe'?"),
        ({"fsdp.prefetch": 2}, "fsdp.prefetch=2 would hold more than two layers whole; use 0 or 1"),
        ({"fsdp.reduce": "bf16"}, "fsdp.reduce='bf16' is unknown; known: float32, compute"),
        (
            {"fsdp.prefetch": 1, "data_parallel.policy": "zero1"},
            "fsdp.prefetch=1 gathers a layer ahead, but with data_parallel.policy='zero1' no layer",
        ),
        (
            {"fsdp.bucket": "layer", "data_parallel.policy": "ddp"},
            "fsdp.bucket='layer' sends matrices of a layer together, but with data_parallel.policy='ddp' none is sent",
        ),
        (
            {"fsdp.bucket": "module", "data_parallel.exceptions": "blocks=ddp"},
            "but with data_parallel.policy='zero3' and data_parallel.exceptions='blocks=ddp' none is sent when a",
        ),
        (
            {"loss.table_first": True, "data_parallel.exceptions": "head=lean embedding=lean"},
            "='zero3' and data_parallel.exceptions='head=lean embedding=lean' it is sent once a step; use loss.",
        ),
        (
            {"loss.table_first": True, "optimizer.frozen": "embedding/table"},
            "before layers run backward, but embedding/table is not trained; use loss.table_first=False",
        ),
        (
            {"pipeline.remat": "some"},
            "pipeline.remat='some' is unknown; known: none, layer, stage, qkv, elementwise, attention",
        ),
        (
            {"pipeline.microbatches": 3},
            "does not divide over mesh.dp=8 x pipeline.microbatches=3; use a multiple of 24",
        ),
        ({"mesh.tp": 4, "data.seq": 30}, "data.seq=30 does not divide over mesh.tp=4; use a multiple of 4"),
        ({"loss.chunk_tokens": 0}, "loss.chunk_tokens=0 must be 1 or more"),
        ({"optimizer.name": "adam"}, "optimizer.name='adam' is unknown; did you mean 'adamw'?"),
        ({"optimizer.warmup_steps": 8}, "optimizer.warmup_steps=8 must be below train.steps=8"),
        ({"optimizer.b2": 1.5}, "optimizer.b2=1.5 must be at least 0 and below 1"),
        ({"data.source": "txt"}, "data.source='txt' is unknown; did you mean 'text'? Known: stdlib, moby"),
        ({"data.path": ""}, "data.path='' but data.source='text' needs a file, folder or glob"),
        (
            {"data.path": "/nowhere/*.txt"},
            "data.path='/nowhere/*.txt': no file matches this glob",
        ),
        (
            {"data.tokenizer": "words"},
            "data.tokenizer='words' is unknown; use 'auto', 'bytes', 'bpe' or the path of a tokenizer.json",
        ),
        ({"data.tokenizer": "/nowhere/tokenizer.json"}, "tokenizer '/nowhere/tokenizer.json' does not exist"),
        ({"data.global_batch": 8000}, "fewer than data.global_batch=8000; give it more text, or make one smaller"),
        (
            {"data.eval_fraction": 0.0},
            "data.eval_fraction=0 holds out no document, so there is nothing to evaluate on; raise it",
        ),
        ({"train.seed": -1}, "train.seed=-1 is too small; use 0 or more"),
        ({"train.seed": 2**31}, "train.seed=2147483648 is too large; use 2147483647 or less"),
        ({"sample.top_p": 0.0}, "sample.top_p=0.0 must be above 0 and at most 1 (off)"),
        ({"sample.temperature": -1.0}, "sample.temperature=-1.0 must be 0 (greedy) or 1e-06 or more; 0.8 is usual"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_named_before_anything_is_compiled(changes, message, corpus, tmp_path, compiles_nothing):
    with pytest.raises(ParallaxError) as error:
        train(tiny_config(corpus, **changes), tmp_path / "run")
    assert message in str(error.value)


@pytest.mark.parametrize("vocab", [0, 384])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh.tp": 8}, "model.heads=4 does not divide over mesh.tp=8"),
        ({"data.global_batch": 12}, "data.global_batch=12 does not divide over mesh.dp=8"),
        ({"optimizer.warmup_steps": 8}, "optimizer.warmup_steps=8 must be below train.steps=8"),
        (
            {"mesh.tp": 2, "model.d_latent": 33, "model.attention": "mla"},
            "model.d_latent=33 does not divide over mesh.tp=2",
        ),
    ],
    ids=str,
)
def test_what_does_not_depend_on_data_is_named_before_any_is_prepared(changes, message, vocab, corpus, tmp_path):
    config = tiny_config(corpus, **{"model.vocab": vocab, "data.cache": str(tmp_path / "cache"), **changes})
    with pytest.raises(ParallaxError) as error:
        train(config, tmp_path / "run")
    assert message in str(error.value) and not list(tmp_path.iterdir())


def test_an_empty_corpus_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").write_text("")
    with pytest.raises(ParallaxError, match="the corpus is empty: 0 documents, none with text; give it some"):
        train(tiny_config(tmp_path / "empty"), tmp_path / "run")


def test_a_folder_that_cannot_be_written_is_named_with_status_3(corpus, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/parallax"):
        with pytest.raises(ParallaxError, match=f"cannot write in {folder} .*; choose another --workdir") as error:
            train(tiny_config(corpus), folder)
        assert error.value.exit_status == 3


def test_errors_of_a_real_command_line_are_one_line_on_stderr(tmp_path):
    root = str(ROOT)
    for arguments, status in (([BASE, "lr=3"], 2), ([BASE, "--workdir=/proc/parallax"], 3)):
        ended = subprocess.run([sys.executable, "train.py", *arguments], cwd=root, capture_output=True, text=True)
        assert ended.returncode == status and not ended.stdout and len(ended.stderr.splitlines()) == 1
