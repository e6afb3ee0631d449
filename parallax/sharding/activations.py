"""Layouts of activations, all defined here: which axes shard the batch, and which the residual stream.

Strings name every axis that may shard a batch. An axis that a mesh does not have is not bound: it shards and sends
nothing.
"""

from parallax.config.sections import RESIDUAL_VALUES, LayoutConfig
from parallax.sharding.layout import Layout

BATCH_AXES = ("replica", "dp", "ep")
CONTEXT_AXIS, EXPERT_AXIS = "cp", "ep"
TOKEN_AXES = (*BATCH_AXES, CONTEXT_AXIS)  # the axes that shard a batch's tokens
ROWS = "/".join(("batch", *BATCH_AXES))
SEQ = f"seq/{CONTEXT_AXIS}"
TOKENS = f"{ROWS} {SEQ}"  # ids, and activations inside a layer: each tp rank has all tokens of its cp rank
SHARED_ROWS = f"{ROWS}/pp"  # where pipeline ranks share embedding and head
# The residual stream between layers, by the values of layout.residual, which do not name the batch's other axes.
RESIDUALS = {value: value.replace("batch/dp", ROWS).replace("seq", SEQ) for value in RESIDUAL_VALUES}
BATCH = Layout.parse(TOKENS)


def activation(dims: str, *, seq: str = SEQ) -> str:
    """The layout of an activation with these dims after rows and positions.

    >>> activation("d_ff/tp")
    'batch/replica/dp/ep seq/cp d_ff/tp'
    """
    return f"{ROWS} {seq} {dims}"


def residual_layout(layout: LayoutConfig) -> str:
    """The layout of the residual stream that a config asks for."""
    return RESIDUALS[" ".join(layout.residual.split())]


def with_rows(layout: str, rows: str) -> Layout:
    """The layout with the batch sharded as `rows` says.

    >>> str(with_rows("batch/dp seq", "batch/dp/pp"))
    'batch/dp/pp seq'
    """
    return Layout.parse(layout).with_cut("batch", Layout.parse(rows).cut_of("batch"))
