"""`python -m parallax.data`: the command is parallax/cli/data.py."""

import sys

from parallax.cli.data import main
from parallax.runtime.progress import speak_on

if __name__ == "__main__":
    speak_on(sys.stderr)
    sys.exit(main())
