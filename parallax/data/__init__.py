"""From text to batches: sources, prepared shards of token ids, and windows that depend only on data, seed and step."""

from parallax.data.mixture import MixedReader, open_mixture, open_sources
from parallax.data.prefetch import Prefetcher
from parallax.data.reader import PackedReader, Reader, open_reader
from parallax.data.windows import as_batch
