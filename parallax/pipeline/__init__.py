"""When stages run: the executor of schedule tables, what a stage does, and what it keeps."""

from parallax.pipeline.executor import Executor
from parallax.pipeline.stage import Stage

__all__ = ["Executor", "Stage"]
