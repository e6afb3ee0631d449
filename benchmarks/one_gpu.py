"""What to measure on one GPU in a quarter of an hour: parts in order of worth, each in processes with a time limit.

    python benchmarks/one_gpu.py [--parts step plain_jit kernels] [--seconds 240] [--out runs/one_gpu]

The parts, of configs/gpu_80gb.py, a model of 1.2 billion parameters:

    step        the config as it is: planned, compiled and measured, by parallax.firstrun
    plain_jit   the same model under plain jit, in the same process and in turns, by gspmd.py
    kernels     traces of steps in bfloat16 and float8, by part of the model and by kernel
    float8      steps with 8-bit products, by recipe, beside bfloat16, by options.py
    attention   kernels of attention for packed documents of 512 tokens, by attention.py
    rates       products by shape and dtype, copies, the link to the host, small operations, by rates.py
    experts     grouped products of experts, by rates.py
    blocks      the kernels of attention for Triton with other blocks, by attention.py
    host        residuals on the host, by options.py
    quickstart  configs/quickstart.py trained, what it writes, and tokens a second of generation, by decoding.py

What a part prints is in --out as it is printed, in a file of its name; a part that reaches its limit is ended with all
its processes. `summary.md` there is written anew after each part, and printed last. The status is 1 if a part failed or
was ended. With less time, name fewer parts.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, run_benchmark

ROOT = Path(__file__).resolve().parents[1]
# JAX otherwise reserves three quarters of the memory, and two states lie beside each other in plain_jit.
ENVIRONMENT = {"XLA_CLIENT_MEM_FRACTION": "0.92", "PYTHONUNBUFFERED": "1"}
# Graphs have no names of kernels. Other flags stay.
NO_GRAPHS = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()}
QUARTER = {"data.global_batch": 32, "pipeline.microbatches": 4}  # of the config's batch, in as large microbatches of 8
SMALL = {"mesh.simulate": 1, "data.global_batch": 4, "pipeline.microbatches": 2}  # with --smoke
FLOAT8 = ["products float8 delayed", "products float8 delayed, weight gradients too"]
RECIPES = ["nothing", *FLOAT8, "remat elementwise ffn", *(f"remat elementwise ffn, {name}" for name in FLOAT8)]
PARTS = ("step", "plain_jit", "kernels", "float8", "attention", "rates", "experts", "blocks", "host", "quickstart")
ANY_DEVICE = {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "")}  # decoding.py's is else the CPU
SMALLEST = {"out": Path("build/one_gpu")}  # beside what was measured
GRACE_SECS = 5  # from SIGTERM to SIGKILL


class Command(NamedTuple):
    """Words after `python`, and what is added to the environment."""

    words: Sequence[str]
    environment: Mapping[str, str] = {}


class Ended(NamedTuple):
    """How a part ended, after how many seconds, and the file of what it printed."""

    part: str
    how: str
    secs: float
    file: Path


def main() -> None:
    parser = Arguments(description=__doc__, smallest=SMALLEST, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--seconds", type=seconds, default=240, help="limit of each part")
    parser.add_argument("--out", type=Path, default=Path("runs/one_gpu"), help="folder of what the parts print")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    ended = []
    with tempfile.TemporaryDirectory() as folder:  # of runs, whose checkpoints are large
        for part in args.parts:
            ended.append(run_part(part, commands_of(part, Path(folder), args), args.out, args.seconds))
            (args.out / "summary.md").write_text("\n".join([*summary(ended), ""]), encoding="utf-8")
            print(f"{part}: {ended[-1].how}, {ended[-1].secs:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(summary(ended)))
    if any(part.how != "done" for part in ended):
        sys.exit(1)


def stop(number: int, _: Any) -> None:
    """End with the status of a signal, and a part's processes, too; while these end, nothing interrupts that."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def seconds(text: str) -> float:
    """Seconds, more than 0."""
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")


