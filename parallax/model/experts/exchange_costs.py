"""Communication and row counts of a mixture under an even load, and the choice of the exchange that sends less."""

import math

from parallax.config.remat import recomputed_parts
from parallax.config.sections import AUTO, LayoutConfig, ModelConfig

ROOM_OVER_EVEN = 1.25  # a usual load is at most this multiple of an even load
ROWS_STEP = 256


def even_load(model: ModelConfig, ep: int) -> float:
    """The share of grouped products' rows that is in use if all choices of experts are equally likely. There are more
    rows, since no token may be dropped.

    >>> even_load(ModelConfig(layers=1, layers_of="moe", experts=8, experts_per_token=2), 4)
    0.8
    """
    if not model.has_mixtures:
        return 1.0
    here = model.experts // ep
    most = min(model.experts_per_token, here)
    share = model.experts_per_token * here / model.experts / most
    return max(share, 1 / ROOM_OVER_EVEN if ep > 1 else 1)


def usual_rows(choices: int, room: int, ranks: int) -> int:
    """Rows that an expert rank computes unless more are in use: a quarter more than its share of these choices.

    >>> usual_rows(4096, 4096, 4), usual_rows(64, 64, 4), usual_rows(4096, 4096, 1)
    (1280, 20, 4096)
    """
    step = ROWS_STEP if choices >= ROWS_STEP * ranks else 1
    return min(room, math.ceil(ROOM_OVER_EVEN * choices / ranks / step) * step)


def exchanged_rows(model: ModelConfig, ep: int) -> dict[str, float]:
    """For each exchange, rows (tokens or results) that a rank sends in the forward pass for each of its tokens.

    >>> exchanged_rows(ModelConfig(experts=8, experts_per_token=2), 4)
    {'gather': 6, 'ragged': 3.0}
    """
    return {"gather": 2 * (ep - 1), "ragged": 2 * model.experts_per_token * (ep - 1) / ep}


def share_of_host(experts: int, choices: int, hosts: int) -> float:
    """The share of tokens that have any of their choices on one of the hosts, if all choices are equally likely.

    >>> round(share_of_host(32, 4, 2), 3), share_of_host(8, 1, 4)
    (0.949, 0.25)
    """
    return 1 - math.comb(experts - experts // hosts, choices) / math.comb(experts, choices)


def rows_over_hosts(model: ModelConfig, ep: int, hosts: int) -> tuple[float, float]:
    """The rows that the ragged exchange sends between hosts and inside a rank's host, as `exchanged_rows`.

    >>> rows_over_hosts(ModelConfig(experts=8, experts_per_token=2), 4, 2)
    (1.571..., 2.0)
    """
    share = share_of_host(model.experts, model.experts_per_token, hosts)
    return 2 * (hosts - 1) * share, 2 * model.experts_per_token * (ep - hosts) / ep


def exchange_of(asked: str, model: ModelConfig, ep: int, *, ragged: bool) -> str:
    """The exchange that layout.exchange selects. "auto" is the one that sends less, and "ragged" if both send as much:
    a rank then holds the rows of its experts alone, not all ranks' tokens, too. Where there is no `ragged` all-to-all,
    as on CPUs, it is "gather".

    >>> [exchange_of("auto", ModelConfig(experts=8, experts_per_token=k), 2, ragged=True) for k in (2, 3)]
    ['ragged', 'gather']
    """
    if asked != AUTO:
        return asked
    if ep == 1 or not ragged:
        return "gather"
    sent = exchanged_rows(model, ep)
    return "ragged" if sent["ragged"] <= sent["gather"] else "gather"


def sends_again(exchange: str, remat: str, layout: LayoutConfig, *, split: bool) -> bool:
    """Whether the backward pass sends tokens once more. If gate and up or chunks are recomputed, so are the messages
    for them; and W of a backward pass that is `split`, which has the products that read tokens, sends only gradients.

    >>> chunks = [LayoutConfig(expert_chunk_tokens=chunk) for chunk in (0, 64)]
    >>> [sends_again("ragged", "elementwise", layout, split=False) for layout in chunks]
    [True, False]
    """
    recomputed = recomputed_parts(remat) or ()
    of_experts = "experts" in recomputed or layout.expert_chunk_tokens > 0 or split
    return exchange == "ragged" and "dispatch" in recomputed and not of_experts
