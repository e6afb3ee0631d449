"""Compare a model on a mesh with the same model on one device: its loss, and the gradient of each parameter.

    python -m parallax.parity --config=configs/quickstart.py
    python -m parallax.parity --config=configs/quickstart.py --config.mesh.pp=1 --config.mesh.tp=4

It shows that a layer, a loss or a sharding policy of your own computes the same on every mesh. In a notebook use
px.parity(settings).
"""

import sys
from collections.abc import Sequence

from parallax.display.progress import loading, waiting

with loading(__name__, sys.stderr):
    from parallax.analysis.parity import parity
    from parallax.cli.command import Flag, read_command, run_command
    from parallax.errors import EXIT_NUMBERS
    from parallax.hardware.devices import simulate_devices

FLAGS: dict[str, Flag] = {}
USAGE = "python -m parallax.parity --config=FILE [--config.SECTION.KEY=VALUE ...]"


def main(argv: Sequence[str]) -> int:
    """Print the comparison; returns the exit status, 4 if they differ. User errors are one line on stderr."""
    status = 0

    def act(argv: Sequence[str]) -> None:
        nonlocal status
        settings, _ = read_command(argv, FLAGS)
        if settings.mesh.simulate:
            simulate_devices(settings.mesh.simulate)
        with waiting("compiling, and comparing with one device"):
            found = parity(settings)
        print(found)
        status = 0 if found.is_equal else EXIT_NUMBERS

    return run_command(act, argv, __doc__, USAGE, FLAGS) or status


if __name__ == "__main__":
    sys.exit(main(sys.argv))
