"""Fingerprints of programs: equal where code was moved and renamed, and does what it did.

    python tests/fingerprints.py --out=before.json
    PYTHONPATH=/path/of/another/checkout python tests/fingerprints.py --against=before.json

SHA-256 of the StableHLO that steps of tests/support/traced_settings.py, their evaluation and a generation are lowered
to, as JSON. `--compiled` also compiles some of the steps and takes their optimized HLO, `--losses` trains some for
three steps and takes the bits of losses and gradient norms. Locations, and names of functions and of values, are left
out. `--against` lists what differs from such a file and exits with 1; with `--texts=FOLDER` the programs are written
there, and `diff -r` of two folders shows where. Of the package only names of `import parallax as px` are used.
"""

import argparse
import hashlib
import json
import pathlib
import re
import sys
import tempfile

# Behind PYTHONPATH, which says of which checkout the programs are.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from support.traced_settings import ROWS, SEQ, VOCAB, settings_of

import parallax as px

LOWERED = ["alone", "gpipe", "1f1b", "interleaved", "zb-v", "dp", "dp-ahead-bf16", "dp-muon", "tp-hidden"]
LOWERED += [
    "tp-scatter-seq",
    "tp-all-to-all",
    "all-gpipe-tables",
    "all-1f1b",
    "all-1f1b-step",
    "all-inter-ahead",
    "all-zb",
]
WRITTEN = ["alone", "dp-layers", "tp-hidden", "all-1f1b", "all-zb-step"]
COMPILED = ["alone", "dp-ahead", "all-gpipe", "all-1f1b-step"]
TRAINED = ["alone", "gpipe-uneven", "dp-ahead-bf16", "tp-scatter", "all-1f1b", "all-zb-v"]
END = 0  # the token that ends a document


def step_of(name):
    """The training step of a row, on as many simulated devices as its mesh has."""
    settings = settings_of(name)
    sizes = settings.mesh
    return px.step_of(settings, px.mesh_of(sizes.pp, sizes.dp, sizes.tp))


def train_text(name):
    """The step with its optimizer."""
    return lowered_text(step_of(name).lower(ROWS, SEQ).as_text())


def eval_text(name):
    """The loss, forward only."""
    model = step_of(name).model
    shape = lambda leaf, cut: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cut)  # noqa: E731
    params = jax.tree.map(shape, model.shapes, model.shardings)
    batch = {key: shape(array, model.batch_sharding) for key, array in batch_of(0).items()}
    return lowered_text(jax.jit(model.loss).lower(params, batch).as_text())


def generate_text(name):
    """Three tokens behind a prompt. The program is the largest that JAX dumps while it is compiled."""
    model = step_of(name).model
    run = px.Run(pathlib.Path(name), 0, settings_of(name), model, model.init(0), Letters())
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_dump_ir_to", folder)
        try:
            run.generate("abc", tokens=3, temperature=0.5, top_k=8, top_p=0.9, seed=1)
        finally:
            jax.config.update("jax_dump_ir_to", "")
        return lowered_text(max((path.read_text() for path in pathlib.Path(folder).glob("*.mlir")), key=len))


def compiled_text(name):
    """The optimized HLO of the step."""
    return optimized_text(step_of(name).lower(ROWS, SEQ).compile().as_text())


def loss_bits(name, steps=3):
    """{"loss 1": bits of a float32, ...} of the first steps, and of their gradients' norms."""
    step, found = step_of(name), {}
    state = step.init()
    for number in range(steps):
        state, metrics = step(state, batch_of(number))
        for key in ("loss", "grad_norm"):
            found[f"{key} {number + 1}"] = f"{int(np.float32(metrics[key]).view(np.uint32)):#010x}"
    return found


def batch_of(number):
    """A batch of documents of uneven lengths."""
    rng = np.random.default_rng(number)
    ids = rng.integers(1, VOCAB, (ROWS, SEQ + 1))
    return px.as_batch(np.where(rng.random(ids.shape) < 0.1, END, ids), end=END)


class Letters:
    """A tokenizer of small letters."""

    name, begin, end, vocab = "letters", (), END, 27

    def encode(self, text, **_):
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids, **_):
        return "".join(chr(96 + i) for i in ids)


