"""What is one number throughout, however far it is carried: XLA keeps no memory for it."""

from collections.abc import Mapping

from parallax.analysis.budget.program import VIEWS, Op, Program, Value

Numbers = dict[Value, float]
FROM_ONE = VIEWS | {"broadcast_in_dim", "transpose", "slice", "dynamic_slice", "convert_element_type"}
FROM_EQUAL = {"pad", "dynamic_update_slice", "concatenate"}
FIRST_OPERAND = {"scan": 0, "cond": 1}


def without_constants(program: Program, known: Mapping[Value, float] | None = None) -> Program:
    """The program with each constant made where it is read, and none carried or kept."""
    numbers = _numbers(program, known or {})
    fixed = [value for value in program.inputs if value in numbers]
    program.inputs = [Value(v.shape, v.bytes) if v in numbers else v for v in program.inputs]
    ops = [_made(value) for value in fixed]
    for op in program.ops:
        constant = [value for value in op.outs if value in numbers]
        if op.inner:
            _simplify(op, numbers)
            ops += [op, *map(_made, constant)]
        else:
            ops += map(_made, constant) if len(constant) == len(op.outs) else [op]
    program.ops = ops
    return program.without_unused()


def _made(value: Value) -> Op:
    return Op("broadcast_in_dim", [], [value])


def _simplify(op: Op, numbers: Numbers) -> None:
    first = FIRST_OPERAND[op.name]
    given = _given(op, numbers)
    if op.name == "scan":
        given = _fixed_in_loop(op, given)
    op.dropped = {at for at, value in enumerate(op.outs) if value in numbers}
    op.ins = [None if at >= first and given[at] is not None else value for at, value in enumerate(op.ins)]
    for program in op.inner:
        known = _known(program, given[first:])
        program.outputs = [None if at in op.dropped else value for at, value in enumerate(program.outputs)]
        without_constants(program, known)


def _numbers(program: Program, known: Mapping[Value, float]) -> Numbers:
    """The values of a program that are one number throughout."""
    numbers = dict(known)
    for op in program.ops:
        given = _given(op, numbers)
        if op.name == "scan":
            fixed = _fixed_in_loop(op, given)
            carried = fixed[op.loop.consts : op.loop.consts + op.loop.carried]
            numbers |= {op.outs[at]: number for at, number in enumerate(carried) if number is not None}
        elif op.name == "cond":
            branches = [_outputs(branch, _known(branch, given[1:])) for branch in op.inner]
            same = [found[0] if len(set(found)) == 1 else None for found in zip(*branches, strict=True)]
            numbers |= {op.outs[at]: number for at, number in enumerate(same) if number is not None}
        elif (number := _of_plain(op.name, given)) is not None:
            numbers |= dict.fromkeys(op.outs, number)
    return numbers


def _given(op: Op, numbers: Numbers) -> list[float | None]:
    literals = op.numbers or [None] * len(op.ins)
    return [literal if v is None else numbers.get(v) for v, literal in zip(op.ins, literals, strict=True)]


def _of_plain(name: str, given: list[float | None]) -> float | None:
    if name in FROM_ONE and given:
        return given[0]
    if name in FROM_EQUAL:
        compared = given if name == "concatenate" else given[:2]
        return given[0] if len(set(compared)) == 1 else None
    return 0.0 if name == "mul" and 0.0 in given else None


def _fixed_in_loop(op: Op, given: list[float | None]) -> list[float | None]:
    """The operands' numbers that hold in every turn: what is carried, only where the body hands it on unchanged."""
    first, last = op.loop.consts, op.loop.consts + op.loop.carried
    while True:
        after = _outputs(op.inner[0], _known(op.inner[0], given))[: op.loop.carried]
        still = [a if a == b else None for a, b in zip(given[first:last], after, strict=True)]
        if still == given[first:last]:
            return given
        given = [*given[:first], *still, *given[last:]]


def _known(program: Program, given: list[float | None]) -> Numbers:
    return {value: number for value, number in zip(program.inputs, given, strict=True) if number is not None}


def _outputs(program: Program, known: Numbers) -> list[float | None]:
    numbers = _numbers(program, known)
    return [literal if v is None else numbers.get(v) for v, literal in zip(program.outputs, program.numbers)]
