"""The two tensor-parallel families: which strings a layer is built from."""

from typing import NamedTuple

from parallax.sharding.activations import activation


class Family(NamedTuple):
    """How projections are written; `{dim}` is the contracted dim."""

    x: str  # the layout of a projection's input, behind the rows
    kernel: str  # the cut of the kernel's contracted dim
    keeps_tp: bool  # whether the kernel's output dims are cut over tp

    def input(self, dim: str) -> str:
        """The layout that an input of `dim` must have.

        >>> FAMILIES["scatter"].input("d_model")
        'batch/replica/dp seq d_model/tp'
        """
        return activation(self.x.format(dim=dim))

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
