"""Learning curves of the quickstart's model with options that save memory or time: the evaluation's loss with each
option, and with all, compared with float32; or, of half as many layers on bytes, with each recipe of 8-bit products,
compared with bfloat16.

    python benchmarks/curves.py [--steps 600] [--only "float32" "all"] [--picture docs/curves.svg]
    python benchmarks/curves.py --recipes [--only "bfloat16" "float8 current"]

Each option is a run of train.py on one device, with the seed and batches of the others: 8 windows of 128 tokens a step,
so that 600 steps take minutes. Runs are kept under --folder; an existing one is resumed, or only read.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from arguments import Arguments, run_benchmark, whole_number
from recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
# The quickstart's model and data on one device, in smaller batches.
SMALLER = {"mesh.pp": 1, "mesh.dp": 1, "mesh.tp": 1, "mesh.simulate": 1, "data.global_batch": 8, "data.seq": 128}
SMALLER |= {"train.eval_batches": 32, "sample.prompt": ""}
NARROW = {"optimizer.m_dtype": "bfloat16", "optimizer.v_dtype": "bfloat16"}
NARROWER = {"optimizer.m_dtype": "float8", "optimizer.v_dtype": "float8"}
WEIGHTS = {"optimizer.weights_dtype": "bfloat16"}
RESIDUALS = {"model.matmul": "int8", "model.matmul_residuals": "8bit"}
HOST = {"pipeline.residuals_on": "host", "optimizer.states_on": "host"}
AGAIN = {"pipeline.remat": "norm swiglu ffn qkv core"}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "m and v bfloat16": NARROW,
    "m and v float8": NARROWER,
    "weights bfloat16": WEIGHTS,
    "gradients bfloat16": {"pipeline.grads_dtype": "bfloat16"},
    "gathers int8": {"fsdp.gather_dtype": "int8"},
    "gathers float8": {"fsdp.gather_dtype": "float8"},
    "products int8": {"model.matmul": "int8"},
    "products float8": {"model.matmul": "float8"},
    "products int8, residuals 8bit": RESIDUALS,
    "residuals and states on the host": HOST,
    "remat by part": AGAIN,
    "all": NARROWER | WEIGHTS | RESIDUALS | HOST | {"fsdp.gather_dtype": "int8", "pipeline.remat": "norm ffn"},
}
BFLOAT16 = {"model.dtype": "bfloat16", "model.layers": 2, "data.tokenizer": "bytes"}
BFLOAT16 |= {"pipeline.microbatches": 1, "data.global_batch": 4, "train.eval_batches": 64}
BESIDE_BFLOAT16 = {"bfloat16": BFLOAT16} | {name: BFLOAT16 | keys for name, keys in RECIPES.items()}
SMALLEST = {False: ["float32", "all"], True: ["bfloat16", "float8 row"]}  # rows with --smoke, and with --recipes
COLOURS = (
    "#222222",
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#999999",
    "#f0e442",
    "#000099",
    "#66aa00",
    "#aa4499",
    "#117733",
)


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"steps": 2})
    parser.add_argument("--steps", type=whole_number, default=600)
    parser.add_argument("--recipes", action="store_true", help="rows are recipes of 8-bit products")
    parser.add_argument("--only", nargs="+", choices=OPTIONS | BESIDE_BFLOAT16, metavar="OPTION")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "curves")
    parser.add_argument("--picture", type=Path, help="file of a picture of the losses, SVG")
    args = parser.parse_args()
    curves, rows = {}, BESIDE_BFLOAT16 if args.recipes else OPTIONS
    only = args.only or (SMALLEST[args.recipes] if args.smoke else [*rows])
    if unknown := [name for name in only if name not in rows]:
        parser.error(f"--only {unknown[0]!r} is a row {'without' if args.recipes else 'of'} --recipes")
    print(f"| {'recipe' if args.recipes else 'option'} | eval loss after {args.steps} steps | over {only[0]} |")
    print("|---|---|---|")
    for name in only:
        curves[name] = losses(args, name, rows[name])
        last, first = (curves[one][-1][1] for one in (name, only[0]))
        print(f"| {name} | {last:.4f} | {100 * (last / first - 1):+.2f} % |", flush=True)
    if args.picture:
        from parallax.display.svg import svg

        args.picture.write_text(svg(lambda axes: draw(axes, curves), 400, 240), encoding="utf-8")


def losses(args: Any, name: str, option: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, loss) of each evaluation of the run with this option."""
    folder = args.folder / f"{name.replace(',', '').replace(' ', '-')}-{args.steps}"
    every = max(args.steps // 12, 1)
    steps = {"train.steps": args.steps, "train.eval_every_steps": every, "checkpoint.every_steps": args.steps}
    flags = [f"--config.{key}={value}" for key, value in (SMALLER | steps | option).items()]
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", f"--workdir={folder}", *flags]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    if run.returncode:
        sys.exit(run.stdout)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]


def draw(axes: Any, curves: dict[str, list[tuple[int, float]]]) -> None:
    """The first curve against the right axis, and how far the others are from it against the left one."""
    (name, first), *others = curves.items()
    right = axes.twinx()
    right.plot(*zip(*first), "--", color=COLOURS[0], label=f"{name}: {first[-1][1]:.3f} nats a token", linewidth=1.2)
    right.set_ylabel(f"loss in {name}, nats a token (dashed)")
    for (name, curve), colour in zip(others, COLOURS[1:]):
        over = [100 * (loss / before - 1) for (_, loss), (_, before) in zip(curve, first)]
        axes.plot([step for step, _ in curve], over, color=colour, label=f"{name}: {over[-1]:+.2f} %", linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("evaluation's loss over it, %")
    handles = [line for each in (right, axes) for line in each.lines]
    axes.legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(1.14, 1))


if __name__ == "__main__":
    run_benchmark(main)
