"""A run whose save of one step never ends: `python tests/faults/stuck_save.py STEP train.py's arguments ...`."""

import sys
import time

from parallax.checkpoint import steps
from parallax.cli import train


def main(stuck_at, argv):
    write_manifest = steps.write_manifest

    def write_or_wait(folder, content, *known):
        if content["step"] == stuck_at:
            print(f"saving step {stuck_at}: arrays are written", flush=True)
            time.sleep(600)
        write_manifest(folder, content, *known)

    steps.write_manifest = write_or_wait
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [sys.argv[0], *sys.argv[2:]]))
