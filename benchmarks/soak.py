"""Kill a run many times, and compare its results with a run that was never stopped: make soak

    python benchmarks/soak.py [KILLS] [--steps 80]

Half of the kills hit a run that stays on its mesh: its losses, evaluations and final checkpoint must be those of the
other bit for bit. Half hit a run that goes on on another mesh each time, by one process, two or four, of which a random
one is killed: its losses must be within 1e-4. A step is saved after each, so that a kill hits a save more often than
not. Ends with status 1 if anything was lost.
"""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from arguments import Arguments, run_benchmark, whole_number

ROOT = pathlib.Path(__file__).parents[1]
TOLERANCE = 1e-4
PATIENCE_SECS = 300
MESHES = {
    "1·8·1": {"mesh.pp": 1, "mesh.dp": 8, "mesh.tp": 1, "pipeline.microbatches": 1},
    "2·2·2": {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2, "pipeline.microbatches": 2},
    "4·1·2": {"mesh.pp": 4, "mesh.dp": 1, "mesh.tp": 2, "pipeline.microbatches": 4},
    "2·4·1": {"mesh.pp": 2, "mesh.dp": 4, "mesh.tp": 1, "pipeline.microbatches": 2},
    "1·1·8": {"mesh.pp": 1, "mesh.dp": 1, "mesh.tp": 8, "pipeline.microbatches": 1},
}
FIRST = "2·2·2"
DEVICES = 8
PROCESSES = (1, 2, 4)


def command(workdir: pathlib.Path, mesh: str, steps: int) -> list[str]:
    """A small run that saves after every step."""
    keys = {
        "model.layers": 4,
        "model.d_model": 32,
        "model.d_ff": 64,
        "model.heads": 8,
        "model.kv_heads": 8,
        "model.d_head": 8,
        "model.dropout": 0.1,
        "data.source": "synthetic",
        "data.cache": str(workdir.parent / "data"),
        "data.synthetic_tokens": 100_000,
        "data.seq": 32,
        "data.global_batch": 8,
        "train.steps": steps,
        "train.log_every_steps": 1,
        "train.eval_every_steps": 20,
        "train.eval_batches": 1,
        "optimizer.learning_rate": 1e-3,
        "checkpoint.every_steps": 1,
        "checkpoint.keep_best": 0,
        "sample.prompt": "",
        "mesh.simulate": 8,
        **MESHES[mesh],
    }
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    return ["train.py", "--config=configs/tiny_gqa.py", *flags, f"--workdir={workdir}"]


def start(workdir: pathlib.Path, mesh: str, steps: int, processes: int = 1) -> subprocess.Popen:
    sizes = ["--processes", str(processes), "--devices-per-process", str(DEVICES // processes)]
    launcher = ["-m", "parallax.launch", *sizes, "--"] if processes > 1 else []
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "soak"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-u", *launcher, *command(workdir, mesh, steps)],
        cwd=ROOT,
        env=os.environ | cache | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


def finish(workdir: pathlib.Path, mesh: str, steps: int) -> None:
    """Run until the end."""
    process = start(workdir, mesh, steps)
    try:
        out, _ = process.communicate(timeout=PATIENCE_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        sys.exit(f"{workdir} has not come to its end in {PATIENCE_SECS} s; --steps={steps} may be too many here")
    if process.returncode:
        sys.exit(f"{workdir} ended with status {process.returncode}:\n{out}")


def kill_in_the_middle(workdir: pathlib.Path, mesh: str, steps: int, rng: random.Random, processes: int) -> str:
    """Start, and kill one process at random: while it starts, in a step, or in a save; returns what was said last."""
    process = start(workdir, mesh, steps, processes)
    pids = [process.pid]
    watchdog = threading.Timer(PATIENCE_SECS, process.kill)
    watchdog.start()
    steps_to_see, seen, said = rng.choice([0, 1, 1, 2, 3]), 0, ""
    for line in process.stdout:
        said = line.strip() or said
        pids += map(int, re.findall(r"^\[launch\] process \d+ is pid (\d+)", line))
        seen += re.match(r"(\[0\] )?\S+ step \d+/\d+ +loss", line) is not None
        if seen >= steps_to_see and (seen or "tokens to train on" in line):
            break
    time.sleep(rng.uniform(0, 0.6))
    # Its status, if it has ended by itself.
    ended = process.poll()
    if ended is None:
        # Of several, one; the launcher and the others must then end by themselves.
        os.kill(rng.choice(pids[1:] or pids), signal.SIGKILL)
    process.communicate()
    watchdog.cancel()
    if ended is not None:
        sys.exit(f"{workdir} ended by itself with status {ended} after {said!r}; --steps={steps} are too few")
    return said


def numbers(workdir: pathlib.Path, key: str) -> dict[int, float]:
    """One metric by step; equal floats are equal bits."""
    from parallax.storage.run_files import read_metrics

    return {row["step"]: row[key] for row in read_metrics(workdir / "metrics.jsonl") if key in row}


def compare(killed: pathlib.Path, whole: pathlib.Path, steps: int) -> tuple[float, bool]:
    """The largest difference of losses, and whether all is equal bit for bit, the final checkpoint too."""
    from parallax.checkpoint.steps import read_manifest

    worst, same = 0.0, True
    for key in ("train/loss", "eval/loss"):
        here, there = numbers(killed, key), numbers(whole, key)
        if here.keys() != there.keys():
            sys.exit(f"{killed} has {key} of steps {sorted(here)}, {whole} of {sorted(there)}")
        worst = max(worst, *(abs(here[step] - there[step]) for step in here))
        same &= here == there
    arrays = [read_manifest(folder / "checkpoints", steps)["arrays"] for folder in (killed, whole)]
    return worst, same and arrays[0] == arrays[1]


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"kills": 2, "steps": 30})
    parser.add_argument("kills", type=whole_number, nargs="?", default=50)
    parser.add_argument(
        "--steps", type=whole_number, default=80, help="of each run; a kill that comes after the last ends it all"
    )
    args = parser.parse_args()
    kills, steps = args.kills, args.steps
    rng, began = random.Random(0), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        whole, still, moving = (pathlib.Path(folder) / name for name in ("whole", "still", "moving"))
        finish(whole, FIRST, steps)
        for number in range(1, kills + 1):
            moves = number % 2 == 0
            mesh = rng.choice(list(MESHES)) if moves else FIRST
            processes = rng.choice(PROCESSES) if moves else 1
            said = kill_in_the_middle(moving if moves else still, mesh, steps, rng, processes)
            by = "one process" if processes == 1 else f"{processes} processes"
            print(
                f"kill {number}/{kills} on {mesh} by {by}, {time.perf_counter() - began:.0f} s, after {said[:60]!r}",
                flush=True,
            )
        finish(still, FIRST, steps)
        finish(moving, FIRST, steps)
        (_, same), (worst, _) = compare(still, whole, steps), compare(moving, whole, steps)
        lost = {
            name: len(list(at.glob("checkpoints/damaged-*"))) for name, at in (("still", still), ("moving", moving))
        }
    print(
        json.dumps(
            {"kills": kills, "bitwise on one mesh": same, "worst loss on changing meshes": worst, "damaged": lost}
        )
    )
    sys.exit(0 if same and worst <= TOLERANCE and not any(lost.values()) else 1)


if __name__ == "__main__":
    run_benchmark(main)
