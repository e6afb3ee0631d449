"""A tiny model with every part, cut over any mesh, and a batch with all that makes batches hard."""

import dataclasses
import functools

import jax
import numpy as np

from configs.base import get_config
from parallax.config.sections import (
    DataParallelConfig,
    FsdpConfig,
    LayoutConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
)
from parallax.config.settings import default_settings
from parallax.model.batch import IGNORED
from parallax.pipeline import ShardedModel
from parallax.sharding.activations import RESIDUALS
from parallax.sharding.mesh import make_mesh

VOCAB, SEQ, ROWS = 64, 16, 64
MODEL = dict(
    vocab=VOCAB, layers=8, d_model=32, d_ff=64, heads=8, kv_heads=4, d_head=8, d_latent=16, d_latent_q=0, d_rope=4
)
# Chunks that do not divide the tokens of a microbatch.
OTHERS = dict(chunk_tokens=48, microbatches=4)
MESHES = [(1, 1, 1), (1, 8, 1), (1, 1, 8), (8, 1, 1), (2, 2, 2), (4, 1, 2), (2, 4, 1), (1, 2, 4)]
SCHEDULES = {
    "gpipe": {},
    "one_f_one_b": {},
    "interleaved": {"virtual": 2},
    "zero_bubble": {},
    "zero_bubble_v": {},
    "dualpipe_v": {},
}
# Compiler options: XLA fuses, and writes products in other forms, as what stands around them suggests, and their bits
# follow. Without fusion alone XLA for CPU computes something else (a loss of 4.154 for 4.163), so both are off.
AS_WRITTEN = {"xla_disable_hlo_passes": "fusion,algsimp"}
DEFAULTS = get_config()
HIDDEN_CUT, SEQ_CUT = RESIDUALS.values()
RESIDUAL_VALUES = {layout: value for value, layout in RESIDUALS.items()}  # of layout.residual


def section(name, **changes):
    """One section of the base config, with those of `changes` that are its keys."""
    fields = dict(DEFAULTS[name])
    found = fields | {key: value for key, value in (MODEL | OTHERS | changes).items() if key in fields}
    return found | ({"residual": RESIDUAL_VALUES.get(found["residual"], found["residual"])} if name == "layout" else {})


def mesh_of(pp, dp, tp, replica=1, cp=1, ep=1):
    config = MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0, replica=replica, cp=cp, ep=ep)
    return make_mesh(config, jax.devices()[: pp * replica * dp * cp * ep * tp])


def model_config(**changes):
    return ModelConfig(**section("model", **changes))


def optimizer_config(**changes):
    return OptimizerConfig(**(dict(get_config().optimizer) | changes))


def build(mesh, **changes):
    """A ShardedModel on a mesh of these sizes; `changes` are keys of its sections. A grid's schedule is left out where
    there is no pipeline."""
    changes |= {} if mesh[0] > 1 else {"schedule": "gpipe", "virtual": 1}
    return ShardedModel(settings_of(**changes), mesh_of(*mesh))


def settings_of(**changes):
    """Settings of the tiny model; `changes` are keys of the sections that a ShardedModel reads."""
    kinds = dict(model=ModelConfig, layout=LayoutConfig, pipeline=PipelineConfig, loss=LossConfig)
    kinds |= dict(data_parallel=DataParallelConfig, fsdp=FsdpConfig)
    return dataclasses.replace(
        default_settings(), **{name: kind(**section(name, **changes)) for name, kind in kinds.items()}
    )


@functools.cache
def initial(model_config):
    """The values of `init(0)`, on the host."""
    model = build((1, 1, 1), **{key: getattr(model_config, key) for key in section("model")})
    return jax.tree.map(np.asarray, model.init(0))


def params_of(model):
    """Initial values, with norms' scales and biases moved off their 1 and 0; drawn once for all meshes."""
    rng = np.random.default_rng(1)

    def stir(path, leaf):
        still = leaf.std() > 0
        return leaf if still else leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(stir, initial(model.config))
    return jax.tree.map(jax.device_put, params, model.shardings)


def make_batch(rows=ROWS, seq=SEQ, vocab=VOCAB, seed=0):
    """Packed documents of uneven lengths, padding at some ends, and labels that are ignored, unevenly over rows."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, seq)).astype(np.int32)
    segments = np.cumsum(rng.random((rows, seq)) < 0.15, axis=1).astype(np.int32) + 1
    segments[::3, -3:] = 0
    labels = np.where(np.roll(segments, -1, 1) == segments, np.roll(tokens, -1, 1), IGNORED)
    labels[:, -1] = IGNORED
    labels[segments == 0] = IGNORED
    labels[rng.random((rows, seq)) < np.linspace(0, 0.7, rows)[:, None]] = IGNORED
    return dict(tokens=tokens, labels=labels.astype(np.int32), segments=segments, positions=positions_of(segments))


def positions_of(segments):
    """Positions that restart where a document starts."""
    positions = np.zeros_like(segments)
    for at in range(1, segments.shape[1]):
        same = segments[:, at] == segments[:, at - 1]
        positions[:, at] = np.where(same, positions[:, at - 1] + 1, 0)
    return positions
