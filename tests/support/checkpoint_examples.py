"""Small trees on any mesh, saved as checkpoints, and ways to damage them."""

import json
import subprocess
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import CheckpointConfig, MeshConfig
from parallax.sharding.mesh import make_mesh

SETTINGS = {"model": {"d_model": 16, "layers": 4}}
SPECS = {"embedding": P("tp", "dp"), "blocks": {"mlp": P("pp", "dp", "tp")}}


def mesh_of(pp, dp, tp):
    return make_mesh(MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0), jax.devices()[: pp * dp * tp])


def make_parts(mesh, d_model=16):
    rng = np.random.default_rng(0)
    shapes = {"embedding": (32, d_model), "blocks": {"mlp": (8, d_model, 8)}}
    params = jax.tree.map(
        lambda shape, spec: jax.device_put(rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec)),
        shapes,
        SPECS,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    replicated = NamedSharding(mesh, P())
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated), tx.init(params))
    return {"params": params, "rest": {"opt_state": state, "step": jax.device_put(jnp.int32(7), replicated)}}


def abstract(parts):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), parts)


def save_steps(folder, losses, *, keep_last=2, keep_best=1, keep_every_steps=0, mesh=(2, 2, 2)):
    parts = make_parts(mesh_of(*mesh))
    config = CheckpointConfig(
        every_steps=1, keep_last=keep_last, keep_best=keep_best, keep_every_steps=keep_every_steps
    )
    with CheckpointWriter(folder, config, settings=SETTINGS) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, parts, loss=loss)
    return parts


def save_settings(folder, step, settings):
    """A checkpoint that was made with these settings, of next to nothing."""
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with CheckpointWriter(folder, config, settings=settings) as checkpoints:
        checkpoints.save(step, {"params": {"x": jnp.ones(1)}})


def rewrite(folder, step, change):
    """Change a manifest as somebody would who knows how it is made: its checksum is right again."""
    path = folder / str(step) / "manifest.json"
    written = json.loads(path.read_text())
    change(written["content"])
    written["crc32"] = zlib.crc32(json.dumps(written["content"], sort_keys=True).encode())
    path.write_text(json.dumps(written))


def largest_file(folder):
    """A file with the data of arrays."""
    return max((p for p in folder.rglob("*") if p.is_file() and "/d/" in str(p)), key=lambda p: p.stat().st_size)


def flip(path, at=None, bit=1):
    """Flip a bit of a file, in its middle where no place is given."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= bit
    path.write_bytes(content)


def truncate(path):
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB; only root may mount one."""
    at = tmp_path / "disk"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", at], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a disk")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


def fill(path):
    """Have a file take all that is free on its disk."""
    with pytest.raises(OSError, match="No space left"), path.open("ab", buffering=0) as file:
        while True:
            file.write(b"\n" * 4096)
