"""In which order a simulated device may meet the collectives of a compiled program."""

from collections.abc import Iterator

import jax

from parallax.analysis.compiled.hlo import COLLECTIVES, Computation, Instruction, Module, parse_hlo

HOLDERS = ("while", "conditional", "call")


def run_in_order(function, *args, options=None):
    """What a function gives, compiled, on the host. No message of its program may be out of turn."""
    compiled = jax.jit(function, compiler_options=options).lower(*args).compile()
    pairs = out_of_turn(compiled.as_text())
    assert not pairs, pairs
    return jax.device_get(compiled(*args))


def out_of_turn(text: str) -> list[str]:
    """Loops and branches that send, each with one of the same computation that sends behind it and does not wait.

    XLA begins what sends in the order of the program. A collective holds its thread until it is done, so that the next
    one comes behind it; a loop or a branch goes on in other threads, beside all that does not read its result.
    """
    module, known = parse_hlo(text), {}
    pairs = (pair for computation in module.computations.values() for pair in _beside(module, computation, known))
    return [f"{one.kind} {one.op_name} | {other.kind} {other.op_name}" for one, other in pairs]


def _beside(module: Module, computation: Computation, known: dict) -> Iterator[tuple[Instruction, Instruction]]:
    waits_for, holders = {}, []
    for one in computation.instructions:
        waits_for[one.name] = set().union(*({name} | waits_for.get(name, set()) for name in one.operands))
        if _sends(module, one, known):
            yield from ((holder, one) for holder in holders if holder.name not in waits_for[one.name])
            holders += [one] if one.kind in HOLDERS else []


def _sends(module: Module, one: Instruction, known: dict) -> bool:
    if one.kind in HOLDERS:
        inside = filter(None, (*one.called, one.attribute("body")))
        return any([_any_sends(module, name, known) for name in inside])
    return one.kind.removesuffix("-start") in COLLECTIVES


def _any_sends(module: Module, name: str, known: dict) -> bool:
    if name not in known:
        known[name] = any([_sends(module, one, known) for one in module.computations[name].instructions])
    return known[name]
