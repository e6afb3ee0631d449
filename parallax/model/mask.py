"""The mask of attention: which tokens a token attends to, as one value that every kernel reads."""

import contextlib
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from parallax.sharding.activations import TOKENS
from parallax.sharding.zigzag import CONTIGUOUS, ZIGZAG, context_ranks, own_tokens, places

WINDOW = "window_of_"  # begins the scope of a kernel whose layer has a window


class Mask(struct.PyTreeNode):
    """A token attends to itself and to the tokens before it in its own segment.

    Keys are those of whole rows, in order. Queries are, too, unless there are fewer: then they are those of this
    context rank, in an `order` of parallax/sharding/zigzag.py; or, with a `cursor`, new tokens from this place of the
    row on. With a `window` over 0 a token attends only to the last `window` of those tokens, itself included (Beltagy
    et al. 2020, section 3.1). If layers have different `windows`, `which` is the number of this layer's.
    """

    segments_BN: Array  # the document of each token of whole rows, in order
    cursor: Array | int | None = None  # cached decoding: the number of tokens in the cache before the new ones
    window: int = struct.field(pytree_node=False, default=0)
    windows: tuple[int, ...] = struct.field(pytree_node=False, default=())
    which: Array | None = None
    key_places: Array | None = None  # with a cursor: the places of the keys, if not all of a row; negative for none
    order: str = struct.field(pytree_node=False, default=ZIGZAG)

    def by_window(self, act: Callable[["Mask"], Any]) -> Any:
        """`act(mask)` for a mask with the window of this layer: a branch for each window, whose results are alike, so
        that what a branch skips is known when it is traced."""
        windows = list(dict.fromkeys(map(self._that_cuts, self.windows or (self.window,))))
        masks = [self.replace(window=window, windows=(), which=None) for window in windows]
        if len(masks) == 1:
            return _in_scope(act, masks[0])
        number = jnp.asarray([windows.index(self._that_cuts(window)) for window in self.windows])[self.which]
        return lax.switch(number, [partial(_in_scope, act, mask) for mask in masks])

    def of_numbers(self, numbers: Collection[int]) -> "Mask":
        """The mask of a layer whose number is one of these."""
        windows = [self.windows[number] for number in numbers]
        if len(set(windows)) == 1:
            return self.replace(window=windows[0], windows=(), which=None)
        of_all = (window if number in numbers else windows[0] for number, window in enumerate(self.windows))
        return self.replace(windows=tuple(of_all))

    @property
    def hides_earlier(self) -> bool:
        """Whether a window may hide earlier tokens of a row."""
        return any(map(self._that_cuts, self.windows or (self.window,)))

    @property
    def longest_window(self) -> int:
        """The longest window of the layers that have it, 0 for whole rows."""
        windows = [*map(self._that_cuts, self.windows or (self.window,))]
        return max(windows) if all(windows) else 0

    def _that_cuts(self, window: int) -> int:
        """The window, 0 if it is no shorter than a row."""
        return window if window < self.segments_BN.shape[1] else 0

    def allows(self, query_places_S1: Array, key_places_1T: Array, query_segments: Array, key_segments: Array) -> Array:
        """Whether queries attend to keys, [B, S, T], of these places in their rows and these segments [B, ...]."""
        window = self.window
        if self.which is not None:
            seq = self.segments_BN.shape[1]
            window = jnp.asarray([self._that_cuts(each) or seq for each in self.windows])[self.which]
        in_reach_ST = sees(query_places_S1, key_places_1T, window)
        return (query_segments[:, :, None] == key_segments[:, None, :]) & in_reach_ST[None]

    def dense(self, queries: int) -> Array:
        """Whether each of so many queries attends to each key, [B, 1, S, T]."""
        places_N = jnp.arange(self.segments_BN.shape[1])
        if self.cursor is not None:
            places_S = self.cursor + jnp.arange(queries)
            segments_BS = lax.dynamic_slice_in_dim(self.segments_BN, self.cursor, queries, axis=1)
        else:
            places_S, segments_BS = self.of_queries(queries, places_N)
        if self.key_places is None:
            return self.allows(places_S[:, None], places_N[None, :], segments_BS, self.segments_BN)[:, None]
        places_1T = self.key_places[None, :]
        segments_BT = self.segments_BN[:, jnp.maximum(self.key_places, 0)]
        shown_BST = self.allows(places_S[:, None], places_1T, segments_BS, segments_BT) & (places_1T >= 0)[None]
        return shown_BST[:, None]

    def of_queries(self, queries: int, places_N: Array) -> tuple[Array, Array]:
        """Places in their rows, [S], and segments, [B, S], of this context rank's queries; `places_N` are those of
        whole rows."""
        if queries < len(places_N):
            return places(TOKENS, queries, self.order), own_tokens(self.segments_BN, 1, self.order)
        return places_N, self.segments_BN

    def same_segment(self) -> Array:
        """Whether tokens are of one segment, [B, 1, N, N]; for kernels that are causal themselves."""
        return (self.segments_BN[:, :, None] == self.segments_BN[:, None, :])[:, None]


def _in_scope(act: Callable[[Mask], Any], mask: Mask) -> Any:
    names = [f"{WINDOW}{mask.window}"] * (mask.window > 0)
    names += [CONTIGUOUS] * (mask.order == CONTIGUOUS and context_ranks() > 1)
    with contextlib.ExitStack() as scopes:
        for name in names:
            scopes.enter_context(jax.named_scope(name))
        return act(mask)


def window_in(stack: str) -> int:
    """The window of a layer whose kernel has this stack of names in a trace or a compiled program.

    >>> window_in("B/attention/window_of_1024/splash"), window_in("B/attention")
    (1024, 0)
    """
    named = re.findall(rf"\b{WINDOW}(\d+)\b", stack)
    return int(named[-1]) if named else 0


def order_in(stack: str) -> str:
    """The order of tokens on context ranks of a kernel that has this stack of names.

    >>> order_in("B/attention/contiguous/splash"), order_in("B/attention")
    ('contiguous', 'zigzag')
    """
    return CONTIGUOUS if re.search(rf"\b{CONTIGUOUS}\b", stack) else ZIGZAG


def sees(query: Any, key: Any, window: Any) -> Any:
    """Whether a token at place `query` of a row may attend to one at `key`, if only places count."""
    return query >= key if isinstance(window, int) and not window else (query >= key) & (query - key < window)


def blocks_seen(queries: tuple[Any, Any], keys: tuple[Any, Any], window: int) -> tuple[Any, Any]:
    """Whether some query of a block may attend to some key of another, and whether all may attend to all. A block is
    the places of its first and its last token.

    >>> [blocks_seen((4, 7), keys, window=4) for keys in ((0, 0), (0, 3), (4, 7), (4, 4), (8, 11))]
    [(False, False), (True, False), (True, False), (True, True), (False, False)]
    """
    (first, last), (first_key, last_key) = queries, keys
    some = last >= first_key
    if window:
        some &= first - last_key < window
    return some, sees(first, last_key, window) & sees(last, first_key, window)
