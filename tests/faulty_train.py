"""train.py, in which one process of a job has a fault: faulty_train.py FAULT RANK STEP, then arguments as of train.py.

FAULT is what happens when the process of that rank reads the batch of that step, or, for "config", before it starts.
"""

import os
import sys
import time

import train
from parallax.data import Reader


def raise_error() -> None:
    raise RuntimeError("a fault that was put here")


FAULTS = {"raise": raise_error, "sleep": lambda: time.sleep(600)}


def main() -> int:
    fault, rank, step, *arguments = sys.argv[1:]
    if os.environ["PARALLAX_PROCESS_ID"] == rank:
        if fault == "config":
            arguments.append("--config.optimizer.learning_rate=0.5")
        else:
            break_at(int(step), FAULTS[fault])
    return train.main(["train.py", *arguments])


def break_at(step: int, act) -> None:
    batch = Reader.batch

    def faulty(self, at):
        if self.split == "train" and at == step:
            act()
        return batch(self, at)

    Reader.batch = faulty


if __name__ == "__main__":
    sys.exit(main())
