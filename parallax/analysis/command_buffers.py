"""Finds the instructions that the kernels of a GPU's command buffers ran.

XLA launches many kernels of a program at once, as a CUDA graph that it calls a command buffer. A trace then names each
kernel's function, but the command buffer instead of the instruction. XLA's own functions are named after instructions;
equal instructions share a function. Library kernels are found by position: kernels run in the order of the scheduled
program, so a cuBLAS kernel is the cuBLAS call between the instructions of the kernels before and after it.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from parallax.analysis.hlo import Instruction, Module

BUFFER = "command_buffer"  # prefix of an operation's name
CUBLAS, CUDNN, COPIES = "cuBLAS", "cuDNN", "copies"
# Libraries by a pattern of the function's name; the first that matches.
LIBRARY_KERNELS = {
    COPIES: re.compile(r"memcpy|memset", re.IGNORECASE),
    CUDNN: re.compile(r"cudnn", re.IGNORECASE),
    CUBLAS: re.compile(r"nvjet|xmma|cublas|cutlass|splitk|gemv", re.IGNORECASE),
}
LIBRARY_CALLS = {CUBLAS: "__cublas", CUDNN: "__cudnn"}  # prefixes of their custom calls' targets


LibraryKernel = tuple[int, str]  # its index among the kernels that ran, and its library


class Place(NamedTuple):
    """An instruction of a program: its computation's name, and its index there."""

    computation: str
    number: int


def library_of(kernel: str) -> str:
    """The library of a kernel's function, or `COPIES`; "" for XLA's own functions.

    >>> library_of("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"), library_of("loop_add_fusion_12")
    ('cuBLAS', '')
    """
    return next((name for name, pattern in LIBRARY_KERNELS.items() if pattern.search(kernel)), "")


class CommandBuffers:
    """The instructions of a program, by the kernels that run them."""

    def __init__(self, program: Module):
        self.program = program
        self.named: dict[str, list[Place]] = {}  # by the name of the kernel's function
        groups: dict[str, list[Place]] = {}
        for name, home in program.computations.items():
            for number, one in enumerate(home.instructions):
                alike = groups.setdefault(one.deduplicated_name or one.name, [])
                alike.append(Place(name, number))
                self.named[re.sub(r"[.\-]", "_", one.name)] = alike

    def instructions(self, kernels: Sequence[str]) -> list[Instruction | None]:
        """The instruction of each kernel, in the order in which they ran; None for copies and unknown ones."""
        places: list[Place | None] = [None] * len(kernels)
        last, unnamed = None, []
        for at, kernel in enumerate(kernels):
            library = library_of(kernel)
            if kernel in self.named and library != COPIES:
                places[at] = here = self._next(kernel, last)
                self._place_between(places, unnamed, last, here)
                last, unnamed = here, []
            elif library in LIBRARY_CALLS:
                unnamed.append((at, library))
        self._place_between(places, unnamed, last, None)
        return [place and self.program.computations[place.computation].instructions[place.number] for place in places]

    def _next(self, kernel: str, last: Place | None) -> Place:
        """Among instructions that share a kernel, the next one in the running computation, else the first."""
        found = self.named[kernel]
        near = [place for place in found if last and place.computation == last.computation]
        return next((place for place in near if place > last), (near or found)[0])

    def _place_between(
        self, places: list[Place | None], rest: list[LibraryKernel], before: Place | None, after: Place | None
    ) -> None:
        """Places of kernels that ran between two instructions: library calls before the later one, as far as its
        computation has them there; for the other kernels, calls after the earlier one."""
        if after is not None:
            first = before.number + 1 if before and before.computation == after.computation and before < after else 0
            rest = self._matched(places, rest[::-1], after.computation, range(after.number - 1, first - 1, -1))
        if before is not None and rest:
            end = len(self.program.computations[before.computation].instructions)
            self._matched(places, rest[::-1], before.computation, range(before.number + 1, end))

    def _matched(
        self, places: list[Place | None], rest: list[LibraryKernel], name: str, numbers: range
    ) -> list[LibraryKernel]:
        """Match these kernels in order with the calls at `numbers` of a computation; returns unmatched kernels.

        A call of cuBLAS is one kernel, one of cuDNN may be several.
        """
        instructions, numbers = self.program.computations[name].instructions, list(numbers)
        for done, (at, library) in enumerate(rest):
            match = next(
                (i for i, n in enumerate(numbers) if instructions[n].target.startswith(LIBRARY_CALLS[library])), None
            )
            if match is None:
                return rest[done:]
            places[at] = Place(name, numbers[match])
            numbers = numbers[match + (library == CUBLAS) :]
        return []
