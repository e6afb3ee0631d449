"""A training step with experts, compared with that of a dense model with the same FLOPs per token.

    python benchmarks/experts.py [--mesh 2,2,2] [--rows 32] [--rounds 5]
    python benchmarks/experts.py --products [--rounds 5]

The work is configs/tiny_moe.py with --rows rows of 256 tokens on simulated devices, --mesh of PP,EP,TP; *dense* is the
same with all layers dense, whose MLP is as wide as a token's experts and the shared ones together. Both take their
steps in one process and in turns. CPU seconds, over all threads, and ratios are medians over rounds. FLOPs are the
model's, of a token; the router's are the mixture's own.

With --products the work is 2,048 rows of 512, which go to 8 groups of 512, forward and backward in float32: as a scan
over blocks of rows, as a ragged_dot, on GPUs by kernels for Triton, and with one matrix for all, *dense*.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

from arguments import Arguments, config_of, mesh_sizes, run_benchmark, whole_number
from bare import packed_batch, stepper
from context import in_turns

VOCAB = 1024
ROWS, WIDTH, GROUPS, REPEATS = 2048, 512, 8, 10  # of --products


def main() -> None:
    smallest = {"mesh": "1,2,1", "rows": 8, "seq": 32, "rounds": 1}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--mesh", type=mesh_sizes, default="2,2,2", help="PP,EP,TP")
    parser.add_argument("--rows", type=whole_number, default=32, help="in a step, over all devices")
    parser.add_argument("--seq", type=whole_number, default=256)
    parser.add_argument("--rounds", type=whole_number, default=5)
    parser.add_argument("--products", action="store_true", help="the grouped products alone")
    args = parser.parse_args()
    if args.products:
        products(args.rounds)
        return
    import jax

    import parallax as px
    from parallax.analysis.traced.flops import flops_per_token

    sizes = dict(zip(("pp", "ep", "tp"), map(int, args.mesh.split(","))))
    devices = math.prod(sizes.values())
    px.simulate_devices(devices)
    config = config_of("tiny_moe")
    config.mesh.update(sizes | {"dp": 1, "simulate": devices})
    config.data.update({"global_batch": args.rows, "seq": args.seq})
    config.model.vocab = VOCAB
    mixture = px.read_settings(config.to_dict())
    model = mixture.model
    width = (model.experts_per_token + model.shared_experts) * model.d_expert
    dense = px.read_settings(mixture, model={"layers_of": "", "d_ff": width})
    takes: dict[str, Callable[[], Any]] = {}
    flops = {}
    for name, settings in (("experts", mixture), ("dense", dense)):
        step = px.step_of(settings, px.make_mesh(settings.mesh, jax.devices()[:devices]))
        batch = packed_batch(args.rows, args.seq, VOCAB)
        takes[name] = stepper(step.take, step.init(), jax.device_put(batch, step.model.batch_sharding))
        flops[name] = flops_per_token(settings.model, step.model.plan.declared, seq=args.seq)
    microbatches = mixture.pipeline.microbatches
    print(f"{args.rows * args.seq // microbatches // sizes['ep']:,} tokens of a microbatch on a device")
    print("step          CPU s   / dense  MFLOP a token")
    for name, cells in timed(takes, args.rounds).items():
        print(f"{name:8}{cells}{flops[name] / 1e6:15.2f}")


def products(rounds: int) -> None:
    """Print the times of grouped products and their gradients in each form, and of products with one matrix."""
    import jax
    import jax.numpy as jnp

    from parallax.model.experts.grouped import FORMS, grouped_dot, grouped_sums

    x, dy = jax.random.normal(jax.random.key(0), (2, ROWS, WIDTH))
    w, sizes = jax.random.normal(jax.random.key(1), (GROUPS, WIDTH, WIDTH)), jnp.full(GROUPS, ROWS // GROUPS)
    passes = {
        form: lambda x, w, dy, form=form: (
            grouped_dot(x, w, sizes, form=form),
            grouped_dot(dy, w, sizes, transposed=True, form=form),
            grouped_sums(x, dy, sizes, form=form),
        )
        for form in FORMS
        if form != "triton" or jax.default_backend() == "gpu"  # CPUs interpret it
    } | {"dense": lambda x, w, dy: (x @ w[0], dy @ w[0].T, x.T @ dy)}
    compiled = {name: jax.jit(run) for name, run in passes.items()}
    takes = {name: lambda run=run: jax.block_until_ready([run(x, w, dy) for _ in range(REPEATS)])
             for name, run in compiled.items()}  # fmt: skip
    print(f"{ROWS:,} rows of {WIDTH} to {GROUPS} groups, forward and backward, {REPEATS} times")
    print("products         CPU s   / dense")
    for name, cells in timed(takes, rounds).items():
        print(f"{name:11}{cells}")


def timed(takes: dict[str, Callable[[], Any]], rounds: int) -> dict[str, str]:
    """Median CPU seconds of each, taken in turns, and their ratio to those of "dense"."""
    secs = in_turns(takes, rounds)
    ratio = lambda own: statistics.median(one / other for one, other in zip(own, secs["dense"]))  # noqa: E731
    return {name: f"{statistics.median(own):11.2f}{ratio(own):10.3f}" for name, own in secs.items()}


if __name__ == "__main__":
    run_benchmark(main)
