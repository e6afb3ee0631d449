"""What a value is made of, and what it is for: enough to name the memory that it takes."""

import functools
from collections.abc import Sequence

from parallax.analysis.budget.program import ELEMENTWISE, IN_PLACE, VIEWS, Op, Program, Value

NOTHING, WEIGHTS, DATA = range(3)  # what a value depends on: neither, parameters alone, the batch
PASSING_ON = VIEWS | ELEMENTWISE | IN_PLACE | {"arrange", "all_gather", "reduce_scatter", "all_to_all", "psum"}


def made_of(program: Program, given: Sequence[int]) -> dict[Value, int]:
    """For each value NOTHING, WEIGHTS or DATA; `given` are those of the inputs."""
    found = dict(zip(program.inputs, given, strict=True))
    for op in program.ops:
        ins = operands(op, found)
        if op.name == "scan":
            outs = _outputs(op.inner[0], in_every_turn(op, ins))
        elif op.name == "cond":
            outs = [max(of_one) for of_one in zip(*(_outputs(branch, ins[1:]) for branch in op.inner), strict=True)]
        else:
            outs = [max(ins, default=NOTHING)] * len(op.outs)
        found |= zip(op.outs, outs, strict=True)
    return found


def operands(op: Op, found: dict[Value, int]) -> list[int]:
    """What an operation's operands are made of."""
    return [NOTHING if value is None else found.get(value, NOTHING) for value in op.ins]


def in_every_turn(op: Op, ins: list[int]) -> list[int]:
    """What a loop's operands are made of, whatever turn it is in."""
    first, last = op.loop.consts, op.loop.consts + op.loop.carried
    while True:
        after = _outputs(op.inner[0], ins)[: op.loop.carried]
        carried = [max(pair) for pair in zip(ins[first:last], after, strict=True)]
        if carried == ins[first:last]:
            return ins
        ins = [*ins[:first], *carried, *ins[last:]]


def only_for(program: Program, outputs: set[int]) -> set[Value]:
    """Values that go nowhere but into these outputs, added to or sent on the way."""
    good = {value for at, value in enumerate(program.outputs) if at in outputs and value is not None}
    bad = {value for at, value in enumerate(program.outputs) if at not in outputs and value is not None}
    for op in reversed(program.ops):
        passing = op.name in PASSING_ON or op.name.startswith("psum")
        to_all = passing and all(value in good and value not in bad for value in op.outs)
        for at, value in enumerate(op.ins):
            if value is not None:
                (good if to_all or _carried_into(op, at, good - bad) else bad).add(value)
    return good - bad


def _carried_into(op: Op, at: int, good: set[Value]) -> bool:
    """Whether a loop carries this operand into one of these values."""
    if op.name != "scan" or not op.loop.consts <= at < op.loop.consts + op.loop.carried:
        return False
    return op.outs[at - op.loop.consts] in good


def _outputs(program: Program, given: Sequence[int]) -> list[int]:
    return _outputs_of(program, tuple(given))


@functools.lru_cache(maxsize=512)  # loops are asked about once for each loop around them
def _outputs_of(program: Program, given: tuple[int, ...]) -> list[int]:
    found = made_of(program, given)
    return [NOTHING if value is None else found.get(value, NOTHING) for value in program.outputs]
