"""A model in pipeline stages: training, evaluation and logits on a mesh, and the order in which stages run."""

from parallax.pipeline.embed_and_head import BatchedHead, EndsState, MicrobatchHead
from parallax.pipeline.layer_passes import SaveAll, traced_vjp
from parallax.pipeline.layer_runs import repeats_of
from parallax.pipeline.loss_and_grads import (
    GROUP_LOSSES,
    GROUP_TOKENS,
    arguments_of_layers,
    first_state,
    pipeline_of,
)
from parallax.pipeline.sharded_model import ShardedModel
from parallax.pipeline.split_program import inlined, select_inlined, split_inlined
from parallax.pipeline.stage import BACKWARD, FORWARD, JOINT, WEIGHTS
