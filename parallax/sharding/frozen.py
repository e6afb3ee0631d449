"""Parameters that are not trained, by name or by pattern."""

import dataclasses
import fnmatch
from typing import Any

import jax

from parallax.errors import ConfigError, nearest, quoted
from parallax.sharding.layout import named_leaves, with_parents
from parallax.sharding.parameter import Declared, is_declared, specs_of


def freeze(declared: Any, frozen: str) -> Any:
    """A tree of `Declared` in which the parameters that `frozen` names are not trained, and beside adapters no others.

    Its words are names of parts, modules or parameters, or patterns of such names, in which * stands for any letters,
    "/" too. Statistics of the forward pass are taken in any case; a router's bias that is frozen stays as it is.

    Raises:
        ConfigError: a word names nothing of this model, or nothing is left to train.
    """
    specs = named_leaves(specs_of(declared))
    adapters = {name for name, spec in specs.items() if spec.adapts}
    chosen = {*specs} - adapters if adapters else set()
    if not (chosen or frozen.split()):
        return declared
    for word in frozen.split():
        matches = {name for name in specs if any(fnmatch.fnmatchcase(above, word) for above in with_parents(name))}
        if not matches:
            known = dict.fromkeys(above for name in specs for above in with_parents(name))
            raise ConfigError(
                f"optimizer.frozen names {quoted(word)}, which is no part, module or parameter of this model, and no "
                f"pattern of one; {nearest(word, known)}"
            )
        chosen |= matches
    if not any(spec.is_trained for name, spec in specs.items() if name not in chosen):
        raise ConfigError(f"optimizer.frozen={quoted(frozen)} leaves no parameter to train; name fewer, or use ''.")

    def mark(path: Any, leaf: Declared) -> Declared:
        is_chosen = jax.tree_util.keystr(path, simple=True, separator="/") in chosen
        return leaf.replace(spec=dataclasses.replace(leaf.spec, frozen=is_chosen))

    return jax.tree_util.tree_map_with_path(mark, declared, is_leaf=is_declared)
