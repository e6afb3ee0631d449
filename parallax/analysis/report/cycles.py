"""Where a compiled program computes: cycles by module, for products and for the rest."""

import re
from collections import defaultdict
from typing import NamedTuple

from parallax.analysis.report.hlo import COLLECTIVES, Computation, Instruction, Module, of_update, parse
from parallax.analysis.report.shares import Shares, name_of

# Names that a stack has of how the program is run, and not of what it runs.
RUNNING = {"train_step", "step", "shard_map", "while", "body", "closed_call", "eval_jaxpr", "cond"}
RUNNING |= {"F", "B", "W", "Block", ""}
PRODUCT = "dot_general"
SLICES = ("dynamic_slice", "dynamic_update_slice", "scatter-add", "slice", "add")
NO_COMPUTE = (*COLLECTIVES, "while", "conditional", "call")
SLOTS, ELSEWHERE, UPDATE = "slots and sums", "elsewhere", "update"


class ModuleSecs(NamedTuple):
    """Seconds of a step on the rank that the others wait for: in products and what is fused with them, in the rest."""

    module: str
    products: float
    others: float

    @property
    def total(self) -> float:
        return self.products + self.others


def secs_by_module(text: str, shares: Shares, clock_hz: float) -> list[ModuleSecs]:
    """The modules of a program as text, those that take longest first."""
    cycles = Cycles(parse(text), shares)
    cycles.add(cycles.module.entry, 1)
    rows = [ModuleSecs(name, *(part / clock_hz for part in parts)) for name, parts in cycles.found.items()]
    return sorted(rows, key=lambda row: -row.total)


class Cycles:
    """Adds the compiler's cycles up, of loops by their turns and of branches as the schedule takes them."""

    def __init__(self, module: Module, shares: Shares):
        self.module, self.shares = module, shares
        self.found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, times: float) -> None:
        """Those of one computation and all that it calls."""
        home = self.module.computations[name]
        for one in home.instructions:
            for called, share in self._called(one, home):
                self.add(called, times * share)
            if one.kind.removesuffix("-start").removesuffix("-done") not in NO_COMPUTE and one.cycles:
                rest = not one.op_name.endswith(PRODUCT)
                self.found[module_of(one.op_name)][rest] += one.cycles * times

    def _called(self, one: Instruction, home: Computation) -> list[tuple[str, float]]:
        """The computations that an instruction runs, and how often; of branches without a share the dearest."""
        if one.kind == "while":
            return [(one.attribute("body"), self.module.trips(one, home) or 1)]
        if one.kind == "conditional":
            share = self.shares.get(name_of(one.op_name))
            if share is None or len(one.called) != 2:
                return [(max(one.called, key=self._weight), 1)]
            return list(zip(one.called, (1 - share.lockstep, share.lockstep)))
        return [(one.called[0], 1)] if one.kind == "call" else []

    def _weight(self, name: str) -> float:
        alone = Cycles(self.module, self.shares)
        alone.add(name, 1)
        return sum(map(sum, alone.found.values()))


def module_of(op_name: str) -> str:
    """The part of the model that an operation belongs to.

    >>> module_of("jit(train_step)/shard_map/while/body/B/while/body/transpose(jvp(Block))/mlp/up/dot_general")
    'mlp'
    >>> module_of("jit(train_step)/update/cond/branch_1_fun/add"), module_of("jit(train_step)/while/body/dynamic_slice")
    ('update', 'slots and sums')
    """
    if of_update(op_name):
        return UPDATE
    # A function that is jitted by itself, or is private, as jit(_where), is no part of the model.
    *stack, last = re.sub(r"\w+\(|\)", "", re.sub(r"jit\(\w+\)/", "", op_name)).split("/")
    names = [name for name in stack if name not in RUNNING and not name.startswith(("branch_", "_"))]
    if names:
        return names[0] if "->" in names[0] else names[0].lower()
    return SLOTS if last in SLICES else ELSEWHERE
