"""What the TPU compiler makes of a training step, on a machine without a TPU.

    python benchmarks/tpu_compile.py [--topology v5e:4x4] [--mesh 4,2,2] [--schedules gpipe one_f_one_b]

Needs the TPU compiler: pip install 'parallax[tpu]'. The step is that of configs/llama_1b_16.py, 1.2 billion parameters
in bfloat16, with one window of --seq tokens in a microbatch; one row for each schedule. Bytes are per chip and in GiB:
arguments (the state, which the results take the place of, and the batch), temporaries, and the most at any moment.
Collectives are those in the text of the compiled program, a loop's body once, as `asynchronous/all`; the first leave
time for other work. `messages` are those between stages: how many of them have a pass of a stage, which is a branch or
a loop, between their start and their done, and `fusions` how many fusions they have there altogether. `--save FOLDER`
keeps the programs.
"""

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX is imported: no device is asked for, and nobody on the network for the machine's TPU.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
COLUMNS = ("arguments", "temporaries", "peak", *COLLECTIVES, "messages", "fusions", "compile s")


class Compiled(NamedTuple):
    arguments: int
    temporaries: int
    peak: int
    text: str
    compile_secs: float


def main() -> None:
    args = parse()
    devices = tpu_devices(args.topology)
    print(
        f"{args.topology} mesh {args.mesh} microbatches {args.microbatches} x {args.seq} tokens, "
        f"branches {args.branches}, remat {args.remat}, gather {args.gather}"
    )
    print(f"{'schedule':15}" + "".join(f"{name:>{len(name) + 2}}" for name in COLUMNS))
    for name in args.schedules:
        compiled = compile_step(name, devices, args)
        if args.save:
            Path(args.save).mkdir(parents=True, exist_ok=True)
            (Path(args.save) / f"{name}-{args.branches}.hlo").write_text(compiled.text)
        print(f"{name:15}" + row(compiled), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--mesh", default="4,2,2", metavar="PP,DP,TP")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--remat", default="layer", choices=["none", "layer", "stage"])
    parser.add_argument("--gather", default="microbatch", choices=["microbatch", "step"])
    parser.add_argument("--branches", default="skip", choices=["skip", "mask"])
    parser.add_argument("--save", metavar="FOLDER")
    return parser.parse_args()


def tpu_devices(topology: str) -> Any:
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise SystemExit("the TPU compiler, libtpu, is not installed: pip install 'parallax[tpu]'") from None
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def compile_step(schedule: str, devices: Any, args: argparse.Namespace) -> Compiled:
    import jax

    import parallax as px
    from configs.llama_1b_16 import get_config
    from parallax.optimizer import make_optimizer
    from parallax.step import abstract_state, make_train_step

    config = get_config()
    config.mesh.pp, config.mesh.dp, config.mesh.tp = map(int, args.mesh.split(","))
    config.pipeline.update(
        schedule=schedule,
        virtual=2 if schedule == "interleaved" else 1,
        microbatches=args.microbatches,
        remat=args.remat,
        gather=args.gather,
        branches=args.branches,
    )
    config.data.seq, config.data.global_batch = args.seq, args.microbatches * config.mesh.dp
    settings = px.read_settings(config.to_dict())
    mesh = px.make_mesh(settings.mesh, devices)
    model = px.ShardedModel(settings.model, settings.layout, settings.pipeline, settings.loss, mesh)
    tx = make_optimizer(settings.optimizer, settings.train.steps, model.layouts)
    array = jax.ShapeDtypeStruct((config.data.global_batch, args.seq), "int32", sharding=model.batch_sharding)
    batch = dict.fromkeys(("tokens", "labels", "segments", "positions"), array)
    started = time.perf_counter()
    compiled = make_train_step(model, tx, 0).lower(abstract_state(model, tx), batch).compile()
    compile_secs = time.perf_counter() - started
    sizes = compiled.memory_analysis()
    return Compiled(
        sizes.argument_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.peak_memory_in_bytes,
        compiled.as_text(),
        compile_secs,
    )


def row(compiled: Compiled) -> str:
    sizes = (f"{getattr(compiled, name) / 2**30:.2f}" for name in COLUMNS[:3])
    found = collectives(compiled.text)
    counts = (f"{found[kind, True]}/{found[kind, True] + found[kind, False]}" for kind in COLLECTIVES)
    sent = list(messages(compiled.text))
    beside = f"{sum(passes > 0 for passes, _ in sent)}/{len(sent)}"
    cells = *sizes, *counts, beside, f"{sum(fusions for _, fusions in sent)}", f"{compiled.compile_secs:.0f}"
    return "".join(f"{cell:>{len(name) + 2}}" for name, cell in zip(COLUMNS, cells, strict=True))


def operations(text: str) -> Iterator[tuple[str, str, str]]:
    """Of each operation, in the order in which it is scheduled: its name, its kind, and what follows."""
    for line in text.splitlines():
        if match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*?[\])}] ([a-z][\w\-]*)\((.*)", line):
            yield match.groups()


def collectives(text: str) -> Counter:
    """How many there are, by kind and by whether other work is done meanwhile.

    Such a one is a pair of start and done, or a chain of fusions, each of which holds a piece of it beside compute.
    """
    found = set()
    for name, kind, rest in operations(text):
        if kind.removesuffix("-start") in COLLECTIVES:
            chain = re.search(r'chain_id="(\d+)"', rest)
            found.add(
                (kind.removesuffix("-start"), bool(chain) or kind.endswith("-start"), chain[1] if chain else name)
            )
    return Counter((kind, asynchronous) for kind, asynchronous, _ in found)


def messages(text: str) -> Iterator[tuple[int, int]]:
    """For each message between stages, the passes and the fusions between its start and its done."""
    under_way: dict[str, list[str]] = {}
    for name, kind, rest in operations(text):
        if kind == "collective-permute-start" and "/ppermute" in rest:
            under_way[name] = []
        elif kind == "collective-permute-done" and "/ppermute" in rest:
            between = under_way.pop(re.search(r"%([\w.\-]+)", rest)[1])
            yield sum(other in ("conditional", "while") for other in between), between.count("fusion")
        else:
            for between in under_way.values():
                between.append(kind)


if __name__ == "__main__":
    main()
