"""The tensor-parallel families, and the forms of context parallelism: which strings a layer is built from."""

from typing import NamedTuple

from parallax.model.blockwise import GATHERED, RING, WHOLE
from parallax.sharding.activations import CONTEXT_AXIS, SEQ, activation


class ContextForm(NamedTuple):
    """How the softmax core has its tokens: whether cp cuts seq of queries and of keys, or their heads."""

    queries: str  # of seq
    keys: str
    meets: str  # whose keys a query meets: see parallax/model/blockwise.py
    heads: str = "heads/tp"


CONTEXTS = {
    # Every rank has its queries and all keys, gathered.
    "all_gather": ContextForm(SEQ, "seq", GATHERED),
    # Every rank has its queries; keys go from rank to rank.
    "ring": ContextForm(SEQ, SEQ, RING),
    # Every rank has all tokens of its heads (Jacobs et al. 2023).
    "ulysses": ContextForm("seq", "seq", WHOLE, f"heads/tp/{CONTEXT_AXIS}"),
}


class Family(NamedTuple):
    """How projections are written; `{dim}` is the contracted dim."""

    x: str  # the layout of a projection's input, behind the rows
    kernel: str  # the cut of the kernel's contracted dim
    keeps_tp: bool  # whether the kernel's output dims are cut over tp
    context: ContextForm = ContextForm(SEQ, SEQ, WHOLE)

    def input(self, dim: str, *, seq: str = SEQ) -> str:
        """The layout that an input of `dim` must have.

        >>> FAMILIES["scatter"].input("d_model")
        'batch/replica/dp/ep seq/cp d_model/tp'
        """
        return activation(self.x.format(dim=dim), seq=seq)

    def into(self, dim: str, out: str) -> str:
        """The layout of a kernel from `dim` to `out`; `out` says how the output is cut.

        >>> [FAMILIES[name].into("d_model", "d_ff/tp") for name in FAMILIES]
        ['d_model d_ff/tp', 'd_model/tp d_ff']
        """
        out = out if self.keeps_tp else out.replace("/tp", "")
        return f"{self.kernel.format(dim=dim)} {out}"

    def back(self, dims: str) -> str:
        """The layout of a kernel from cut `dims` back to d_model: partial sums, reduce-scattered, in both families.

        >>> FAMILIES["scatter"].back("d_ff/tp")
        'd_ff/tp d_model'
        """
        return f"{dims} d_model"


FAMILIES = {
    # Gather the input over tp, each rank makes its own columns of the output.
    "column_row": Family("{dim}", "{dim}", keeps_tp=True),
    # Leave the input cut, each rank makes a partial sum of the whole output, reduce-scatter it.
    "scatter": Family("{dim}/tp", "{dim}/tp", keeps_tp=False),
}
