"""Loss and gradients of one batch on four meshes of simulated devices, compared with those on one device.

    python benchmarks/meshes.py [--meshes 1,1,1 1,8,1 1,2,4 2,2,2]

The model is `configs/tiny_gqa.py` in float32. An error is the largest difference in an entry of any
gradient, over that gradient's largest entry on the first mesh. It is of rounding, so that its digits differ from one
machine, and one version of JAX, to another.
"""

import math

from arguments import Arguments, config_of, mesh_sizes, run_benchmark

MESHES = ["1,1,1", "1,8,1", "1,2,4", "2,2,2"]


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"meshes": MESHES[:1]})
    parser.add_argument("--meshes", nargs="+", type=mesh_sizes, default=MESHES, metavar="PP,DP,TP")
    args = parser.parse_args()
    meshes = [tuple(map(int, mesh.split(","))) for mesh in args.meshes]
    import jax
    import numpy as np

    import parallax as px

    px.simulate_devices(max(map(math.prod, meshes)))
    settings = px.read_settings(config_of("tiny_gqa").to_dict(), pipeline={"microbatches": 2})
    batch = px.as_batch(np.random.default_rng(0).integers(0, 256, (16, 65)))
    print("pp dp tp     loss  gradient error")
    first = None
    for pp, dp, tp in meshes:
        model = px.model_of(settings, px.mesh_of(pp=pp, dp=dp, tp=tp))
        metrics, gradients = jax.jit(model.loss_and_grad)(model.init(seed=0), batch)
        gradients = jax.tree.map(np.asarray, gradients)
        first = first or gradients
        errors = jax.tree.map(lambda g, one: abs(g - one).max() / abs(one).max(), gradients, first)
        print(f"{pp:2} {dp:2} {tp:2}  {metrics['loss']:.5f}  {max(jax.tree.leaves(errors)):14.1e}", flush=True)


if __name__ == "__main__":
    run_benchmark(main)
