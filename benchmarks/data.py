"""Speed of reading batches, compared with a plain copy of the same number of tokens.

    python benchmarks/data.py [--tokens 8000000] [--repeats 5]

Copying [rows, seq] int32 arrays from one array in memory is the least work of any reader. The ratio of the two, in CPU
seconds of one run, is more stable than tokens per second on a machine with other work.
"""

import pathlib
import tempfile
import time

from arguments import Arguments, config_of, run_benchmark, whole_number

from parallax.errors import ConfigError

SHAPES = ((256, 32), (256, 512), (2048, 128), (4096, 256))  # tokens and rows of a batch
BATCH_TOKENS = 1_000_000  # fewest tokens to read in a repeat


def measure(batch, steps: int, repeats: int) -> float:
    """Tokens per CPU second, the best of some repeats."""
    return max(_once(batch, steps) for _ in range(repeats))


def _once(batch, steps: int) -> float:
    began = time.process_time()
    tokens = sum(batch(step)["tokens"].size for step in range(steps))
    return tokens / (time.process_time() - began)


def copier(reader, global_batch: int):
    """Batches of four arrays, as a reader gives them, copied from consecutive windows in memory."""
    import numpy as np

    windows = np.arange(reader.windows * reader.seq, dtype=np.int32).reshape(-1, reader.seq)

    def batch(step: int) -> dict:
        start = step * global_batch % (len(windows) - global_batch)
        return {name: windows[start : start + global_batch].copy() for name in ("tokens", "a", "b", "c")}

    return batch


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"tokens": 100_000, "repeats": 1, "shapes": 1})
    parser.add_argument("--tokens", type=whole_number, default=8_000_000, help="of the text")
    parser.add_argument("--repeats", type=whole_number, default=5)
    parser.add_argument("--shapes", type=whole_number, default=len(SHAPES), help="the first of them alone")
    args = parser.parse_args()
    for seq, rows in SHAPES[: args.shapes]:
        if args.tokens < 2 * seq * rows:
            raise ConfigError(
                f"--tokens={args.tokens} is less than two batches of {rows} x {seq}; use {2 * seq * rows}"
            )
    from parallax.config.sections import DataConfig
    from parallax.data import open_reader

    print(f"{'seq':>6} {'batch':>6} {'reader':>12} {'copy':>12} {'ratio':>7}   (million tokens per CPU second)")
    with tempfile.TemporaryDirectory() as folder:
        for seq, global_batch in SHAPES[: args.shapes]:
            section = config_of("base").data
            section.update(source="synthetic", synthetic_tokens=args.tokens, seq=seq, global_batch=global_batch)
            config = DataConfig(**section)
            reader = open_reader(config, folder=pathlib.Path(folder), vocab=None, split="train")
            steps = max(2, BATCH_TOKENS // (seq * global_batch))
            read = measure(reader.batch, steps, args.repeats) / 1e6
            copied = measure(copier(reader, global_batch), steps, args.repeats) / 1e6
            print(f"{seq:6} {global_batch:6} {read:12.1f} {copied:12.1f} {copied / read:7.1f}")


if __name__ == "__main__":
    run_benchmark(main)
