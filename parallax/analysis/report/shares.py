"""How often each branch of a compiled step is taken, from the schedule."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallax.analysis.budget import parameters_by_component
from parallax.pipeline.sharded_model import ShardedModel
from parallax.schedules import Costs, Schedule
from parallax.schedules.pricing import USUAL

PASSES = "FBW"


class Share(NamedTuple):
    """Of a conditional's second branch, which does the work: the share of turns in which it runs.

    `own` is that of an average rank; `lockstep` that of the rank for which the others wait.
    """

    own: float
    lockstep: float


Shares = dict[str, Share]


def attention_share(shapes: Any) -> float:
    """Attention's share of a layer's parameters."""
    counts = parameters_by_component(shapes)
    return counts["attention"] / (counts["attention"] + counts["mlp"])


def costs_of(remat: str, attention: float) -> Costs:
    """Times of passes over that of a forward one: what is recomputed in the backward pass is a forward pass more, or
    of one that makes again attention alone, its share of the parameters."""
    again = {"none": 0.0, "elementwise": 0.0, "attention": attention}.get(remat, 1.0)
    return Costs(forward=1, backward=2 + again, weights=1)


def branch_shares(model: ShardedModel) -> Shares:
    """The shares of a model's step, its passes priced by what it recomputes."""
    return shares_of(model.schedule, costs_of(model.pipeline.remat, attention_share(model.shapes)))


def shares_of(schedule: Schedule, costs: Costs = USUAL) -> Shares:
    """Shares by name of the conditional: "F", "B" and "W" for whether a rank runs this pass in a tick, "F/end" and
    "B/end" for whether it then stands at the pipeline's end, "exit" for the head.

    A tick lasts as long as its slowest rank, so that what counts for time is how often that rank runs each pass. Who is
    slowest follows from `costs`. Where the tick runs the head, in which all ranks join between F and the rest, the
    slowest is taken before and after it.
    """
    time_of = costs.of(schedule)
    acts = {kind: table >= 0 for kind, table in schedule.microbatch.items()}
    ends = {kind: acts[kind] & (schedule.message[kind] < 0) for kind in "FB"}
    turns = {kind: segment.stop - segment.start for segment in schedule.segments for kind in segment.kinds}
    critical = {kind: _critical(schedule, acts, time_of, kind) for kind in acts}
    share = lambda table, others: float(table.sum() / others)  # noqa: E731
    shares = {
        kind: Share(share(acts[kind].mean(axis=1), turns[kind]), share(critical[kind], turns[kind])) for kind in acts
    }
    for kind, at_end in ends.items():
        slowest_at_end = share(critical[kind] & at_end.any(axis=1), critical[kind].sum())
        shares[f"{kind}/end"] = Share(share(at_end, acts[kind].sum()), slowest_at_end)
    exits = share(schedule.exit_microbatch >= 0, turns["F"])
    return shares | {"exit": Share(exits, exits)}


def _critical(schedule: Schedule, acts: dict, time_of: dict[str, float], kind: str) -> np.ndarray:
    """`[tick]`: whether the rank that the others wait for runs this pass."""
    exits = schedule.exit_microbatch >= 0
    together = np.zeros((schedule.ticks, schedule.ranks))
    for other in acts:
        apart = exits & ((other == "F") != (kind == "F"))
        together += np.where(apart[:, None], 0, acts[other] * time_of[other])
    slowest = together.argmax(axis=1)
    return acts[kind][np.arange(schedule.ticks), slowest]


def name_of(op_name: str) -> str:
    """The name under which `shares_of` knows a conditional, from its operation's name; "" where it does not.

    >>> name_of("jit(step)/while/body/closed_call/F/cond"), name_of("jit(step)/while/body/F/cond/branch_1_fun/cond")
    ('F', 'F/end')
    """
    parts = op_name.split("/")
    if not parts or parts[-1] != "cond" or "body" not in parts:
        return ""
    scopes = [at for at, part in enumerate(parts) if re.fullmatch(f"[{PASSES}]", part)]
    within = list(_conds(parts[scopes[0] :] if scopes else parts))
    if not scopes:
        return "exit" if len(within) == 1 else ""
    return parts[scopes[0]] + ("" if len(within) == 1 else "/end")


def _conds(parts: list[str]) -> Iterator[int]:
    return (at for at, part in enumerate(parts) if part == "cond")
