"""What a mixture's tokens send and fill where all experts get as many of them, and which exchange sends less."""

import math
from typing import NamedTuple

from parallax.config.sections import AUTO, ModelConfig

ROOM_OVER_EVEN = 1.25  # times an even load is what an expert rank gets at most, usually
ROWS_STEP = 256


class Load(NamedTuple):
    """The shares that are in use of what programs have room for, since nothing may be dropped; 1 where all is.

    `grouped` is that of the rows of a grouped product, and `sent` that of the rows that a ragged exchange sends.
    """

    grouped: float = 1.0
    sent: float = 1.0


ALL_IN_USE = Load()


def even_load(model: ModelConfig, ep: int) -> Load:
    """The load of so many expert ranks where every choice of experts is as likely.

    >>> even_load(ModelConfig(layers=1, layers_of="moe", experts=8, experts_per_token=2), 4)
    Load(grouped=0.8, sent=0.928571428571428...)
    """
    if "moe" not in model.kinds:
        return ALL_IN_USE
    here = model.experts // ep
    most = min(model.experts_per_token, here)
    return Load(
        grouped=max(model.experts_per_token * here / model.experts / most, 1 / ROOM_OVER_EVEN if ep > 1 else 1),
        sent=ranks_of_a_token(model, ep) / min(model.experts_per_token, ep),
    )


def usual_rows(choices: int, room: int, ranks: int) -> int:
    """For how many rows an expert rank computes unless more are in use: a quarter more than its share of these choices.

    >>> usual_rows(4096, 4096, 4), usual_rows(64, 64, 4), usual_rows(4096, 4096, 1)
    (1280, 20, 4096)
    """
    step = ROWS_STEP if choices >= ROWS_STEP * ranks else 1
    return min(room, math.ceil(ROOM_OVER_EVEN * choices / ranks / step) * step)


def ranks_of_a_token(model: ModelConfig, ep: int) -> float:
    """On how many expert ranks a token's experts are, on average.

    >>> ranks_of_a_token(ModelConfig(experts=64, experts_per_token=6), 8)
    4.535...
    """
    elsewhere = math.comb(model.experts - model.experts // ep, model.experts_per_token)
    return ep * (1 - elsewhere / math.comb(model.experts, model.experts_per_token))


def exchanged_rows(model: ModelConfig, ep: int) -> dict[str, float]:
    """By exchange, how often a rank sends a token or the sum of its results forward, for each token that it has.

    >>> exchanged_rows(ModelConfig(experts=8, experts_per_token=2), 4)
    {'gather': 6, 'ragged': 2.785...}
    """
    return {"gather": 2 * (ep - 1), "ragged": 2 * ranks_of_a_token(model, ep) * (ep - 1) / ep}


def exchange_of(asked: str, model: ModelConfig, ep: int, *, on_cpus: bool) -> str:
    """The exchange that layout.exchange asks for; "auto" is the one that sends less, and on CPUs, where a ragged one is
    not to be had, "gather"."""
    if asked != AUTO:
        return asked
    if on_cpus or ep == 1:
        return "gather"
    sent = exchanged_rows(model, ep)
    return min(sent, key=lambda name: sent[name])
