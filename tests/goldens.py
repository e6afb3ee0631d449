"""The reports in tests/golden, one for each config: `make golden` writes them anew.

They are of traced programs: nothing in them depends on a machine, and no line number changes with an edit.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parallax.command import read_command
from parallax.mesh import INFERRED, resolve_sizes
from parallax.report.text import text
from parallax.report.whole import abstract_mesh, report_settings

FOLDER = ROOT / "tests" / "golden"
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "saved")
DEVICES = 8  # of configs that take what the machine has


def golden(name):
    """The report of a config as it is kept."""
    settings, _ = read_command(["golden", f"--config={ROOT / 'configs' / name}.py"], {})
    sizes = settings.mesh.sizes
    if INFERRED in sizes.values():
        sizes = resolve_sizes(settings.mesh, settings.mesh.simulate or DEVICES)
    return text(report_settings(settings, abstract_mesh(sizes), name=name), line_numbers=False) + "\n"


if __name__ == "__main__":
    for name in NAMES:
        (FOLDER / f"{name}.txt").write_text(golden(name))
        print(f"tests/golden/{name}.txt")
