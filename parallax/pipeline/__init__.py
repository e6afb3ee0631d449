"""A model in pipeline stages: what trains, evaluates and gives logits on a mesh, and when its stages run."""

from parallax.pipeline.executor import BACKWARD, FORWARD, WEIGHTS, at_rank
from parallax.pipeline.layer_order import Arrangement, arrangements
from parallax.pipeline.sharded_model import ShardedModel
