"""`python -m parallax.schedules`: the command is parallax/cli/schedules.py."""

import sys

from parallax.cli.schedules import main

if __name__ == "__main__":
    sys.exit(main())
