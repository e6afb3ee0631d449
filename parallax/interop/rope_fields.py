"""Rotary embedding as config.json of Hugging Face's `transformers` describes it, and as model.rope_* do."""

import math
from collections.abc import Mapping
from typing import Any

from parallax.config.sections import ModelConfig
from parallax.interop.fields import Fields
from parallax.model.rope import Rope, rope_of
from parallax.runtime.errors import ConfigError

TYPES = ("default", "linear", "llama3", "yarn")
THETA = 10_000.0  # where none is written
YARN_TURNS = dict(rope_fast_turns=32.0, rope_slow_turns=1.0)


def read_rope(fields: Fields, context: int, attention: str) -> dict[str, Any]:
    """The keys model.rope_*; `context` is max_position_embeddings.

    Both ways of writing are read: rope_theta and rope_scaling side by side, or all in rope_parameters.
    """
    theta = fields.number("rope_theta", THETA)
    new, old = fields.object("rope_parameters"), fields.object("rope_scaling")
    if new and old:
        raise ConfigError(f"{fields.where} has rope_parameters and rope_scaling; leave the one that is meant")
    scaling = fields.within("rope_parameters" if new else "rope_scaling", new or old)
    kind = scaling.take("rope_type", scaling.take("type", "default"))
    if kind not in TYPES:
        scaling.refuse("rope_type", kind, ", ".join(map(repr, TYPES)))
    for each in (fields, scaling):
        each.only("partial_rotary_factor", 1, absent=1)
    found = {"rope_theta": scaling.number("rope_theta", theta), "rope_factor": 1.0, "rope_original_seq": context}
    found |= {"rope_temperature": 0.0, "rope_magnitude": 1.0, **YARN_TURNS}
    found |= {"default": _none, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[kind](scaling, context, attention)
    scaling.end()
    return found


def _none(scaling: Fields, context: int, attention: str) -> dict[str, Any]:
    return {"rope_scaling": "none"}


def _linear(scaling: Fields, context: int, attention: str) -> dict[str, Any]:
    scaling.ignore(["original_max_position_embeddings"])
    return {"rope_scaling": "linear", "rope_factor": _factor(scaling)}


def _llama3(scaling: Fields, context: int, attention: str) -> dict[str, Any]:
    return {
        "rope_scaling": "llama3",
        "rope_factor": _factor(scaling),
        "rope_original_seq": scaling.whole("original_max_position_embeddings", context),
        "rope_fast_turns": scaling.number("high_freq_factor"),
        "rope_slow_turns": scaling.number("low_freq_factor"),
    }


def _yarn(scaling: Fields, context: int, attention: str) -> dict[str, Any]:
    original = scaling.whole("original_max_position_embeddings", context)
    factor = _factor(scaling, max(context / original, 1.0))
    given = scaling.number("attention_factor", 0.0)
    own, all_dims = (scaling.number(name, 0.0, zero=True) for name in ("mscale", "mscale_all_dim"))
    grown = lambda weight: _grown(factor, weight)  # noqa: E731
    magnitude = given or (grown(own) / grown(all_dims) if own and all_dims else grown(1.0))
    scaling.only("truncate", True, absent=True)
    scaling.ignore(["finetuned"])
    scaling.pass_over("attn_factor", "transformers reads attention_factor, and does without where it is absent")
    found = {
        "rope_scaling": "yarn",
        "rope_factor": factor,
        "rope_original_seq": original,
        "rope_fast_turns": scaling.number("beta_fast", 32.0),
        "rope_slow_turns": scaling.number("beta_slow", 1.0),
    }
    if attention == "mla":  # a head is rotated in part: what grows with the factor is the part, or, by name, all of it
        return found | {"rope_magnitude": magnitude, "rope_temperature": grown(all_dims) ** 2 if all_dims else 1.0}
    return found | {"rope_temperature": magnitude**2}


def _factor(scaling: Fields, absent: Any = None) -> float:
    factor = scaling.number("factor") if absent is None else scaling.number("factor", absent)
    if factor < 1:
        scaling.refuse("factor", factor, "1 or more")
    return factor


def _grown(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1


def write_rope(model: ModelConfig) -> Mapping[str, Any]:
    """rope_theta and, where there is one, rope_scaling, as all versions of `transformers` read them.

    Raises:
        ConfigError: these fields cannot say what the model does.
    """
    rope = rope_of(model)
    if rope.scaling == "none":
        _check_plain(model, rope)
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = rope.original_seq
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.slow_turns, "high_freq_factor": rope.fast_turns}
    if rope.scaling == "yarn":
        scaling |= {"beta_fast": rope.fast_turns, "beta_slow": rope.slow_turns, **_strengths(model, rope)}
    else:
        _check_plain(model, rope)
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def context_of(model: ModelConfig, known: int) -> int:
    """max_position_embeddings: `known`, but for yarn, whose factor some versions of `transformers` take from it."""
    return round(model.rope_original_seq * model.rope_factor) if model.rope_scaling == "yarn" else known


def _strengths(model: ModelConfig, rope: Rope) -> dict[str, float]:
    temperature = rope.temperature()
    if model.attention == "gqa":
        return {"attention_factor": rope.magnitude * math.sqrt(temperature)}
    if temperature == 1:
        return {"attention_factor": rope.magnitude}
    if temperature < 1 or rope.factor == 1:
        raise ConfigError(
            f"model.rope_temperature={temperature:g} with rope_factor={rope.factor:g} has no place in a config.json; "
            "use 1 or more, with a rope_factor above 1"
        )
    weight = (math.sqrt(temperature) - 1) / (0.1 * math.log(rope.factor))
    return {"attention_factor": rope.magnitude, "mscale": weight, "mscale_all_dim": weight}


def _check_plain(model: ModelConfig, rope: Rope) -> None:
    if rope.temperature() != 1 or rope.magnitude != 1:
        raise ConfigError(
            f"model.rope_temperature={model.rope_temperature:g} and rope_magnitude={rope.magnitude:g} have no place in "
            f"a config.json with model.rope_scaling={rope.scaling!r}; use 0 and 1.0, or rope_scaling='yarn'"
        )
