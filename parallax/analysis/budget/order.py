"""In which order dims lie in memory, where the compiler fixes that, and the copies that this takes."""

from parallax.analysis.budget.program import ELEMENTWISE, REDUCTIONS, SAME, VIEWS, Op, Program, Value

# XLA for CPU wants the dim along which pieces are joined or parted to come first.
COLLECTIVE_DIM = {
    "all_gather": "all_gather_dimension",
    "reduce_scatter": "scatter_dimension",
    "all_to_all": "split_axis",
}


def with_copies(program: Program) -> Program:
    """The program with an operation "arrange" wherever XLA for CPU copies an array into another order of dims.

    A product reads batch, kept and contracted dims on its left and batch, contracted and kept dims on its right;
    matrices it reads either way.
    """
    copies = _Copies(program.ops)
    program.ops = [new for op in program.ops for new in (*copies.before(op), op)]
    for op in program.ops:
        for inner in op.inner:
            with_copies(inner)
    return program.without_unused()


class _Copies:
    def __init__(self, ops: list[Op]):
        self.maker = {value: op for op in ops for value in op.outs}
        self.order: dict[Value, list[int]] = {}  # of what does not lie in the order of its dims
        self.made: dict[tuple[Value, tuple[int, ...]], Value] = {}

    def before(self, op: Op) -> list[Op]:
        """The copies that `op` needs and that are not made yet; `op` reads them from then on."""
        new: list[Op] = []
        if op.name == "dot_general":
            op.ins = [
                x and self._in_order(x, order, new, matrix=len(x.shape) == 2)
                for x, order in zip(op.ins, _product_orders(op), strict=True)
            ]
        elif op.name in COLLECTIVE_DIM:
            first = op.params[COLLECTIVE_DIM[op.name]]
            op.ins = [x and self._in_order(x, _leading(x, first), new) for x in op.ins]
            self.order |= {value: _leading(value, first) for value in op.outs}
        elif op.name not in ELEMENTWISE and op.name not in REDUCTIONS and op.name not in VIEWS:
            op.ins = [self._in_order(x, list(range(len(x.shape))), new) if x in self.order else x for x in op.ins]
        return new

    def _in_order(self, x: Value, order: list[int], new: list[Op], *, matrix: bool = False) -> Value:
        while x in self.maker and (self.maker[x].name in SAME or self.maker[x].name == "transpose"):
            if self.maker[x].name == "transpose":
                order = [self.maker[x].params["permutation"][dim] for dim in order]
            x = self.maker[x].ins[0]
        own = self.order.get(x, range(len(x.shape)))
        wanted = tuple(dim for dim in order if x.shape[dim] > 1)
        if matrix or wanted == tuple(dim for dim in own if x.shape[dim] > 1):
            return x
        if (x, wanted) not in self.made:
            self.made[x, wanted] = Value(x.shape, x.bytes)
            new.append(Op("arrange", [x], [self.made[x, wanted]]))
        return self.made[x, wanted]


def _product_orders(op: Op) -> list[list[int]]:
    contracted, batch = op.params["dimension_numbers"]
    kept = [
        [dim for dim in range(len(x.shape)) if dim not in (*c, *b)] if x else []
        for x, c, b in zip(op.ins, contracted, batch, strict=True)
    ]
    return [[*batch[0], *kept[0], *contracted[0]], [*batch[1], *contracted[1], *kept[1]]]


def _leading(x: Value, first: int) -> list[int]:
    return [first, *(dim for dim in range(len(x.shape)) if dim != first)]
