"""A model in pipeline stages: training, evaluation and logits on a mesh, and the order in which stages run."""

from parallax.pipeline.executor import BACKWARD, FORWARD, WEIGHTS, at_rank
from parallax.pipeline.layer_order import Arrangement, arrangements
from parallax.pipeline.sharded_model import ShardedModel
