"""Where an equation of a traced program comes from: pass, module and source line."""

import functools
import pathlib
import re
import sysconfig
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

import parallax
from parallax.pipeline import simulated
from parallax.runtime import jaxprs
from parallax.sharding import collectives, layout

PACKAGE = pathlib.Path(parallax.__file__).parent
# They ask on behalf of others.
PLUMBING = tuple(module.__file__ for module in (collectives, jaxprs, layout))
LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
LIBRARIES += [pathlib.Path(jax.__file__).parents[1]]  # an environment may borrow another's
# Scopes of the executor: its passes, and what stages send each other. In B forward's work may be done again.
SCOPES = {"F": "forward", "activations": "forward", "B": "recompute", "W": "backward", "gradients": "backward"}
REMATTED = "rematted_computation"  # as JAX calls what jax.checkpoint runs again
# Holds an array back until a gradient is there.
WAITING = pathlib.Path(simulated.__file__).relative_to(PACKAGE.parent).as_posix()
OUTERMOST = "Block"  # names no part of the model: every layer is one


class Origin(NamedTuple):
    """`stack` holds names of transformations, scopes and modules, outermost first, with those of calling programs;
    `gradient` is whether the equation works on gradients."""

    stack: str
    gradient: bool
    traceback: Any

    @staticmethod
    def of(equation: JaxprEqn, outer: str, reads_gradient: bool) -> "Origin":
        """The origin of an equation of a program that was called under the stack `outer`."""
        stack = "/".join(filter(None, [outer, str(equation.source_info.name_stack)]))
        transposed = "transpose(" in stack and REMATTED not in stack
        return Origin(stack, transposed or reads_gradient, equation.source_info.traceback)

    @property
    def is_forward(self) -> bool:
        """Whether this is forward's by its scope."""
        return _scope(self.stack) == "forward"

    @property
    def makes_no_gradient(self) -> bool:
        """Whether what this returns is made of no gradient, even if it waits for one."""
        return self.is_forward or self.source.startswith(WAITING)

    @property
    def direction(self) -> str:
        """What works on gradients is "backward"; what forward did, and the backward pass does again, "recompute"."""
        if self.gradient and not self.is_forward:
            return "backward"
        return _scope(self.stack) or ("recompute" if REMATTED in self.stack else "forward")

    @property
    def module(self) -> str:
        """The Flax module, as "attention/q"; of what none asked for, the file, as "pipeline/executor"."""
        return _module(self.stack) or self.source.rpartition(":")[0].removeprefix("parallax/").removesuffix(".py")

    @property
    def source(self) -> str:
        """The innermost line that is not the library's: "parallax/model/dense.py:57"; "" where none is known."""
        for frame in self.traceback.frames if self.traceback else ():
            if (name := _shown(frame.file_name)) is not None:
                return f"{name}:{frame.line_num}"
        return ""


@functools.cache
def _scope(stack: str) -> str | None:
    """What the innermost of the executor's scopes says."""
    return next((SCOPES[name] for name in reversed(_names(stack)) if name in SCOPES), None)


@functools.cache
def _module(stack: str) -> str:
    # A name with a dot is a method of the module before it.
    names = [name for name in _names(stack) if name not in (*SCOPES, REMATTED, OUTERMOST) and "." not in name]
    return "/".join(names).lower()


def _names(stack: str) -> list[str]:
    """The names in a stack, without those of transformations.

    >>> _names("B/transpose(jvp(Block))/mlp/down")
    ['B', 'Block', 'mlp', 'down']
    """
    return [name for name in re.sub(r"\w+\(|\)", "", stack).split("/") if name]


@functools.cache
def _shown(file_name: str) -> str | None:
    """How a file is named in a report; None of a file that only passes calls on."""
    if file_name in PLUMBING:
        return None
    path = pathlib.Path(file_name)
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE.parent).as_posix()
    return None if any(path.is_relative_to(folder) for folder in LIBRARIES) else path.name
