"""Text to batches: sources, prepared shards, and windows that are a function of (data, seed, step)."""

from parallax.data.prefetch import Prefetcher
from parallax.data.reader import Reader, open_reader
from parallax.data.windows import as_batch

__all__ = ["Prefetcher", "Reader", "as_batch", "open_reader"]