def lowered_text(text):
    """StableHLO without locations and names of arrays' places in trees, functions numbered as they are named first."""
    text = re.sub(r"^#loc.*\n| loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)", "", text, flags=re.MULTILINE)
    text = re.sub(r"jax\.result_info = \"[^\"]*\"(, )?", "", text)
    assert "loc(" not in text, "a location of a form that is not known"
    defined = set(re.findall(r"func\.func (?:public |private )?@([\w.$-]+)\(", text))
    text = re.sub(r"^module @\S+", "module", text, flags=re.MULTILINE)
    return numbered(text, r"@([\w.$-]+)", "@f", defined)


def optimized_text(text):
    """Optimized HLO without locations; values and computations numbered as they are named first."""
    text = re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r",? metadata=\{(?:[^{}\"]|\"[^\"]*\")*\}", "", text)
    text = re.sub(r"^HloModule [^,\s]+", "HloModule", text)
    # Parameters of a computation are named without the sign.
    text = re.sub(
        r"^(?:ENTRY )?%.*$", lambda head: re.sub(r"([(,] ?)[\w.-]+: ", r"\1", head[0]), text, flags=re.MULTILINE
    )
    assert "stack_frame_id" not in text and ".py" not in text, "a location of a form that is not known"
    return numbered(text, r"%([\w.-]+)", "%v")


def numbered(text, pattern, letter, known=None):
    """The text with each name that the pattern finds, of those `known`, as a number."""
    numbers = {}

    def number(found):
        name = found[1]
        return (
            found[0] if known is not None and name not in known else f"{letter}{numbers.setdefault(name, len(numbers))}"
        )

    return re.sub(pattern, number, text)


TEXTS = {"train": (train_text, LOWERED), "eval": (eval_text, LOWERED), "generate": (generate_text, WRITTEN)}
COMPILATIONS = {"compiled": (compiled_text, COMPILED)}


def fingerprints(kinds, texts=None, only=None):
    """{"NAME KIND": SHA-256}, of the rows `only`; the programs are written into the folder `texts`."""
    found = {}
    for kind, (make, names) in kinds.items():
        for name in chosen(names, only):
            text = make(name)
            found[f"{name} {kind}"] = hashlib.sha256(text.encode()).hexdigest()
            if texts:
                (texts / f"{name}.{kind}.txt").write_text(text)
    return found


def chosen(names, only):
    """The names; where some are asked for, those alone."""
    return [name for name in names if not only or name in only]


def differences(before, now):
    """A line for each name whose values differ; what only one side measured is none."""
    both = [name for name in before if name in now]
    return [f"{name}: {before[name]} is now {now[name]}" for name in both if before[name] != now[name]]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="write the result here, not to stdout")
    parser.add_argument("--against", type=pathlib.Path, help="a result to compare with")
    parser.add_argument("--texts", type=pathlib.Path, help="a folder for the programs")
    parser.add_argument("--compiled", action="store_true", help="optimized programs, too")
    parser.add_argument("--losses", action="store_true", help="bits of losses and gradient norms, too")
    parser.add_argument("--no-lowered", action="store_true", help="leave out what is only lowered")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows of tests/support/traced_settings.py")
    given = parser.parse_args(argv)
    px.simulate_devices(8)
    if given.texts:
        given.texts.mkdir(parents=True, exist_ok=True)
    kinds = ({} if given.no_lowered else TEXTS) | (COMPILATIONS if given.compiled else {})
    found = {"jax": jax.__version__, **fingerprints(kinds, given.texts, given.only)}
    if given.losses:
        rows = chosen(TRAINED, given.only)
        found |= {f"{name} {key}": bits for name in rows for key, bits in loss_bits(name).items()}
    if given.out or not given.against:
        text = json.dumps(found, indent=1) + "\n"
        given.out.write_text(text) if given.out else print(text, end="")
    if not given.against:
        return 0
    before = json.loads(given.against.read_text())
    lines, shared = differences(before, found), (before.keys() & found.keys()) - {"jax"}
    print("\n".join(lines) or f"all {len(shared)} are equal")
    print(f"{len(before.keys() ^ found.keys())} are on one side alone", file=sys.stderr)
    return 1 if lines or not shared else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
