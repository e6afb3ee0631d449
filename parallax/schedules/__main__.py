"""`python -m parallax.schedules` runs the command parallax/cli/schedules.py; the package has its name."""

import runpy

if __name__ == "__main__":
    runpy.run_module("parallax.cli.schedules", run_name="__main__", alter_sys=True)
