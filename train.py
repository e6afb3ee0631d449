"""`python train.py` in a checkout runs the command parallax/cli/train.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("parallax.cli.train", run_name="__main__", alter_sys=True)
