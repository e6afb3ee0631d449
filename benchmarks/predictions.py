"""Predicted memory of a training step beside the compiler's, by config and mesh.

    python benchmarks/memory.py [--configs quickstart bench_small tiny_gqa] [--tpu]

Sizes are of one device, in MiB. *compiled* is what the compiler reports: arguments, results that do not take their
place, and temporaries; *live* is its peak_memory_in_bytes. Each small config is compiled on meshes of up to
eight simulated CPU devices; with --tpu, which needs pip install 'parallax[tpu]', those at real scale for TPU slices.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
ON_CPU = {"quickstart": 1024, "bench_small": None, "tiny_gqa": 256}  # vocab, where the tokenizer makes it
MESHES = ((1, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2))
ON_TPU = (
    ("llama_1b_16", "v5e:4x4", (1, 16, 1)),
    ("llama_1b_16", "v5e:4x4", (1, 8, 2)),
    ("llama_1b_16", "v5e:4x4", (4, 4, 1)),
    ("deepseek_v2_lite_mla", "v5p:2x2x4", (1, 8, 2)),
    ("llama2_7b_64", "v5p:4x4x4", (1, 64, 1)),
    ("llama2_7b_64", "v5p:4x4x4", (1, 16, 4)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", help="of these alone")
    parser.add_argument("--tpu", action="store_true")
    args = parser.parse_args()
    if args.tpu:
        os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    else:
        import parallax as px

        px.simulate_devices(8)
    print(f"{'config':22}{'mesh':10}{'predicted':>11}{'compiled':>10}{'difference':>12}{'live':>9}{'compile s':>11}")
    for name, devices, mesh in cases(args):
        if not args.configs or name in args.configs:
            print(row(name, devices, mesh), flush=True)


def cases(args: argparse.Namespace) -> list[tuple[str, Any, tuple[int, ...]]]:
    import jax

    if not args.tpu:
        return [(name, jax.devices(), mesh) for name in ON_CPU for mesh in MESHES]
    from jax.experimental import topologies

    topology = lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices  # noqa: E731
    return [(name, topology(chips), mesh) for name, chips, mesh in ON_TPU if not args.configs or name in args.configs]


def row(name: str, devices: Any, mesh: tuple[int, ...]) -> str:
    from parallax.report.memory import memory_table

    model, tx, batch = built(name, devices, mesh)
    started = time.perf_counter()
    compiled = compile_step(model, tx, batch)
    secs = time.perf_counter() - started
    table = memory_table(model, tx, *batch, compiled)
    sizes = table.peak, table.compiled.peak, compiled.memory_analysis().peak_memory_in_bytes
    predicted, theirs, live = (f"{size / 2**20:,.1f}" for size in sizes)
    where = "·".join(map(str, mesh))
    return f"{name:22}{where:10}{predicted:>11}{theirs:>10}{table.difference:>+12.1%}{live:>9}{secs:>11.0f}"


def built(name: str, devices: Any, mesh: tuple[int, ...]) -> tuple[Any, Any, tuple[int, int]]:
    """The model of a config on a mesh, its optimizer, and the batch's shape."""
    import importlib
    import math

    import parallax as px
    from parallax.optimizer import make_optimizer

    config = importlib.import_module(f"configs.{name}").get_config()
    config.mesh.pp, config.mesh.dp, config.mesh.tp = mesh
    config.mesh.simulate = 0
    config.model.vocab = config.model.vocab or ON_CPU[name]
    wanted = max(config.pipeline.microbatches, 4) if mesh[0] > 1 else config.pipeline.microbatches
    config.pipeline.microbatches = min(wanted, config.data.global_batch // mesh[1])
    settings = px.read_settings(config.to_dict())
    made = px.make_mesh(settings.mesh, devices[: math.prod(mesh)])
    model = px.ShardedModel(settings.model, settings.layout, settings.pipeline, settings.fsdp, settings.loss, made)
    data = settings.data
    return model, make_optimizer(settings.optimizer, settings.train.steps, model.layouts), (data.global_batch, data.seq)


def compile_step(model: Any, tx: Any, shape: tuple[int, int]) -> Any:
    import jax

    from parallax.budget import BATCH_ARRAYS
    from parallax.step import abstract_state, make_train_step

    batch = dict.fromkeys(BATCH_ARRAYS, jax.ShapeDtypeStruct(shape, "int32", sharding=model.batch_sharding))
    return make_train_step(model, tx, 0).lower(abstract_state(model, tx), batch).compile()


if __name__ == "__main__":
    main()
