"""Compile time of a training step by number of layers and of microbatches: flat, since both are loops.

    python benchmarks/compile_time.py [--mesh 2,2,2] [--counts 4 16 64]

Each cell lowers and compiles the step of a small MLA model anew, without a compilation cache; seconds of CPU.
"""

import math
import time

from arguments import Arguments, config_of, mesh_sizes, run_benchmark, whole_number


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"mesh": "1,1,1", "counts": [1]})
    parser.add_argument("--mesh", type=mesh_sizes, default="2,2,2", metavar="PP,DP,TP")
    parser.add_argument("--counts", nargs="+", type=whole_number, default=[4, 16, 64])
    args = parser.parse_args()
    import jax

    import parallax as px

    jax.config.update("jax_enable_compilation_cache", False)
    sizes = tuple(map(int, args.mesh.split(",")))
    px.simulate_devices(math.prod(sizes))
    seconds(sizes, layers=args.counts[0], microbatches=args.counts[0])  # the first compile also loads the compiler
    print(f"mesh {args.mesh}; CPU seconds to lower and compile the step")
    print("layers \\ microbatches" + "".join(f"{count:>8}" for count in args.counts))
    for layers in args.counts:
        row = [seconds(sizes, layers=layers, microbatches=count) for count in args.counts]
        print(f"{layers:>21}" + "".join(f"{secs:8.1f}" for secs in row), flush=True)


def seconds(sizes: tuple[int, int, int], *, layers: int, microbatches: int) -> float:
    import jax

    import parallax as px
    from parallax.step.step import step_of

    pp, dp, tp = sizes
    config = config_of("tiny_gqa")
    config.mesh.pp, config.mesh.dp, config.mesh.tp = pp, dp, tp
    config.model.attention = "mla"
    config.model.layers, config.pipeline.microbatches = layers, microbatches
    config.data.global_batch = microbatches * dp
    settings = px.read_settings(config.to_dict())
    mesh = px.make_mesh(settings.mesh, jax.devices()[: pp * dp * tp])
    step = step_of(settings, mesh)
    started = time.process_time()
    step.lower(settings.data.global_batch, settings.data.seq).compile()
    return time.process_time() - started


if __name__ == "__main__":
    run_benchmark(main)
