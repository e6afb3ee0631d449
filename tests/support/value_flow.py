"""The functions of the package whose operations a value goes through in a traced program, as stops of a walk."""

import ast
import functools
import itertools
import pathlib

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import parallax

JITTED = ("jit", "pjit")
PACKAGE = f"{pathlib.Path(parallax.__file__).parent}/"


@functools.cache
def definitions(path):
    """(first line, last line, name) of each function of a file, inner ones later."""
    found = []

    def visit(node, names):
        for inner in ast.iter_child_nodes(node):
            name = [inner.name] if isinstance(inner, ast.ClassDef | ast.FunctionDef) else []
            if isinstance(inner, ast.FunctionDef):
                found.append((inner.lineno, inner.end_lineno, ".".join(names + name)))
            visit(inner, names + name)

    visit(ast.parse(pathlib.Path(path).read_text(encoding="utf-8")), [])
    return found


@functools.cache
def stop_at(file, line):
    """The stop to which a line belongs, None outside of the package's functions."""
    if not file.startswith(PACKAGE):
        return None
    within = [name for first, last, name in definitions(file) if first <= line <= last]
    return f"{file.removeprefix(PACKAGE)} {within[-1]}" if within else None


def stops_of(equation):
    """The stops that were being called when an equation was traced."""
    traceback = equation.source_info.traceback
    stops = [stop_at(frame.file_name, frame.line_num) for frame in traceback.frames] if traceback else []
    return [stop for stop in stops if stop]


class Flow:
    """Which equations have read a value, and from which of them each of these has it. What a loop carries on is left
    out: a value goes once through its body."""

    def __init__(self, program, start):
        self.functions, self.earlier, self.numbers = {}, {}, itertools.count()
        invars = program.jaxpr.invars
        self.run(program.jaxpr, {invars[start]: {None}})

    def run(self, jaxpr, sources):
        """Sources of a program's results, from those of its inputs: {variable: numbers of equations}."""
        for equation in jaxpr.eqns:
            read = [sources.get(var, set()) if not isinstance(var, Literal) else set() for var in equation.invars]
            if any(read):
                sources |= zip(equation.outvars, self.equation(equation, read), strict=True)
        return [sources.get(var, set()) if not isinstance(var, Literal) else set() for var in jaxpr.outvars]

    def equation(self, equation, read):
        """Sources of its results. A loop or a branch hands each operand on to its bodies; a jitted function is one
        operation, since its own may have been traced elsewhere."""
        passed = [{self.number(equation, sources)} if sources else set() for sources in read]
        inner = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        inner = [getattr(x, "jaxpr", x) for x in inner if isinstance(x, Jaxpr | ClosedJaxpr)]
        bodies = [jaxpr for jaxpr in inner if len(jaxpr.outvars) == len(equation.outvars)]
        if not bodies or equation.primitive.name in JITTED:
            return [set().union(*passed)] * len(equation.outvars)
        given = [zip(jaxpr.invars, passed[len(passed) - len(jaxpr.invars) :]) for jaxpr in bodies]
        results = [self.run(jaxpr, dict(pairs)) for jaxpr, pairs in zip(bodies, given)]
        return [set().union(*same) for same in zip(*results)]

    def number(self, equation, sources):
        """A number for what an equation reads from these."""
        number = next(self.numbers)
        self.functions[number], self.earlier[number] = stops_of(equation), sources
        return number

    def until(self, stop):
        """The functions of what the value goes through before the first equation in `stop`, and of that one."""
        number = next(number for number, functions in self.functions.items() if stop in functions)
        found, left = {}, {number}
        while left:
            number = left.pop()
            if number is not None:
                found |= dict.fromkeys(self.functions[number])
                left |= self.earlier[number]
        return [*found]
