"""Random schedules that can run, for tests of what any schedule must do."""

import random

from hypothesis import strategies as st

from parallax.schedules import Action, Schedule

PLACEMENTS = ("round-robin", "zigzag", "shuffled")


@st.composite
def random_schedules(draw, most_ranks: int = 4, most_virtual: int = 3, most_microbatches: int = 6) -> Schedule:
    """Any sizes up to these, any placement, with W or without, F and B as one pass or two, and any order in which no
    rank waits for ever."""
    return random_schedule(
        ranks=draw(st.integers(1, most_ranks)),
        virtual=draw(st.integers(1, most_virtual)),
        microbatches=draw(st.integers(1, most_microbatches)),
        placement=draw(st.sampled_from(PLACEMENTS)),
        split=draw(st.booleans()),
        joint=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def random_schedule(
    *, ranks: int, virtual: int, microbatches: int, placement: str, split: bool, seed: int, joint: bool = False
) -> Schedule:
    """Picks again and again one of the actions that can run, and gives it to its rank."""
    rank_of = place(ranks, virtual, placement, seed)
    stages = len(rank_of)
    left = [Action(s, kind, m) for s in range(stages) for kind in "FBW"[: 2 + split] for m in range(microbatches)]
    pick, done = random.Random(seed), set()
    orders = [[] for _ in range(ranks)]
    while left:
        action = pick.choice([action for action in left if needs(action, stages) <= done])
        left.remove(action)
        done.add(action)
        orders[rank_of[action.stage]].append(action)
    return Schedule("random", rank_of, microbatches, tuple(map(tuple, orders)), joint=joint)


def place(ranks: int, virtual: int, placement: str, seed: int = 0) -> tuple[int, ...]:
    """The rank of each stage: all ranks in turn, or, in zigzag, forth and back; or in no order at all."""
    if placement == "shuffled":
        return tuple(random.Random(seed).sample([*range(ranks)] * virtual, ranks * virtual))
    turns = [range(ranks) if placement == "round-robin" or at % 2 == 0 else range(ranks)[::-1] for at in range(virtual)]
    return tuple(rank for turn in turns for rank in turn)


def needs(action: Action, stages: int) -> set[Action]:
    """What must have run before an action."""
    stage, kind, m = action
    if kind == "F":
        return {Action(stage - 1, "F", m)} if stage else set()
    if kind == "W":
        return {Action(stage, "B", m)}
    return {Action(stage, "F", m)} | ({Action(stage + 1, "B", m)} if stage < stages - 1 else set())
