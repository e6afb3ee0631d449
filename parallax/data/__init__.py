"""Text to batches: sources, prepared shards of token ids, and windows that are a function of (data, seed, step)."""

from parallax.data.prefetch import Prefetcher
from parallax.data.reader import Reader, open_reader
from parallax.data.windows import as_batch
