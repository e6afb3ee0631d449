"""In which order a simulated device may meet the collectives of a compiled program."""

import re
from collections.abc import Iterator

import jax

from parallax.analysis.compiled.hlo import COLLECTIVES, Computation, Instruction, groups_of, parse_hlo

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
    one comes behind it; a loop or a branch goes on in other threads, beside all that does not read its result. A
    collective of one device with itself waits for nobody.
    """
    return [f"{one.kind} {one.op_name} | {other.kind} {other.op_name}" for one, other in _Program(text).pairs()]


class _Program:
    def __init__(self, text: str):
        self.module, self.known = parse_hlo(text), {}
        self.devices = int(match[1]) if (match := re.search(r"num_partitions=(\d+)", text)) else 1

    def pairs(self) -> Iterator[tuple[Instruction, Instruction]]:
        for computation in self.module.computations.values():
            yield from self._beside(computation)

    def _beside(self, computation: Computation) -> Iterator[tuple[Instruction, Instruction]]:
        waits_for, holders = {}, []
        for one in computation.instructions:
            waits_for[one.name] = set().union(*({name} | waits_for.get(name, set()) for name in one.operands))
            if self._sends(one):
                yield from ((holder, one) for holder in holders if holder.name not in waits_for[one.name])
                holders += [one] if one.kind in HOLDERS else []

    def _sends(self, one: Instruction) -> bool:
        if one.kind in HOLDERS:
            inside = filter(None, (*one.called, one.attribute("body")))
            return any([self._any_sends(name) for name in inside])
        if one.kind.removesuffix("-start") not in COLLECTIVES:
            return False
        return any(len({*group}) > 1 for group in groups_of(one.rest, self.devices))

    def _any_sends(self, name: str) -> bool:
        if name not in self.known:
            instructions = self.module.computations[name].instructions
            self.known[name] = any([self._sends(one) for one in instructions])
        return self.known[name]
