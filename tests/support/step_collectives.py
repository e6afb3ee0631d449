"""What a step sends, for tests of its bytes."""

from parallax.analysis.traced.collectives import Sent, busiest, collectives_by_rank


def step_collectives(model, rows: int, seq: int) -> list[Sent]:
    """What a device sends for the loss and gradients of a step, each message as often as on any pipeline rank."""
    return busiest(collectives_by_rank(model, rows, seq))


def at_once(topology):
    """The same chips with messages of no latency, which take the time of their bytes alone."""
    return topology._replace(chip=topology.chip._replace(start_secs=0.0, link_secs=0.0, network_secs=0.0, nccl=""))
