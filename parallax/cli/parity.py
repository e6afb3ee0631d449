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
    return run_command(act, argv, __doc__, USAGE, FLAGS)


def act(argv: Sequence[str]) -> int:
    """Compare, and print the comparison; returns the exit status."""
    settings, _ = read_command(argv, FLAGS)
    if settings.mesh.simulate:
        simulate_devices(settings.mesh.simulate)
    with waiting("compiling, and comparing with one device"):
        result = parity(settings)
    print(result)
    return 0 if result.is_equal else EXIT_NUMBERS


if __name__ == "__main__":
    sys.exit(main(sys.argv))
