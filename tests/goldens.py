"""The reports in tests/golden, one for each config, and that in docs/report.md: `make golden` writes them anew.

They are of traced programs: nothing in them depends on a machine, and no line number changes with an edit.
"""

import dataclasses
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parallax.command import read_command
from parallax.mesh import INFERRED, resolve_sizes
from parallax.report.text import text
from parallax.report.whole import abstract_mesh, report_settings

DOCS = ROOT / "docs" / "report.md"
COMMAND = "    $ python -m parallax.report --config=configs/quickstart.py --trace_only\n"
FOLDER = ROOT / "tests" / "golden"
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "saved")
DEVICES = 8  # of configs that take what the machine has


def report_of(name):
    """The traced report of a config."""
    settings, _ = read_command(["golden", f"--config={ROOT / 'configs' / name}.py"], {})
    sizes = settings.mesh.sizes
    if INFERRED in sizes.values():
        sizes = resolve_sizes(settings.mesh, settings.mesh.simulate or DEVICES)
    return report_settings(settings, abstract_mesh(sizes), name=name)


def golden(name):
    """The report of a config as it is kept."""
    return text(report_of(name), line_numbers=False) + "\n"


def documented():
    """docs/report.md with the quickstart's report as it is now."""
    shown = str(dataclasses.replace(report_of("quickstart"), compiled_for="Nothing was compiled: --trace_only."))
    before, old = DOCS.read_text().split(COMMAND)
    block = "".join(f"    {line}".rstrip() + "\n" for line in shown.splitlines())
    return f"{before}{COMMAND}{block}\n{old[old.index('## ') :]}"


if __name__ == "__main__":
    for name in NAMES:
        (FOLDER / f"{name}.txt").write_text(golden(name))
        print(f"tests/golden/{name}.txt")
    DOCS.write_text(documented())
    print("docs/report.md")
