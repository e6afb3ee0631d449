"""What each recipe of 8-bit products does to the gradient of the first step: its norm, and how far it is from that
without.

    python benchmarks/recipes.py [--layers 16] [--width 256] [--seq 2048] [--only "nothing" "int8 row"]

A new model of so many layers, one row of bytes of Moby-Dick, float32 on one device: what differs is rounding.
*Off* is the norm of the difference over the norm of the gradient without 8 bits. What recipes do to learning is in
`python benchmarks/curves.py --recipes`.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, config_with, run_benchmark, whole_number

TEXT = Path(__file__).resolve().parents[1] / "parallax" / "data" / "texts" / "moby_dick.txt"
RANGES = "64 1 0.03125"  # of input, weight and gradient: a few times what small models have
SCALES = ("delayed", "current", "row", "block", "mxfp8", "fixed")


def recipe(matmul: str, scales: str, gradients: str = "compute") -> dict[str, Any]:
    """Products in 8 bits with these scales and these weights' gradients, as keys of a config."""
    keys = {"matmul": matmul, "matmul_scales": scales, "matmul_weight_gradients": gradients}
    keys |= {"matmul_ranges": RANGES} if scales == "fixed" else {}
    return {f"model.{key}": value for key, value in keys.items()}


RECIPES: dict[str, dict[str, Any]] = {
    f"{dtype} {scales}{', weight gradients too' * (gradients == '8bit')}": recipe(dtype, scales, gradients)
    for dtype in ("float8", "int8")
    for gradients in ("compute", "8bit")
    for scales in SCALES
    if (dtype, scales) != ("int8", "mxfp8")
}


def main() -> None:
    smallest = {"layers": 2, "width": 64, "seq": 64, "only": ["nothing", "int8 row"]}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--layers", type=whole_number, default=16)
    parser.add_argument("--width", type=whole_number, default=256, help="d_model; the other sizes follow")
    parser.add_argument("--seq", type=whole_number, default=2048)
    rows = {"nothing": {}} | RECIPES
    parser.add_argument("--only", nargs="+", choices=rows, default=[*rows], metavar="RECIPE")
    args = parser.parse_args()
    import jax

    import parallax as px

    px.simulate_devices(1)
    first = None
    print("| recipe | loss | norm of the gradient | of attention | of MLPs | off |")
    print("|---|---|---|---|---|---|")
    for name in args.only:
        loss, grads = gradient_of(settings_with(args, rows[name]))
        leaves = {at: leaf for at, leaf in px.named_leaves(grads).items() if leaf.size}
        first = first or leaves
        norms = [norm_of(leaf for at, leaf in leaves.items() if part in at) for part in ("", "attention/", "mlp/")]
        off = norm_of(leaf - first[at] for at, leaf in leaves.items()) / norm_of(first.values())
        cells = [f"{loss:.4f}", *(f"{norm:.3f}" for norm in norms), f"{100 * off:.1f} %"]
        print("| " + " | ".join([name, *cells]) + " |", flush=True)
        jax.clear_caches()


def settings_with(args: Any, changes: dict[str, Any]) -> Any:
    """Settings of the benchmark's model with these keys."""
    import parallax as px

    width = args.width
    sizes = {"layers": args.layers, "d_model": width, "d_ff": 4 * width, "heads": max(width // 64, 1), "d_head": 64}
    sizes |= {"kv_heads": sizes["heads"], "attention": "gqa", "vocab": 256}
    keys = {f"model.{key}": size for key, size in sizes.items()} | {"mesh.simulate": 1, "mesh.dp": 1}
    keys |= {"data.seq": args.seq, "data.global_batch": 1, "pipeline.microbatches": 1, "data.tokenizer": "bytes"}
    return px.read_settings(config_with("base", keys | changes).to_dict())


def gradient_of(settings: Any) -> tuple[float, Any]:
    """Loss and gradient of the first step."""
    import jax

    import parallax as px
    from parallax.step.step import with_first_scales

    model = px.model_of(settings)
    batch = px.as_batch([[*TEXT.read_bytes()[: settings.data.seq + 1]]])
    params = with_first_scales(model, model.init(settings.train.seed), batch, settings.train.seed)
    metrics, grads = jax.jit(model.loss_and_grad)(params, batch)
    return float(metrics["loss"]), jax.device_get(grads)


def norm_of(leaves: Any) -> float:
    """The norm of all entries together."""
    return sum(float((leaf.astype("float64") ** 2).sum()) for leaf in leaves) ** 0.5


if __name__ == "__main__":
    run_benchmark(main)
