"""When stages run, and what they keep for the backward pass."""

import dataclasses

from parallax.errors import ConfigError, check_choice
from parallax.schedules import SCHEDULES

REMAT = ("none", "layer", "stage")
GATHER = ("microbatch", "step")


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """`remat` is what the backward pass recomputes, `gather` how often FSDP collects the weights.

    Kept per microbatch in flight: "none" all that the backward pass reads; "layer" each layer's input; "stage"
    the stage's input. Gathered per "microbatch", a layer's whole weights exist while it runs; per "step", the
    whole stage's exist all the time, and their gradients too, but they are sent once.
    """

    schedule: str
    microbatches: int
    remat: str
    gather: str

    def __post_init__(self):
        check_choice("pipeline.schedule", self.schedule, SCHEDULES)
        check_choice("pipeline.remat", self.remat, REMAT)
        check_choice("pipeline.gather", self.gather, GATHER)
        if isinstance(self.microbatches, bool) or not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ConfigError(f"pipeline.microbatches={self.microbatches!r} must be a whole number of 1 or more.")
