"""A training step with experts, compared with that of a dense model with the same FLOPs per token.

    python benchmarks/experts.py [--mesh 2,2,2] [--rows 32] [--rounds 5]

The work is configs/tiny_moe.py with --rows rows of 256 tokens on simulated devices, --mesh of PP,EP,TP; *dense* is the
same with all layers dense, whose MLP is as wide as a token's experts and the shared ones together. Both take their
steps in one process and in turns. CPU seconds, over all threads, and ratios are medians over rounds. FLOPs are the
model's, of a token; the router's are the mixture's own.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

from arguments import Arguments, config_of, mesh_sizes, run_benchmark, whole_number
from bare import packed_batch, stepper
from context import in_turns

VOCAB = 1024


def main() -> None:
    smallest = {"mesh": "1,2,1", "rows": 8, "seq": 32, "rounds": 1}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--mesh", type=mesh_sizes, default="2,2,2", help="PP,EP,TP")
    parser.add_argument("--rows", type=whole_number, default=32, help="in a step, over all devices")
    parser.add_argument("--seq", type=whole_number, default=256)
    parser.add_argument("--rounds", type=whole_number, default=5)
    args = parser.parse_args()
    import jax

    import parallax as px
    from parallax.analysis.flops import flops_per_token

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
        flops[name] = flops_per_token(settings.model, step.model.shapes, seq=args.seq)
    microbatches = mixture.pipeline.microbatches
    print(f"{args.rows * args.seq // microbatches // sizes['ep']:,} tokens of a microbatch on a device")
    secs = in_turns(takes, args.rounds)
    print("step          CPU s   / dense  MFLOP a token")
    for name, own in secs.items():
        ratio = statistics.median(one / other for one, other in zip(own, secs["dense"]))
        print(f"{name:8}{statistics.median(own):11.2f}{ratio:10.3f}{flops[name] / 1e6:15.2f}")


if __name__ == "__main__":
    run_benchmark(main)
