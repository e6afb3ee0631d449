"""Cost of the guard in a training step: CPU time, memory and compile time with it over those without it.

    python benchmarks/guard.py [--mesh 1,1,1] [--rows 8] [--steps 12]

Both steps are compiled in one process and run in turn, on the same state and batch; medians of CPU seconds are
compared. The work is configs/bench_small.py with fewer rows in a batch: the guard works on parameters, so the less a
step computes, the larger its share.
"""

import statistics
import time
from typing import Any

from arguments import WORKS, Arguments, config_of, mesh_sizes, run_benchmark, whole_number


def unguarded(model, tx):
    """The same step, whatever its numbers are."""
    import jax.numpy as jnp

    from parallax.step.step import TrainState, TrainStep

    class Unguarded(TrainStep):
        def train_step(self, state, batch):
            noise = jnp.stack([jnp.int32(self.seed), state.step])
            metrics, *found = self.model.loss_grads_and_statistics(state.params, batch, noise)
            metrics |= {"grad_norm": self.grad_norm(*found)}
            params, opt_state = self.update(state.params, state.opt_state, *found, metrics["grad_norm"], noise)
            return TrainState(state.step + 1, params, opt_state, state.guard), metrics

    return Unguarded(model, tx, 0)


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"config": "tiny_gqa", "rows": 2, "steps": 1})
    parser.add_argument("--config", default="bench_small", choices=WORKS)
    parser.add_argument("--mesh", type=mesh_sizes, default="1,1,1", metavar="PP,DP,TP")
    parser.add_argument("--rows", type=whole_number, default=8)
    parser.add_argument("--steps", type=whole_number, default=12)
    args = parser.parse_args()
    measure(args)


def measure(args: Any) -> None:
    import jax
    from step import random_batch

    import parallax as px
    from parallax.step.step import TrainStep, init_state, model_of, optimizer_of

    config = config_of(args.config)
    pp, dp, tp = map(int, args.mesh.split(","))
    px.simulate_devices(pp * dp * tp)
    config.mesh.pp, config.mesh.dp, config.mesh.tp, config.mesh.simulate = pp, dp, tp, pp * dp * tp
    config.guard.spike_z = 6.0
    settings = px.read_settings(config.to_dict())
    model = model_of(settings, px.make_mesh(settings.mesh, jax.devices()[: pp * dp * tp]))
    tx = optimizer_of(model)
    batch = jax.device_put(random_batch(args.rows, settings.data.seq, settings.model.vocab), model.batch_sharding)
    makers = {"without": unguarded(model, tx), "with": TrainStep(model, tx, 0, settings.guard)}
    compiled, compile_secs, states = {}, {}, {}
    for name, maker in makers.items():
        states[name] = init_state(model, tx, 0)
        began = time.process_time()
        compiled[name] = maker.lower(args.rows, settings.data.seq).compile()
        compile_secs[name] = time.process_time() - began
    cpu: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(args.steps + 1):
        for name, step in compiled.items():
            began = time.process_time()
            states[name], _ = jax.block_until_ready(step(states[name], batch))
            cpu[name].append(time.process_time() - began)
    secs = {name: statistics.median(values[1:]) for name, values in cpu.items()}
    memory = {name: step.memory_analysis().temp_size_in_bytes for name, step in compiled.items()}
    print(f"mesh {args.mesh}, {args.rows} rows: CPU s a step {secs['without']:.3f} without, {secs['with']:.3f} with")
    for what, values in (("CPU time", secs), ("temporaries", memory), ("compile time", compile_secs)):
        print(f"{what:13} with / without  {values['with'] / values['without']:.3f}")


if __name__ == "__main__":
    run_benchmark(main)
