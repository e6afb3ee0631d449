"""`python -m parallax.data` runs the command parallax/cli/data.py; the package has its name."""

import runpy

if __name__ == "__main__":
    runpy.run_module("parallax.cli.data", run_name="__main__", alter_sys=True)
