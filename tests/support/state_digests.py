"""A run's state and batches on one topology, as digests: what a resumed run must have on any other.

As a command, which the processes of a job run together: `python tests/support/state_digests.py save|load FOLDER CORPUS
NAME ...` saves on each of these topologies into a folder of its own in FOLDER, or loads all that is there onto each.
"""

import functools
import hashlib
import json
import pathlib
import sys
from typing import NamedTuple
from unittest import mock

from parallax.processes.address import read_address

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in pathlib.Path(__file__).parents[1:3]]

import jax
import numpy as np
from jax.experimental import multihost_utils

from parallax.checkpoint.arrays import flatten
from parallax.config.settings import read_settings
from parallax.processes.job import is_first, join, leave
from parallax.sharding.mesh import make_mesh
from parallax.step.step import init_state
from parallax.training import build as build_module
from parallax.training.build import put_batches
from parallax.training.folder import RunFolder
from parallax.training.logger import RunLogger
from parallax.training.loop import checkpoint_trees
from parallax.training.run import begin, open_checkpoints
from support.run_examples import tiny_config

STEP, NEXT_BATCHES = 3, 4
FOUND = "digests: "  # before what the command prints


class Topology(NamedTuple):
    pp: int
    dp: int
    tp: int
    schedule: str = "gpipe"
    virtual: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def devices(self):
        return self.pp * self.dp * self.tp * self.cp * self.ep

    def __str__(self):
        sizes = ("v", self.virtual), ("cp", self.cp), ("ep", self.ep)
        further = (f"·{name}{size}" for name, size in sizes if size > 1)
        return f"{self.pp}·{self.dp}·{self.tp}" + "".join(further)


TOPOLOGIES = {
    str(topology): topology
    for topology in (
        Topology(1, 1, 1),
        Topology(1, 2, 1, cp=4),
        Topology(2, 2, 2),
        Topology(4, 1, 2),
        Topology(1, 2, 1, cp=2, ep=2),
        Topology(1, 8, 1),
        Topology(4, 2, 1, "interleaved", 2),
    )
}


def components_on(topology: Topology, corpus: pathlib.Path, folder: pathlib.Path):
    """The components of a run on the first devices, as many as the topology has."""
    pp, dp, tp, schedule, virtual, cp, ep = topology
    changes = {"mesh.pp": pp, "mesh.dp": dp, "mesh.tp": tp, "mesh.cp": cp, "mesh.ep": ep}
    changes |= {"pipeline.schedule": schedule, "pipeline.virtual": virtual}
    changes |= {"model.layers": 8, "data.global_batch": 8, "pipeline.microbatches": 8 // dp if pp > 1 else 1}
    settings = read_settings(tiny_config(corpus, **changes))
    first = jax.devices()[: topology.devices]
    with mock.patch.object(build_module, "make_mesh", functools.partial(make_mesh, devices=first)):
        return build_module.build(settings, RunFolder(folder))


def stirred(state):
    """A state with moments and counts as no first step leaves them, the same on every mesh."""
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(5)
    other = [leaf + rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype) if leaf.ndim else leaf + STEP for leaf in leaves]
    return jax.tree.unflatten(tree, [jax.device_put(new, old.sharding) for new, old in zip(other, leaves)])


def save(path: pathlib.Path, components) -> dict[str, str]:
    """Save step 3 of a run of these components; its digests."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True, exist_ok=True)
    state = stirred(init_state(components.model, components.tx, seed=0))
    with RunLogger(folder) as logger, open_checkpoints(components, folder, logger) as checkpoints:
        logger.begin(STEP)
        checkpoints.save(STEP, checkpoint_trees(state))
    return digests(components, state)


def load(path: pathlib.Path, components) -> dict[str, str]:
    """Go on with it with these components; the digests there."""
    state, step = begin(components, RunFolder(path), STEP, print)
    assert step == STEP
    return digests(components, state)


def digests(components, state) -> dict[str, str]:
    """SHA-256 of each array of the state, and of each of the next batches, as all devices hold them together."""
    put = put_batches(components)
    batches = {f"batch {at}": put(components.train_data.batch(at)) for at in range(STEP, STEP + NEXT_BATCHES)}
    return {name: digest(array) for name, array in flatten({"state": checkpoint_trees(state), **batches}).items()}


def digest(array) -> str:
    whole = np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return hashlib.sha256(f"{whole.dtype}{array.shape}".encode() + whole.tobytes()).hexdigest()


def save_each(root: pathlib.Path, corpus: pathlib.Path, *names: str) -> dict[str, dict[str, str]]:
    """Save on each of these topologies; digests by what was saved on which."""
    places = {f"{name} by {jax.process_count()}": name for name in names}
    return {
        topology: save(root / topology, components_on(TOPOLOGIES[name], corpus, root))
        for topology, name in places.items()
    }


def load_each(root: pathlib.Path, corpus: pathlib.Path, *names: str) -> dict[str, dict[str, str]]:
    """Load all that is saved there onto each of these topologies; digests by what was loaded onto which."""
    found = {}
    for name in names:
        components = components_on(TOPOLOGIES[name], corpus, root)
        for path in sorted(path for path in root.iterdir() if " by " in path.name):
            found[f"{path.name} on {name}"] = load(path, components)
    return found


def main() -> int:
    act, root, corpus, *names = sys.argv[1:]
    place = read_address({})
    # Where a launcher says which process this is, how many devices it simulates was said, too.
    join(place, read_settings(tiny_config(pathlib.Path(corpus))).distributed, simulate=0)
    found = {"save": save_each, "load": load_each}[act](pathlib.Path(root), pathlib.Path(corpus), *names)
    if is_first():
        print(f"{FOUND}{json.dumps(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(leave(main))
