"""When stages run, and what they keep for the backward pass."""

import dataclasses

from parallax.model.remat import KEPT
from parallax.runtime.errors import ConfigError, check_choice, check_whole
from parallax.schedules import check_name, check_virtual

REMAT = ("none", *KEPT, "layer", "stage")
GATHERED_ONCE = {  # parts of the model
    "microbatch": frozenset[str](),
    "layers": frozenset(["blocks"]),
    "step": frozenset(["blocks", "embedding", "head"]),
}
GATHER = tuple(GATHERED_ONCE)
REDUCE = ("float32", "compute")
BRANCHES = ("skip", "mask")


@dataclasses.dataclass(frozen=True)
class FsdpConfig:
    """`prefetch` is how many layers ahead weights are gathered, where pipeline.gather is "microbatch".

    0: a layer is gathered when it runs. 1: while a layer computes, the next one is gathered and the gradients of the
    one before are scattered, in the forward pass and in the backward pass; two layers exist whole, not one. The
    arithmetic is the same: a loss has the same bits, gradients too but for what XLA fuses.

    `reduce` is the dtype in which gradients travel to the rank that stores them: "float32", by a reduce-scatter, or
    "compute", that of the model. bfloat16 is half the bytes; ranks exchange pieces and add them in float32, so that
    each summand is rounded once, to 8 bits, and no sum is.
    """

    prefetch: int
    reduce: str

    def __post_init__(self):
        check_choice("fsdp.reduce", self.reduce, REDUCE)
        check_whole("fsdp.prefetch", self.prefetch, least=0)
        if self.prefetch > 1:
            raise ConfigError(f"fsdp.prefetch={self.prefetch} would hold more than two layers whole; use 0 or 1.")

    def check_gather(self, gather: str) -> None:
        """Raise ConfigError where nothing is gathered layer by layer."""
        if self.prefetch and "blocks" in GATHERED_ONCE[gather]:
            raise ConfigError(
                f"fsdp.prefetch={self.prefetch} gathers a layer ahead, but pipeline.gather={gather!r} "
                "gathers all before the first; use fsdp.prefetch=0, or pipeline.gather='microbatch'."
            )


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """`remat` is what the backward pass recomputes, `gather` how often FSDP collects the weights.

    Kept per microbatch in flight: "none" all that the backward pass reads; "elementwise" each layer's input and what
    its products and its attention made, so that only what stands between is made again; "attention" each layer's input
    and the MLP's wide products; "layer" each layer's input; "stage" the stage's input.

    Gathered per "microbatch", a layer's whole weights exist while it runs; per "step", the whole stage's exist all the
    time, and their gradients too, but they are sent once. "layers" gathers layers per step, and the tables of embedding
    and head, which each rank of the pipeline would hold whole, per microbatch.

    `branches` is what a rank does that the schedule leaves idle. "skip": nothing; its program branches. Branches hold
    collectives over dp and tp, in whose groups all ranks take the same one, but ranks along pp take different ones.
    Hardware or a compiler that wants every device to reach every collective, in the same order, would hang: "mask"
    computes on whatever is in the buffers and throws the result away, which takes the time of the work that it is.
    Cached generation branches along pp in either case.
    """

    schedule: str  # a name, or the path of a CSV file
    virtual: int  # stages on each rank, for "interleaved"
    microbatches: int
    remat: str
    gather: str
    branches: str

    def __post_init__(self):
        check_name(self.schedule)
        check_choice("pipeline.remat", self.remat, REMAT)
        check_choice("pipeline.gather", self.gather, GATHER)
        check_choice("pipeline.branches", self.branches, BRANCHES)
        for key in ("microbatches", "virtual"):
            check_whole(f"pipeline.{key}", getattr(self, key), least=1)
        check_virtual(self.schedule, self.virtual)

    @property
    def gathered_once(self) -> frozenset[str]:
        """The parts whose weights are gathered once a step, of "blocks", "embedding" and "head"."""
        return GATHERED_ONCE[self.gather]
