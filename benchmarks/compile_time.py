"""Compile time of a training step by number of layers and of microbatches: flat, since both are loops.

    python benchmarks/compile_time.py [--mesh 2,2,2] [--counts 4 16 64]

Each cell lowers and compiles the step of a small MLA model anew, without a compilation cache; seconds of CPU.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2,2,2", metavar="PP,DP,TP")
    parser.add_argument("--counts", nargs="+", type=int, default=[4, 16, 64])
    args = parser.parse_args()
    import jax

    import parallax as px

    jax.config.update("jax_enable_compilation_cache", False)
    sizes = tuple(map(int, args.mesh.split(",")))
    px.simulate_devices(8)
    seconds(sizes, layers=args.counts[0], microbatches=args.counts[0])  # the first compile also loads the compiler
    print(f"mesh {args.mesh}; CPU seconds to lower and compile the step")
    print("layers \\ microbatches" + "".join(f"{count:>8}" for count in args.counts))
    for layers in args.counts:
        row = [seconds(sizes, layers=layers, microbatches=count) for count in args.counts]
        print(f"{layers:>21}" + "".join(f"{secs:8.1f}" for secs in row), flush=True)


def seconds(sizes: tuple[int, int, int], *, layers: int, microbatches: int) -> float:
    import parallax as px
    from configs.tiny_gqa import get_config
    from parallax.assembly import step_of

    pp, dp, tp = sizes
    config = get_config()
    config.mesh.pp, config.mesh.dp, config.mesh.tp, config.mesh.simulate = pp, dp, tp, 8
    config.model.attention = "mla"
    config.model.layers, config.pipeline.microbatches = layers, microbatches
    config.model.vocab, config.data.global_batch = 256, microbatches * dp
    settings = px.read_settings(config.to_dict())
    mesh = px.make_mesh(settings.mesh)
    step = step_of(settings, mesh)
    started = time.process_time()
    step.lower(settings.data.global_batch, settings.data.seq).compile()
    return time.process_time() - started


if __name__ == "__main__":
    main()
