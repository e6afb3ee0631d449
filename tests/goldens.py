"""The reports in tests/golden, one for each config, what steps of a tiny model send, and what docs/ has of the code:
`make golden` writes them anew.

They are of traced programs, but for the end of the docs' second one, which shows what the compiler made: nothing in
them depends on a machine, and no line number changes with an edit.
"""

import dataclasses
import functools
import pathlib
import subprocess
import sys

from parallax.analysis.report import report

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from support import traced_counts

from docs import config_keys, remat_picture, step_picture, zigzag_picture
from parallax.analysis.traced.trace import abstract_mesh
from parallax.cli.command import read_command
from parallax.config.sections import INFERRED
from parallax.sharding.mesh import resolve_sizes
from parallax.step.resolve import resolve, rounded_entries
from parallax.step.step import step_of

DOCS = ROOT / "docs" / "measured" / "report.md"
COMMAND = "python -m parallax.report --config=configs/quickstart.py"
BEGIN = "Memory of a device"  # of what the docs show of a compiled report
FOLDER = ROOT / "tests" / "golden"
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "saved")
DEVICES = 8  # of configs that take what the machine has


@functools.cache
def report_of(name):
    """The traced report of a config."""
    settings, _ = read_command(["golden", f"--config={ROOT / 'configs' / name}.py"], {})
    sizes = settings.mesh.sizes
    if INFERRED in sizes.values():
        sizes = resolve_sizes(settings.mesh, settings.mesh.simulate or DEVICES)
    mesh = abstract_mesh(sizes, simulated=settings.mesh.simulate > 0)
    return report(step_of(resolve(settings), mesh), name=name, entries=rounded_entries(settings))


def golden(name):
    """The report of a config as it is kept."""
    found = report_of(name)
    sent = tuple(one._replace(source=one.source.partition(":")[0]) for one in found.sent)
    return f"{dataclasses.replace(found, sent=sent)}\n"


def documented():
    """docs/measured/report.md with the quickstart's reports as they are now: traced, and the end of the compiled."""
    traced = str(dataclasses.replace(report_of("quickstart"), compiled_for="Nothing was compiled: --trace-only."))
    ended = subprocess.run([sys.executable, *COMMAND.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    compiled = "...\n" + ended.stdout[ended.stdout.index(BEGIN) :]
    return shown(shown(DOCS.read_text(), f"{COMMAND} --trace-only", traced), COMMAND, compiled)


def shown(text, command, output):
    """The text with this output in place of what it shows of a command."""
    head = f"    $ {command}\n"
    before, old = text.split(head)
    lines = old.splitlines(keepends=True)
    end = next(at for at, line in enumerate(lines) if line.strip() and not line.startswith("    "))
    block = "".join(f"    {line}".rstrip() + "\n" for line in output.strip().splitlines())
    return f"{before}{head}{block}\n{''.join(lines[end:])}"


if __name__ == "__main__":
    for name in NAMES:
        (FOLDER / f"{name}.txt").write_text(golden(name))
        print(f"tests/golden/{name}.txt")
    traced_counts.GOLDEN.write_text(traced_counts.golden())
    print("tests/golden/collectives.txt")
    DOCS.write_text(documented())
    print("docs/measured/report.md")
    config_keys.main()
    step_picture.PICTURE.write_text(step_picture.picture(report_of("quickstart")))
    print("docs/step.svg")
    remat_picture.PICTURE.write_text(remat_picture.picture())
    print("docs/remat.svg")
    zigzag_picture.PICTURE.write_text(zigzag_picture.picture())
    print("docs/zigzag.svg")
