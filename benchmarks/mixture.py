"""Shares of a mixture's sources in every prefix of a run, the same rows however it is read, and the wait for data.

    python benchmarks/mixture.py [--steps 10000] [--tokens 2000000]

Three sources of weights 0.7, 0.2 and 0.1, which change after half of the steps. Every row of all steps is counted. The
rows of some steps are read again as each process of four meshes would read them, and by 1, 2 and 3 processes that open
the sources anew, as after a resume; other rows are an error. Then batches are read ahead, as a run does, beside steps
of --step-ms.
"""

import pathlib
import tempfile
import time

from arguments import Arguments, config_of, run_benchmark, whole_number

from parallax.errors import DataError

WEIGHTS = {"prose": 0.7, "code": 0.2, "counting": 0.1}
LATER = {"prose": 0.25, "code": 0.5, "counting": 0.25}
SEQ, GLOBAL_BATCH = 256, 16  # the quickstart's
# Parts of a batch's rows and of its columns that the processes of a mesh hold; rows may be interleaved.
MESHES = {"dp=1": (1, 1), "dp=4": (4, 1), "cp=2": (1, 2), "dp=2 cp=4": (2, 4)}
PROCESSES = (1, 2, 3)
COMPARED = 20  # steps whose rows are read on every mesh


def mixture_config(tokens: int, steps: int):
    """The settings of the data: built-in sources, and a phase with other weights."""
    from parallax.config.sections import DataConfig

    sources = {"prose": "moby", "code": "stdlib", "counting": "synthetic"}
    mixture = " ".join(f"{name}=(source={sources[name]!r}, weight={weight})" for name, weight in WEIGHTS.items())
    later = ", ".join(f"{name}={weight}" for name, weight in LATER.items())
    section = config_of("base").data
    section.update(mixture=mixture, phases=f"later=(from_step={steps // 2 + 1}, {later})")
    section.update(synthetic_tokens=tokens, seq=SEQ, global_batch=GLOBAL_BATCH)
    return DataConfig(**section)


def worst_shares(mixture, steps: int) -> tuple[float, float]:
    """The largest distance, in rows, of a source's count from its share: over the prefixes of each phase, and over
    those of the whole run."""
    import numpy as np

    sources = np.concatenate([mixture.dealt(mixture.rows(step))[0] for step in range(steps)])
    phases = np.arange(len(sources)) >= steps // 2 * GLOBAL_BATCH
    worst, whole = 0.0, 0.0
    for number, name in enumerate(WEIGHTS):
        wanted = np.where(phases, LATER[name], WEIGHTS[name])
        ahead = np.cumsum(sources == number) - np.cumsum(wanted)
        whole = max(whole, float(np.abs(ahead).max()))
        for later in (False, True):
            rows = phases == later
            inside = np.cumsum(sources[rows] == number) - np.cumsum(wanted[rows])
            worst = max(worst, float(np.abs(inside).max()))
    return worst, whole


def parts_of_mesh(rows: int, columns: int):
    """What each of rows x columns processes holds of a batch: rows with gaps between them, and a range of columns."""
    import numpy as np

    def part(row: int, column: int):
        return lambda shape: (
            np.arange(row, shape[0], rows),
            range(column * shape[1] // columns, (column + 1) * shape[1] // columns),
        )

    return [part(row, column) for row in range(rows) for column in range(columns)]


def check_same(what: str, whole, pieces: list, parts: list, steps: list[int]) -> None:
    """Print that the pieces that processes read are those of whole batches; DataError if they are not."""
    for step in steps:
        expected, shape = whole.batch(step), whole.phase(step).shape
        for piece, part in zip(pieces, parts):
            rows, columns = part(shape)
            for name, array in piece.batch(step).items():
                if (expected[name][rows, columns.start : columns.stop] != array).any():
                    raise DataError(f"{what}: the {name} of step {step + 1} are others than on one device")
    print(f"{what}: the same rows in {len(steps)} steps")


def waited_share(mixture, steps: int, step_ms: int) -> float:
    """The share of steps of this length that is spent waiting for the batch."""
    from parallax.data import Prefetcher

    waited = 0.0
    with Prefetcher(mixture, lambda batch: batch, 0) as batches:
        for step in range(steps):
            secs = batches.get(step)[1]
            waited += secs if step else 0.0  # the first batch is read while a run compiles its step
            time.sleep(step_ms / 1000)
    return waited / (steps * step_ms / 1000)


def main() -> None:
    smallest = {"steps": 60, "tokens": 50_000, "waits": 3, "step_ms": 30}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--steps", type=whole_number, default=10_000)
    parser.add_argument("--tokens", type=whole_number, default=2_000_000, help="of the source that counts")
    parser.add_argument("--waits", type=whole_number, default=100, help="steps of which the wait for data is measured")
    parser.add_argument("--step-ms", type=whole_number, default=1000, help="length of a step; the quickstart's is 1 s")
    args = parser.parse_args()
    import numpy as np

    from parallax.data import open_mixture

    config = mixture_config(args.tokens, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": pathlib.Path(folder), "vocab": None}
        mixture = open_mixture(config, **options)
        compared = sorted({*np.linspace(0, args.steps - 1, COMPARED).astype(int).tolist(), args.steps // 2})
        for name, shape in MESHES.items():
            parts = parts_of_mesh(*shape)
            pieces = [mixture.with_part(part) for part in parts]
            check_same(name, mixture, pieces, parts, compared)
        for count in PROCESSES:
            parts = parts_of_mesh(count, 1)
            # Opened anew, as by a start that resumes in the middle.
            pieces = [open_mixture(config, part=part, **options) for part in parts]
            check_same(f"processes={count}, opened anew", mixture, pieces, parts, compared[::-1])
        share = waited_share(mixture, args.waits, args.step_ms)
        print(f"wait for data {share:.2%} of steps of {args.step_ms} ms")
    worst, whole = worst_shares(mixture, args.steps)
    print(f"{args.steps:,} steps, {args.steps * GLOBAL_BATCH:,} rows; over all phases together {whole:.3f} rows")
    print(f"worst share {worst:.3f} rows")


if __name__ == "__main__":
    run_benchmark(main)
