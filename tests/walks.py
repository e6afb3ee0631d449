"""Ways that a reader of the code goes, each call found by "go to definition", and how long they are.

    python tests/walks.py            # counts of each way
    python tests/walks.py labels     # a way stop by stop

A way is a list of functions. Each is named in one of those before it (what makes or calls an object, by its class), and
jedi finds its definition from there.
"""

import ast
import pathlib
import sys
from functools import cache

import jedi

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "parallax"
STEP = ["step/step.py TrainStep.train_step", "pipeline/sharded_model.py ShardedModel.loss_grads_and_statistics"]
STEP += ["pipeline/loss_and_grads.py loss_and_grads", "pipeline/loss_and_grads.py pipeline_of"]
TICK = ["pipeline/tick.py run_ticks", "pipeline/tick.py tick"]
LOOP = ["pipeline/stage.py each_layer", "pipeline/stage.py each_place", "pipeline/stage.py one_layer"]
WALKS = {
    "labels": [
        *STEP,
        "pipeline/loss_and_grads.py microbatches",
        *TICK,
        "pipeline/embed_and_head.py MicrobatchHead.on_last_stage_output",
        "pipeline/embed_and_head.py MicrobatchHead._share",
        "pipeline/embed_and_head.py EmbedAndHead.head_loss_and_grads",
        "model/loss.py chunked_loss_and_grads",
        "model/loss.py _losses",
        "model/loss.py cross_entropy",
    ],
    "weight": [
        *STEP,
        "sharding/plan.py ShardingPlan.load",
        *TICK,
        "pipeline/stage.py SaveNothing.forward",
        *LOOP,
        "pipeline/stage.py gathered_layer",
        "sharding/plan.py ShardingPlan.use",
        "sharding/plan.py ShardingPlan._gather",
        "sharding/collectives.py all_gather",
        "pipeline/layer_passes.py SaveLayerInput.forward",
        "model/transformer.py Block.__call__",
        "model/mlp.py GatedMLP.__call__",
        "model/dense.py Dense.__call__",
    ],
    "gradient": [
        *STEP[:3],
        *TICK,
        "pipeline/stage.py SaveLayers.backward",
        *LOOP,
        "pipeline/layer_passes.py SaveAll.backward",
        "sharding/plan.py ShardingPlan.add_up",
        "sharding/plan.py ShardingPlan._scatter",
        "sharding/plan.py ShardingPlan.store",
        "sharding/plan.py ShardingPlan._sum",
        "step/step.py TrainStep.update",
    ],
    "mesh.tp": [
        "../train.py main",
        "cli/command.py read_line",
        "cli/command.py load_config",
        "training/run.py train",
        "config/settings.py read_settings",
        "training/build.py build",
        "sharding/mesh.py make_mesh",
        "step/step.py model_of",
        "pipeline/sharded_model.py ShardedModel",
        "pipeline/model_on_mesh.py ModelOnMesh.__init__",
        "model/transformer.py Parts.build",
        "model/transformer.py Block.setup",
        "model/mlp.py GatedMLP.__call__",
        "model/dense.py Dense.setup",
        "sharding/parameter.py parameter",
        "sharding/layout.py Layout.local_shape",
        "sharding/collectives.py bound_axis_sizes",
    ],
}
# Behind `block.apply`, and behind the block's `self.mlp`.
CALLED_BY_FLAX = {"model/transformer.py Block.__call__", "model/mlp.py GatedMLP.__call__"}
OF_A_CLASS = ("__init__", "setup", "__call__")  # found by the name of their class


@cache
def script(file):
    return jedi.Script(path=(PACKAGE / file).resolve(), project=jedi.Project(ROOT))


@cache
def node_of(stop):
    """The definition of a stop in its file's tree."""
    file, _, name = stop.partition(" ")
    node = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part)
    return node


def names_in(stop):
    """Line and column of each name in a stop."""
    for node in ast.walk(node_of(stop)):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno, node.col_offset
        if isinstance(node, ast.Attribute):
            yield node.attr, node.end_lineno, node.end_col_offset - len(node.attr)


def leads_to(stop, other):
    """Whether "go to definition" of a name in a stop leads to another stop."""
    file, _, name = other.partition(" ")
    owner, _, last = name.rpartition(".")
    wanted = f"{file} {owner}" if last in OF_A_CLASS else other
    place = (PACKAGE / file).resolve(), node_of(wanted).lineno
    for found, line, column in names_in(stop):
        if found == wanted.replace(".", " ").rpartition(" ")[2]:
            definitions = script(stop.partition(" ")[0]).goto(line, column, follow_imports=True)
            if any((each.module_path, each.line) == place for each in definitions):
                return True
    return False


def lost(walk):
    """The stops that none before leads to."""
    return [
        stop
        for number, stop in enumerate(walk)
        if number and stop not in CALLED_BY_FLAX and not any(leads_to(earlier, stop) for earlier in walk[:number])
    ]


def counts(walk):
    """Stops, files, and returns to a file that was left before."""
    files, returns, seen = [stop.partition(" ")[0] for stop in walk], 0, set()
    for before, now in zip([None, *files], files):
        returns += now != before and now in seen
        seen.add(now)
    return len(walk), len(seen), returns


def main(argv):
    for name in argv or WALKS:
        walk = WALKS[name]
        stops, files, returns = counts(walk)
        print(f"{name}: {stops} stops in {files} files, {returns} returns to a file")
        if argv:
            print("\n".join(f"  {stop}" for stop in walk))
        for stop in lost(walk):
            print(f"  not found by go to definition: {stop}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
