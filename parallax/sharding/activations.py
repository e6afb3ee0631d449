"""Layouts of activations, made here and nowhere else: which axes cut the batch, and which the residual stream.

Strings name every axis that may cut a batch. One that a mesh does not have is not bound: it cuts and sends nothing.
"""

from parallax.config.sections import RESIDUAL_VALUES, LayoutConfig
from parallax.sharding.layout import Layout

BATCH_AXES = ("replica", "dp", "ep")
CONTEXT_AXIS, EXPERT_AXIS = "cp", "ep"
TOKEN_AXES = (*BATCH_AXES, CONTEXT_AXIS)  # those over which a batch's tokens are cut
ROWS = "/".join(("batch", *BATCH_AXES))
SEQ = f"seq/{CONTEXT_AXIS}"
TOKENS = f"{ROWS} {SEQ}"  # ids; activations of a layer's inside, of which every tp rank has all of its cp rank's
SHARED_ROWS = f"{ROWS}/pp"  # where pipeline ranks share embedding and head
# The residual stream between layers, by the values of layout.residual, which leave the batch's other axes unsaid.
RESIDUALS = {value: value.replace("batch/dp", ROWS).replace("seq", SEQ) for value in RESIDUAL_VALUES}
BATCH = Layout.parse(TOKENS)


def activation(dims: str, *, seq: str = SEQ) -> str:
    """The layout of an activation with these dims behind rows and positions.

    >>> activation("d_ff/tp")
    'batch/replica/dp/ep seq/cp d_ff/tp'
    """
    return f"{ROWS} {seq} {dims}"


def residual_layout(layout: LayoutConfig) -> str:
    """The layout of the residual stream that a config asks for."""
    return RESIDUALS[" ".join(layout.residual.split())]


def with_rows(layout: str, rows: str) -> Layout:
    """The layout with the batch cut as `rows` says.

    >>> str(with_rows("batch/dp seq", "batch/dp/pp"))
    'batch/dp/pp seq'
    """
    return Layout.parse(layout).with_cut("batch", Layout.parse(rows).cut_of("batch"))
