"""Values of `pipeline.remat`, the parts of a layer that the backward pass recomputes, and of `pipeline.residuals_on`,
the parts whose residuals are in host memory."""

from collections.abc import Iterable

from parallax.errors import ConfigError, quoted, words_of

NORM, AFTER_ATTENTION = "norm", "out"
# Activation names, which layers set with `checkpoint_name`, in the order of a layer, and the activations of each.
REMAT_PARTS = {
    NORM: "the normed inputs of attention and of the MLP",
    "latent": "with attention='mla', the down projections: latents, and the key part that all heads share",
    "qk": "with qk_norm, queries and keys before their norms",
    "q": "queries of the heads",
    "kv": "keys and values of the heads",
    "core": "the result of softmax attention, and the logsumexp of each query",
    AFTER_ATTENTION: "the residual stream after attention, or what norms after it read: its output projection",
    "router": "in a mixture, the router's logits",
    "dispatch": "in a mixture, tokens that a rank receives for its experts: the messages of the exchange",
    "experts": "in a mixture, gate and up of its experts",
    "ffn": "gate and up of the MLP, and of shared experts",
    "swiglu": "silu(gate) * up of the MLP, and of shared experts; of others what is between their products",
    "down": "with norms after the MLP, what they read: its down projection",
}
# The means over a token's width from which its norms are computed: no part of a set, but saved with each set where
# `saves_means_of_norms` says so.
NORM_MEANS = "norm_means"
WITHOUT_PRODUCTS = (NORM, "qk", "router", "dispatch", "swiglu")
# Names for sets of parts.
OF_HEADS = ("q", "kv")
SETS = {"qkv": OF_HEADS, "elementwise": WITHOUT_PRODUCTS}
SETS |= {"attention": (*WITHOUT_PRODUCTS, "latent", *OF_HEADS, "core", AFTER_ATTENTION)}
ALONE = ("none", "layer", "stage")  # values that are not sets: save all that the backward pass reads, or only inputs
REMAT = ("none", "elementwise", "attention", "layer", "stage")
LAYER_INPUT = "input"  # the input of the layer or the stage; not a part of `remat`, since it is always saved
RESIDUALS_ON = ("device", "host")  # values of `residuals_on` that are not sets


def canonical_remat(written: str) -> str:
    """The same set in canonical form; ConfigError if a name is unknown, or if one that must be alone is not.

    >>> canonical_remat("ffn norm"), canonical_remat("kv q ffn elementwise"), canonical_remat("layer")
    ('norm ffn', 'elementwise qkv ffn', 'layer')
    """
    words = words_of("pipeline.remat", written, (*SETS, *REMAT_PARTS), ALONE)
    if words[0] in ALONE:
        return words[0]
    sets = [name for name in ("attention", "elementwise") if name in words][:1]  # the larger has the smaller
    left = _in_order(_parts_of(words) - _parts_of(sets))
    if set(OF_HEADS) <= set(left):
        left = ["qkv" if part == "q" else part for part in left if part != "kv"]
    return " ".join([*sets, *left])


def canonical_residuals_on(written: str) -> str:
    """The same value in canonical form; ConfigError if a name is unknown, or if one that must be alone is not.

    >>> canonical_residuals_on("ffn input"), canonical_residuals_on("host")
    ('input ffn', 'host')
    """
    words = words_of("pipeline.residuals_on", written, (LAYER_INPUT, "qkv", *REMAT_PARTS), RESIDUALS_ON)
    if words[0] in RESIDUALS_ON:
        return words[0]
    return " ".join([LAYER_INPUT] * (LAYER_INPUT in words) + [*_in_order(_parts_of(words))])


def check_residuals_on(residuals_on: str, remat: str) -> None:
    """Raise ConfigError if a set has a part that `remat` does not save under its name."""
    if residuals_on in RESIDUALS_ON:
        return
    there = () if remat == "none" else (LAYER_INPUT, *(saved_parts(remat) or ()))
    by_name = f"a set of {', '.join(there)}" if there else "'host'"
    for part in residuals_on.split():
        if part not in there:
            raise ConfigError(
                f"pipeline.residuals_on={quoted(residuals_on)} has {part!r}, but pipeline.remat={remat!r} does not "
                f"save it by name; use {by_name}, or another remat"
            )


def is_moved(residuals_on: str, part: str | None) -> bool:
    """Whether the residuals of a part are in host memory; None stands for those without a name."""
    return residuals_on == "host" or part in residuals_on.split()


def recomputed_parts(remat: str) -> tuple[str, ...] | None:
    """The parts of a set, in the order of a layer; None for values that are not sets."""
    if remat in ALONE:
        return None
    return _in_order(_parts_of(remat.split()))


def saved_parts(remat: str) -> tuple[str, ...] | None:
    """The parts that a set does not recompute: the forward pass saves what the backward pass needs of them."""
    parts = recomputed_parts(remat)
    return None if parts is None else tuple(part for part in REMAT_PARTS if part not in parts)


def _parts_of(words: Iterable[str]) -> set[str]:
    return {part for word in words for part in SETS.get(word, [word])}


def _in_order(parts: set[str]) -> tuple[str, ...]:
    return tuple(part for part in REMAT_PARTS if part in parts)