def commands_of(part: str, folder: Path, args: argparse.Namespace) -> list[Command]:
    """The commands of a part; `folder` is for runs."""
    small = ["--smoke"] if args.smoke else []
    config, quarter = ("tiny_gqa", SMALL) if args.smoke else ("gpu_80gb", QUARTER)
    changes = [f"{key}={value}" for key, value in quarter.items()]

    def benchmark(name: str, *words: str) -> Command:
        return Command([f"benchmarks/{name}.py", *small, *words])

    def options(*rows: str) -> list[Command]:
        words = ["--here", "--config", config, "--steps", "7", "--set", *changes, "--only", *rows]
        return [benchmark("options", *words)]

    def traced(run: str, *flags: str) -> list[Command]:
        """A run without a corpus, the trace of two of its steps, and what it says."""
        given = {"train.steps": 9, "train.profile_steps": "8:9", "train.eval_batches": 1, "optimizer.warmup_steps": 1}
        given |= {"data.source": "synthetic", "data.path": "", "data.tokenizer": "bytes", "sample.prompt": ""} | quarter
        words = [f"--config=configs/{config}.py", *(f"--config.{key}={value}" for key, value in given.items()), *flags]
        return [
            Command(["train.py", *words, f"--workdir={folder / run}"], NO_GRAPHS),
            Command(["-m", "parallax.report", f"--trace={folder / run}"]),
        ]

    here = [f"--config.mesh.{key}={size}" for key, size in dict(pp=1, dp=1, tp=1, simulate=int(args.smoke)).items()]
    first_run = [f"--config=configs/{config}.py", "--steps=12", f"--out={args.out.absolute() / 'first-run.md'}"]
    quickstart = ["--config=configs/quickstart.py", f"--workdir={folder / 'first'}", *here]
    model = ["--layers", "8", "--width", "2048"] if not args.smoke else []
    return {
        "step": [Command(["-m", "parallax.firstrun", *first_run, *here])],
        # The config's batch in microbatches of 8 windows, as both sides' states are there.
        "plain_jit": [benchmark("gspmd", "--here", "--config", config, "--set", "pipeline.microbatches=16")],
        "kernels": [*traced("bfloat16"), *traced("float8", "--config.model.matmul=float8")],
        "float8": options(*(RECIPES[:1] if args.smoke else RECIPES)),
        "attention": [benchmark("attention")],
        "rates": [benchmark("rates", "--only", "products", "copies", "operations")],
        "experts": [benchmark("rates", "--only", "grouped")],
        "blocks": [benchmark("attention", "--blocks", "64,64", "128,64", "128,128", "64,32")],
        "host": options("nothing", "residuals on the host"),
        "quickstart": [
            Command(["train.py", *quickstart, *(["--config.train.steps=2"] if args.smoke else [])]),
            Command(["-m", "parallax.generate", f"--workdir={folder / 'first'}", "--prompt=def "]),
            benchmark("decoding", "--ours", "--attention", "gqa", *model)._replace(environment=ANY_DEVICE),
        ],
    }[part]


def run_part(part: str, commands: Sequence[Command], out: Path, limit_secs: float) -> Ended:
    """Run a part's commands in order, up to the first that fails, and end what runs at its limit."""
    file, started = out / f"{part}.txt", time.monotonic()
    how = "done"
    with file.open("w", encoding="utf-8") as printed:
        for command in commands:
            printed.write(f"$ {' '.join(['python', *command.words])}\n")
            printed.flush()
            left_secs = limit_secs - (time.monotonic() - started)
            status = status_of(command, printed, left_secs)
            if status != 0:
                how = f"ended at its limit of {limit_secs:g} s" if status is None else f"failed with status {status}"
                break
    return Ended(part, how, time.monotonic() - started, file)


def status_of(command: Command, printed: Any, limit_secs: float) -> int | None:
    """The status with which a command ends; None if it was ended at the limit, with its processes."""
    environment = os.environ | ENVIRONMENT | command.environment
    process = subprocess.Popen(
        [sys.executable, *command.words],
        stdout=printed,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit_secs)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_all(process)


def end_all(process: subprocess.Popen) -> None:
    """End a process and those that it started: first they may end by themselves."""
    for sent, secs in ((signal.SIGTERM, GRACE_SECS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(secs)


def summary(ended: Sequence[Ended]) -> Iterator[str]:
    """Lines of the table of parts."""
    yield from ("| part | | seconds | printed |", "|---|---|---|---|")
    for part in ended:
        yield f"| {part.part} | {part.how} | {part.secs:.0f} | {part.file} |"


if __name__ == "__main__":
    run_benchmark(main)
