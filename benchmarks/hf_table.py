"""A table that compares results of Hugging Face `transformers` models with those of Parallax after import.

    pip install -e ".[hf-tests]" -c constraints.txt
    python benchmarks/hf_table.py --write

Each row is a tiny random model that `transformers` makes on the CPU, in float32, its norms and biases random too; it is
saved, imported by `parallax.convert from-hf`, and run on one device and on eight simulated ones with 1F1B, pp·dp·tp
2·2·2, and pp·dp·tp·ep 2·1·2·2 where it has experts. Printed are the largest difference of logits, over windows of one
document and of several, of documents of one token up to three times the original context; of the losses of ten steps of
AdamW; how many tokens of greedy generation are equal; and whether to-hf writes every tensor bit for bit, and the
config.json, as they were read. --write puts the table into docs/measured/hf.md;
with --named it measures some families alone, and puts their rows in place of those that are there.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path

from arguments import Arguments, run_benchmark, whole_number

from parallax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "measured" / "hf.md"
BEGIN, END = "<!-- benchmarks/hf_table.py -->", "<!-- end -->"
HEAD = ["family", "mesh", "logits", "losses of 10 steps", "greedy tokens equal", "goes back"]

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"families": 1, "meshes": 1})
    parser.add_argument("--write", action="store_true", help="also into docs/measured/hf.md")
    parser.add_argument("--families", type=whole_number, help="the first of them alone")
    parser.add_argument("--named", nargs="+", metavar="TEXT", help="those alone whose name has one of these texts")
    parser.add_argument("--meshes", type=whole_number, help="the first of them alone")
    args = parser.parse_args()
    if args.smoke and args.write:
        raise ConfigError("figures of --smoke must not go into docs/measured/hf.md; leave out --write")
    check_installed()

    import parallax as px

    px.simulate_devices(8)
    rows = measure(args.named, args.families, args.meshes)
    print(as_text([HEAD, *rows]))
    if args.write:
        put(with_rows(written(), rows) if args.named else rows)


def check_installed() -> None:
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"{name} cannot be imported ({error}); pip install -e '.[hf-tests]'") from error


def measure(named: list[str] | None, families: int | None, meshes: int | None) -> list[list[str]]:
    """A row for each family and mesh."""
    from support import hf_families as theirs

    rows = []
    chosen = [name for name in theirs.FAMILIES if not named or any(text in name for text in named)]
    for name in chosen[:families]:
        with tempfile.TemporaryDirectory() as folder:
            pair = theirs.make_pair(name, Path(folder))
            back = "bit for bit" if theirs.comes_back(pair, Path(folder) / "out") else "differs"
            for mesh in theirs.meshes_of(name)[:meshes]:
                model, params = theirs.ours_on(pair, mesh)
                logits = theirs.logits_difference(pair, model, params)
                losses = theirs.loss_difference(name, pair, model, params)
                equal, total = theirs.equal_tokens(pair, model, params)
                figures = [f"{logits:.1e}", f"{losses:.1e}", f"{equal} of {total}", back]
                rows.append([name, "·".join(map(str, mesh)), *figures])
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    return rows


def as_text(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def written() -> list[list[str]]:
    """The rows of the table in the docs."""
    _, rest = DOCS.read_text(encoding="utf-8").split(BEGIN)
    lines = rest.split(END)[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def with_rows(rows: list[list[str]], measured: list[list[str]]) -> list[list[str]]:
    """Rows with those of the same family and mesh replaced, and further ones behind their family's, or at the end."""
    rows = list(rows)
    for row in measured:
        same = [place for place, known in enumerate(rows) if known[:2] == row[:2]]
        behind = [place + 1 for place, known in enumerate(rows) if known[0] == row[0]] or [len(rows)]
        if same:
            rows[same[0]] = row
        else:
            rows.insert(behind[-1], row)
    return rows


def put(rows: list[list[str]]) -> None:
    """Between the marks in the docs."""
    before, rest = DOCS.read_text(encoding="utf-8").split(BEGIN)
    table = as_text([HEAD, *rows])
    DOCS.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    run_benchmark(main)
