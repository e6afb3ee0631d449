"""What a step sends, for tests of its bytes."""

from parallax.analysis.traced.collectives import Sent, busiest, collectives_by_rank


def step_collectives(model, rows: int, seq: int) -> list[Sent]:
    """What a device sends for the loss and gradients of a step, each message as often as on any pipeline rank."""
    return busiest(collectives_by_rank(model, rows, seq))
