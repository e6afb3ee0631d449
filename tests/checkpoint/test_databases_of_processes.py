"""Each process stores its shards by itself; they become one part of a step, as in a bucket."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.checkpoint_examples import mesh_of

from parallax.checkpoint.arrays import read_tree
from parallax.checkpoint.objects import OF_PROCESS, host_copy, merge_trees, write_tree
from parallax.errors import CheckpointError

MESH = mesh_of(2, 2, 2)
NAMES = [f"{OF_PROCESS}{process}_start" for process in (0, 1)]
ARRAYS = {
    "cut": jax.device_put(jnp.arange(128.0).reshape(8, 16), NamedSharding(MESH, P("pp", "tp"))),
    "whole": jax.device_put(jnp.arange(3.0), NamedSharding(MESH, P())),
}
WANTED = {
    "cut": jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(MESH, P(("dp", "tp"), "pp"))),
    "whole": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=NamedSharding(MESH, P())),
}


def store(folder, process, arrays=ARRAYS):
    """What this one of two processes holds: each has every other shard."""
    copies = {name: host_copy(x) for name, x in arrays.items()}
    own = {name: copy._replace(shards=copy.shards[process::2]) for name, copy in copies.items()}
    write_tree(folder / NAMES[process], own)


def assert_is_stored(folder):
    assert all(np.array_equal(x, ARRAYS[name]) for name, x in read_tree(folder, WANTED).items())


def test_the_shards_of_all_processes_are_one_tree(tmp_path):
    store(tmp_path, 0)
    store(tmp_path, 1)
    merge_trees(tmp_path, NAMES)
    assert_is_stored(tmp_path)


def test_what_a_process_of_a_killed_job_stores_late_does_not_matter(tmp_path):
    store(tmp_path, 0)
    store(tmp_path, 1)
    merge_trees(tmp_path, NAMES)
    store(tmp_path, 1, jax.tree.map(jnp.negative, ARRAYS))
    assert_is_stored(tmp_path)


def test_a_process_that_has_stored_nothing_is_named(tmp_path):
    store(tmp_path, 0)
    with pytest.raises(CheckpointError, match="what process 1 has stored is not in .*ocdbt.process_1"):
        merge_trees(tmp_path, NAMES)
    assert not (tmp_path / "manifest.ocdbt").exists()
