"""How fast batches are read, beside a plain copy of as many tokens: python benchmarks/data.py

The copy of [rows, seq] int32 arrays out of one array in memory is the least that any reader does. The ratio of the
two, in CPU seconds of one run, is steadier than tokens per second on a machine that does other work too.
"""

import pathlib
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from configs.base import get_config
from parallax.data import DataConfig, open_reader

TOKENS = 8_000_000
REPEATS = 5


def measure(batch, steps: int) -> float:
    """Tokens per CPU second, the best of some repeats."""
    return max(_once(batch, steps) for _ in range(REPEATS))


def _once(batch, steps: int) -> float:
    began = time.process_time()
    tokens = sum(batch(step)["tokens"].size for step in range(steps))
    return tokens / (time.process_time() - began)


def copier(reader, global_batch: int):
    """Batches of four arrays, as a reader gives them, copied from consecutive windows in memory."""
    windows = np.arange(reader.windows * reader.seq, dtype=np.int32).reshape(-1, reader.seq)

    def batch(step: int) -> dict[str, np.ndarray]:
        start = step * global_batch % (len(windows) - global_batch)
        return {name: windows[start : start + global_batch].copy() for name in ("tokens", "a", "b", "c")}

    return batch


def main() -> None:
    print(f"{'seq':>6} {'batch':>6} {'reader':>12} {'copy':>12} {'ratio':>7}   (million tokens per CPU second)")
    with tempfile.TemporaryDirectory() as folder:
        for seq, global_batch in ((256, 32), (256, 512), (2048, 128), (4096, 256)):
            section = get_config().data
            section.update(source="synthetic", synthetic_tokens=TOKENS, seq=seq, global_batch=global_batch)
            config = DataConfig(**section)
            reader = open_reader(config, folder=pathlib.Path(folder), vocab=None, split="train")
            steps = max(2, 1_000_000 // (seq * global_batch))
            read = measure(reader.batch, steps) / 1e6
            copied = measure(copier(reader, global_batch), steps) / 1e6
            print(f"{seq:6} {global_batch:6} {read:12.1f} {copied:12.1f} {copied / read:7.1f}")


if __name__ == "__main__":
    main()
