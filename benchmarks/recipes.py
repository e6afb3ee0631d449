"""What each recipe of 8-bit products does to the gradient of the first step: its norm, and how far it is from that
without. Or what it does to the time of an MLP, as compiled for a TPU that is not here.

    python benchmarks/recipes.py [--layers 16] [--width 256] [--seq 2048] [--only "nothing" "int8 row"]
    python benchmarks/recipes.py --topology v5p:2x2x1 [--tokens 8192] [--mlp 4096 11008] [--only "nothing" "int8 row"]

A new model of so many layers, one row of bytes of Moby-Dick, float32 on one device: what differs is rounding.
*Off* is the norm of the difference over the norm of the gradient without 8 bits. What recipes do to learning is in
`python benchmarks/curves.py --recipes`, and to whole steps in rows of `benchmarks/options.py`.

The MLP is gated, by default that of Llama-2-7B, in bfloat16, forward and backward, on one device; its kernels are
rounded once. Times are the compiler's cycles. It needs the compiler: pip install -e '.[tpu]'.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, config_with, run_benchmark, whole_number

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
RECIPES["float4 nvfp4"] = recipe("float4", "nvfp4")


def main() -> None:
    smallest = {"layers": 2, "width": 64, "seq": 64, "only": ["nothing", "int8 row"], "tokens": 256, "mlp": [256, 512]}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--layers", type=whole_number, default=16)
    parser.add_argument("--width", type=whole_number, default=256, help="d_model; the other sizes follow")
    parser.add_argument("--seq", type=whole_number, default=2048)
    rows = {"nothing": {}} | RECIPES
    parser.add_argument("--only", nargs="+", choices=rows, default=[*rows], metavar="RECIPE")
    parser.add_argument("--topology", help="of TPUs, for times")
    parser.add_argument("--tokens", type=whole_number, default=8192, help="of the MLP whose time is read")
    parser.add_argument("--mlp", type=whole_number, nargs=2, default=[4096, 11008], metavar=("D_MODEL", "D_FF"))
    args = parser.parse_args()
    if args.topology:
        times(args, rows)
        return
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


def times(args: Any, rows: dict[str, dict[str, Any]]) -> None:
    """The table of times."""
    # Before JAX is imported, so that it neither initialises devices nor queries the network for a TPU.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    device, first = absent_devices(args.topology)[0], None
    print(f"| recipe, on {args.topology.split(':')[0]} | MLP | times as fast |\n|---|---|---|")
    for name in args.only:
        secs = mlp_secs(rows[name], device, args.tokens, *args.mlp)
        first = first or secs
        print(f"| {name} | {1e3 * secs:.2f} ms | {first / secs:.2f} |", flush=True)


def mlp_secs(changes: dict[str, Any], device: Any, tokens: int, d_model: int, d_ff: int) -> float:
    """The time of a gated MLP with these keys of the model, forward and backward, as compiled for this device."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from parallax.analysis.compiled.program import read_compiled
    from parallax.config.sections import COMPUTE, MLP, MeshConfig, ModelConfig
    from parallax.hardware.chips import chip
    from parallax.model.families import FAMILIES
    from parallax.model.mlp import GatedMLP
    from parallax.model.products import apart, largest_kernels, product_of, rounded_kernels, scales_of
    from parallax.sharding.activations import RESIDUALS
    from parallax.sharding.collectives import as_varying
    from parallax.sharding.compiler import compiler_options
    from parallax.sharding.mesh import make_mesh
    from parallax.sharding.parameter import map_declared

    keys = {key.split(".")[1]: value for key, value in changes.items()}
    model = ModelConfig(d_model=d_model, d_ff=d_ff, dtype="bfloat16", **keys)
    form, mesh = model.matmul_of(MLP), make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), [device])
    layer = GatedMLP(next(iter(RESIDUALS.values())), FAMILIES["column_row"], model.sizes, "bfloat16", 1.0, matmul=form)
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.zeros((1, 1, d_model), "bfloat16")))["params"]
    scales = map_declared(lambda leaf: leaf.spec.scales, shapes)

    def step(params: Any, x: Any, dy: Any) -> Any:
        params, x, dy = jax.tree.map(as_varying, (params, x, dy))
        weights = {"params": params}
        if form != COMPUTE and scales_of(form):
            stack = jax.tree.map(lambda leaf: leaf[None], params)
            maxima = None if product_of(form).known else largest_kernels(stack, scales, "bfloat16")
            given = scales, "bfloat16", form, jax.tree.map(lambda most: most[0], maxima)
            weights = apart(rounded_kernels(params, *given), *given)
        run = lambda params, x: layer.apply(weights | {"params": params}, x)  # noqa: E731
        y, pull = jax.vjp(run, weights["params"], x)
        return y, *pull(dy)

    whole = NamedSharding(mesh, PartitionSpec())
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)  # noqa: E731
    x = jax.ShapeDtypeStruct((1, tokens, d_model), "bfloat16")
    params, x = jax.tree.map(place, (nn.meta.unbox(shapes), x))
    local = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(mesh.axis_names))
    options = compiler_options(mesh, model.matmul, has_fixed_ranges=model.matmul_scales == "fixed")
    compiled = jax.jit(local, compiler_options=options).lower(params, x, x).compile()
    return read_compiled(compiled, mesh).cycles / chip(device.device_kind).clock_hz


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
