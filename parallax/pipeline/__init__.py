"""A model in pipeline stages: training, evaluation and logits on a mesh, and the order in which stages run."""

from parallax.pipeline.loss_and_grads import GROUP_LOSSES, GROUP_TOKENS, first_state, pipeline_of
from parallax.pipeline.sharded_model import ShardedModel
from parallax.pipeline.stage import BACKWARD, FORWARD, JOINT, WEIGHTS
