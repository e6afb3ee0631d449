"""Ways that a reader of the code goes, each call found by "go to definition", and how long they are.

    python tests/walks.py            # counts of each way
    python tests/walks.py labels     # a way stop by stop

A way is a list of functions. Each is named in one of those before it (what makes or calls an object, by its class), and
jedi finds its definition from there. WALKS has for each value the shortest chain of calls to where it acts; PASSED has
every function that it passes on the way, closures, helpers and what holds it included. They are held to a step that is
traced (tests/test_walks.py): to the functions that are being called when a value acts, and to those whose operations a
weight or labels go through. Left out are MARKS and the checks of a config.
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
DECLARED = [
    "model/transformer.py Parts.build",
    "model/transformer.py Block.setup",
    "model/mlp.py GatedMLP.__call__",
    "model/dense.py Dense.setup",
    "sharding/parameter.py parameter",
    "sharding/layout.py Layout.local_shape",
    "sharding/collectives.py bound_axis_sizes",
]
HEAD = [
    "pipeline/tick.py tick",
    "pipeline/embed_and_head.py MicrobatchHead.on_last_stage_output",
    "pipeline/embed_and_head.py EmbedAndHead.head_loss_and_grads",
    "model/loss.py chunked_loss_and_grads",
]
LAYER = [
    "pipeline/tick.py tick",
    "pipeline/stage.py SaveNothing.forward",
    "pipeline/stage.py each_layer",
    "pipeline/stage.py one_place",
    "pipeline/stage.py one_layer",
    "pipeline/layer_weights.py LayerWeights.gathered",
]
OPTAX = "optax GradientTransformationExtraArgs.update"
MESH_TP = [
    "cli/train.py start_run",
    "cli/command.py read_line",
    "cli/command.py load_config",
    "training/run.py train",
    "config/settings.py read_settings",
    "training/build.py build",
    "sharding/mesh.py make_mesh",
]
WALKS = {
    "labels": [*STEP, *HEAD, "model/loss.py _summed_losses", "model/loss.py cross_entropy"],
    "weight": [
        *STEP,
        "sharding/plan.py ShardingPlan.load",
        *LAYER,
        "sharding/plan.py ShardingPlan.use",
        "sharding/collectives.py all_gather",
        "pipeline/layer_passes.py SaveLayerInput.forward",
        "model/transformer.py Block.__call__",
        "model/mlp.py GatedMLP.__call__",
        "model/dense.py Dense.__call__",
    ],
    # From a layer's vjp, in whose callers it goes on.
    "gradient": [
        "pipeline/stage.py one_layer",
        "pipeline/layer_passes.py SaveAll.backward",
        "sharding/plan.py ShardingPlan.add_up",
        "sharding/plan.py ShardingPlan._scatter",
        "pipeline/loss_and_grads.py loss_and_grads",
        "sharding/plan.py ShardingPlan.store",
        "sharding/plan.py ShardingPlan._sum",
        "step/step.py TrainStep.train_step",
        "step/step.py TrainStep.update",
        OPTAX,
    ],
    "mesh.tp": [
        *MESH_TP,
        "pipeline/sharded_model.py ShardedModel",
        "pipeline/model_on_mesh.py ModelOnMesh.__init__",
        *DECLARED,
    ],
}
PASSED = {
    "labels": [
        *STEP,
        "pipeline/embed_and_head.py Tokens.of",
        "sharding/zigzag.py own_tokens",
        "pipeline/embed_and_head.py MicrobatchHead",
        *HEAD,
        "model/loss.py _chunks",
        "model/loss.py chunked_loss_and_grads.step",
        "model/loss.py _summed_losses",
        "model/loss.py cross_entropy",
    ],
    "weight": [
        *STEP[1:],
        "sharding/plan.py ShardingPlan.load",
        "pipeline/layer_weights.py LayerWeights.of_step",
        *LAYER,
        "sharding/slots.py read_entry",
        "sharding/plan.py ShardingPlan.use",
        "sharding/collectives.py all_gather",
        "pipeline/layer_passes.py SaveLayerInput.forward",
        "model/transformer.py Block.__call__",
        "model/mlp.py GatedMLP.__call__",
        "model/dense.py Dense.setup",
        "sharding/parameter.py parameter",
    ],
    "gradient": [
        "pipeline/stage.py one_layer",
        "pipeline/layer_passes.py SaveAll.backward",
        "sharding/plan.py ShardingPlan.add_up",
        "sharding/plan.py ShardingPlan._scatter",
        "sharding/collectives.py reduce_scatter",
        "pipeline/loss_and_grads.py loss_and_grads",
        "sharding/plan.py ShardingPlan.store",
        "sharding/plan.py ShardingPlan._sum",
        "step/step.py TrainStep.train_step",
        "step/step.py TrainStep.grad_norm",
        "step/optimizer.py global_norm",
        "step/guard.py judge",
        "step/step.py TrainStep.update",
        "step/step.py TrainStep.update.update",
        OPTAX,
    ],
    "mesh.tp": [
        *MESH_TP,
        "step/resolve.py resolve",
        "pipeline/sharded_model.py ShardedModel",
        "pipeline/model_on_mesh.py ModelOnMesh.__init__",
        *DECLARED,
    ],
}
# Behind `block.apply`, and behind the block's `self.mlp`.
CALLED_BY_FLAX = {"model/transformer.py Block.__call__", "model/mlp.py GatedMLP.__call__"}
# They say which ranks take a branch, whether there is an update, over which axes an array varies, which piece of it a
# device keeps, and when.
MARKS = (
    {f"sharding/collectives.py {name}_over_pp" for name in ("cond", "changed", "updated")}
    | {f"sharding/collectives.py {name}" for name in ("as_varying", "cut", "after")}
    | {"step/step.py updated_if"}
    | {f"sharding/message_order.py SimulatedDevices.{name}" for name in ("after", "in_turn")}
)
KNOWN = STEP[:3]  # where each walk through a step begins
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
        inner = (each for each in ast.walk(node) if each is not node)
        node = next(n for n in inner if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part)
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
    for found, line, column in names_in(stop):
        if found == wanted.replace(".", " ").rpartition(" ")[2]:
            definitions = script(stop.partition(" ")[0]).goto(line, column, follow_imports=True)
            if any(is_at(each, wanted) for each in definitions):
                return True
    return False


def is_at(definition, stop):
    """Whether a definition that jedi found is this stop."""
    if stop == OPTAX:
        return definition.full_name.startswith("optax.") and definition.full_name.endswith(stop.partition(" ")[2])
    path = (PACKAGE / stop.partition(" ")[0]).resolve()
    return (definition.module_path, definition.line) == (path, node_of(stop).lineno)


def lost(walk, known=()):
    """The stops that none before leads to, nor what a reader knows before."""
    return [
        stop
        for number, stop in enumerate(walk)
        if number
        and stop not in {*known, *CALLED_BY_FLAX, *walk[:number]}
        and not any(leads_to(earlier, stop) for earlier in [*walk[:number], *known] if earlier != OPTAX)
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
        for what, walk in (("shortest chain", WALKS[name]), ("every function", PASSED[name])):
            stops, files, returns = counts(walk)
            print(f"{name}, {what}: {stops} stops in {files} files, {returns} returns to a file")
            if argv:
                print("\n".join(f"  {stop}" for stop in walk))
            for stop in lost(walk, KNOWN):
                print(f"  not found by go to definition: {stop}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
