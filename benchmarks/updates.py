"""Time and memory of an update with moments and weights in fewer bits, compiled without a chip, over those in float32.

    python benchmarks/updates.py --config llama_1b_16 --topology v5e:2x2 [--layers 8]

Needs the compiler of the topology's chips: pip install -e '.[tpu]'. The update of the config's model, with so many
layers, as one chip has it of the mesh of all the topology's chips with policy zero3: gradients come and the state is
donated. The rows are compiled in one process. *time* is the compiler's cycles over those of the first row; *state* is
GiB of parameters and moments, *temporaries* what the update needs besides state and gradients, *whole* time and
temporaries where moments in float8 are updated whole and not layer by layer.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# Before JAX is imported, so that it neither initialises devices nor queries the network for a TPU.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, config_of, run_benchmark, whole_number

CONFIGS = sorted({path.stem for path in (Path(__file__).resolve().parents[1] / "configs").glob("*.py")} - {"base"})
KEYS = ("m_dtype", "v_dtype", "weights_dtype")
ROWS = {
    "float32, float32, float32": {},
    "bfloat16, bfloat16, bfloat16": dict.fromkeys(KEYS, "bfloat16"),
    "float8, float32, float32": {"m_dtype": "float8"},
    "float8, float8, bfloat16": {"m_dtype": "float8", "v_dtype": "float8", "weights_dtype": "bfloat16"},
}
SMALLEST = {"config": "tiny_gqa", "topology": "v5e:2x2", "layers": 4}


def main() -> None:
    parser = Arguments(description=__doc__, smallest=SMALLEST)
    parser.add_argument("--config", default="llama_1b_16", choices=CONFIGS)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--layers", type=whole_number, default=8)
    args = parser.parse_args()
    absent_devices(args.topology)
    print(f"{args.config} with {args.layers} layers on {args.topology}")
    print("| m, v, weights | time | state | temporaries | whole |")
    print("|---|---|---|---|---|")
    first = None
    for name, dtypes in ROWS.items():
        cycles, state, temporaries = figures(args, dtypes)
        first = first or cycles
        whole = ""
        if "float8" in name:
            of_whole, _, memory = figures(args, dtypes, whole=True)
            whole = f"{of_whole / first:.2f}, {memory:.3f} GiB"
        print(f"| {name} | {cycles / first:.2f} | {state:.3f} GiB | {temporaries:.3f} GiB | {whole} |", flush=True)


def figures(args: Any, dtypes: dict[str, str], *, whole: bool = False) -> tuple[float, float, float]:
    """Cycles, GiB of the state and of temporaries of a compiled update."""
    import jax
    import jax.numpy as jnp

    import parallax as px
    from parallax.analysis.compiled.program import read_compiled, weight
    from parallax.step import step as of_step

    config, devices = config_of(args.config), absent_devices(args.topology)
    config.mesh.update({axis: 1 for axis in config.mesh} | {"dp": len(devices), "simulate": 0})
    config.data_parallel.policy, config.model.layers, config.model.layers_of = "zero3", args.layers, ""
    config.data.global_batch = config.pipeline.microbatches * len(devices)
    config.optimizer.update(dtypes)
    settings = px.read_settings(config.to_dict())
    step = of_step.step_of(settings, px.make_mesh(settings.mesh, devices))
    state = of_step.abstract_state(step.model, step.tx)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), state.params)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    noise = jax.ShapeDtypeStruct((2,), jnp.int32)
    update = jax.jit(step.update, donate_argnums=(0, 1), out_shardings=step.shardings[1:3])
    with mock.patch.object(of_step, "has_blocks", lambda _: False) if whole else mock.MagicMock():
        compiled = update.lower(state.params, state.opt_state, grads, scalar, noise).compile()
    found = read_compiled(compiled, step.model.mesh)
    return weight(found.timeline)[1], found.aliased / 2**30, found.temporaries / 2**30


if __name__ == "__main__":
    run_benchmark(main)
