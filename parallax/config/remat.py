"""What `pipeline.remat` says: the parts of a layer that the backward pass makes again; and `pipeline.residuals_on`:
those that wait for it in host memory."""

from collections.abc import Iterable

from parallax.runtime.errors import ConfigError, nearest, quoted

# Activation names, as layers give them by `checkpoint_name`, in the order of a layer; and what has each.
REMAT_PARTS = {
    "norm": "the normed inputs of attention and of the MLP",
    "latent": "with attention='mla', the down projections: latents, and the key part that all heads share",
    "qk": "with qk_norm, queries and keys before their norms",
    "q": "queries of the heads",
    "kv": "keys and values of the heads",
    "core": "the result of softmax attention, and the logsumexp of each query",
    "out": "the residual stream behind attention: its output projection",
    "router": "of a mixture, the router's logits",
    "dispatch": "of a mixture, tokens as they come to the experts of a rank: the messages of its exchange",
    "experts": "of a mixture, gate and up of its experts",
    "ffn": "gate and up of the MLP, and of shared experts",
    "swiglu": "silu(gate) * up of the MLP, and of shared experts",
}
WITHOUT_PRODUCTS = ("norm", "qk", "router", "dispatch", "swiglu")
# Words for sets of parts.
OF_HEADS = ("q", "kv")
SETS = {"qkv": OF_HEADS, "elementwise": WITHOUT_PRODUCTS}
SETS |= {"attention": (*WITHOUT_PRODUCTS, "latent", *OF_HEADS, "core", "out")}
ALONE = ("none", "layer", "stage")  # words that are no set: all that the backward pass reads is saved, or inputs alone
REMAT = ("none", "elementwise", "attention", "layer", "stage")
INPUT = "input"  # the layer's, or the stage's, input: no part, since it is always saved
RESIDUALS_ON = ("device", "host")  # words of `residuals_on` that are no set


def canonical_remat(written: str) -> str:
    """The same set in the one way to write it; ConfigError where a name is unknown, or stands beside one that stands
    alone.

    >>> canonical_remat("ffn norm"), canonical_remat("kv q ffn elementwise"), canonical_remat("layer")
    ('norm ffn', 'elementwise qkv ffn', 'layer')
    """
    words = written.split()
    for word in words:
        if word not in (*REMAT, *SETS, *REMAT_PARTS):
            which = "is unknown" if len(words) == 1 else f"has {quoted(word)}, which is unknown"
            raise ConfigError(
                f"pipeline.remat={quoted(written)} {which}; {nearest(word, [*REMAT, 'qkv', *REMAT_PARTS])}"
            )
    if not words:
        raise ConfigError(f"pipeline.remat={quoted(written)} names no part; use 'none' to make nothing again")
    alone = [word for word in words if word in ALONE]
    if alone and len(words) > 1:
        raise ConfigError(
            f"pipeline.remat={quoted(written)} has {alone[0]!r}, which stands alone; use it so, or a set of "
            f"{', '.join((*SETS, *REMAT_PARTS))}"
        )
    if alone:
        return alone[0]
    sets = [name for name in ("attention", "elementwise") if name in words][:1]  # the larger has the smaller
    left = _in_order(_parts_of(words) - _parts_of(sets))
    if set(OF_HEADS) <= set(left):
        left = ["qkv" if part == "q" else part for part in left if part != "kv"]
    return " ".join([*sets, *left])


def canonical_residuals_on(written: str) -> str:
    """The same in the one way to write it; ConfigError where a name is unknown, or a word stands beside others.

    >>> canonical_residuals_on("ffn input"), canonical_residuals_on("host")
    ('input ffn', 'host')
    """
    words = written.split()
    if len(words) == 1 and words[0] in RESIDUALS_ON:
        return words[0]
    known = [*RESIDUALS_ON, INPUT, "qkv", *REMAT_PARTS]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"pipeline.residuals_on={quoted(written)} has {quoted(word)}, which is unknown; {nearest(word, known)}"
            )
    if not words or set(words) & set(RESIDUALS_ON):
        raise ConfigError(
            f"pipeline.residuals_on={quoted(written)} is no set of parts; use 'device' or 'host' alone, or a set of "
            f"{', '.join(known[len(RESIDUALS_ON) :])}"
        )
    return " ".join([INPUT] * (INPUT in words) + [*_in_order(_parts_of(words))])


def check_residuals_on(residuals_on: str, remat: str) -> None:
    """Raise ConfigError where a set has what `remat` does not save, or not by a name."""
    if residuals_on in RESIDUALS_ON:
        return
    there = () if remat == "none" else (INPUT, *(saved_parts(remat) or ()))
    by_name = f"a set of {', '.join(there)}" if there else "'host'"
    for part in residuals_on.split():
        if part not in there:
            raise ConfigError(
                f"pipeline.residuals_on={quoted(residuals_on)} has {part!r}, of which pipeline.remat={remat!r} saves "
                f"nothing by name; use {by_name}, or another remat"
            )


def is_moved(residuals_on: str, part: str | None) -> bool:
    """Whether what is saved of a part waits in host memory; None is what has no name."""
    return residuals_on == "host" or part in residuals_on.split()


def recomputed_parts(remat: str) -> tuple[str, ...] | None:
    """The parts of a set, in the order of a layer; None of a word that is no set."""
    if remat in ALONE:
        return None
    return _in_order(_parts_of(remat.split()))


def saved_parts(remat: str) -> tuple[str, ...] | None:
    """The parts that a set does not make again: the forward pass saves what the backward pass needs of them."""
    parts = recomputed_parts(remat)
    return None if parts is None else tuple(part for part in REMAT_PARTS if part not in parts)


def _parts_of(words: Iterable[str]) -> set[str]:
    return {part for word in words for part in SETS.get(word, [word])}


def _in_order(parts: set[str]) -> tuple[str, ...]:
    return tuple(part for part in REMAT_PARTS if part in parts)
