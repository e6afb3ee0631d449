"""Start, step, save and restore of a run's folder, in a bucket beside on a disk: wall and CPU seconds of the run.

    python benchmarks/buckets.py [--mib 64] [--arrays 4] [--repeats 5] [--delay-ms 0]

The bucket is one of moto's S3 server, in a process of its own on this machine: what is measured is the run's work for
a store, and not a network. Times are the least of the repeats, in which the two take turns. A start takes the lock,
tries the folder and looks at its steps; a step writes its line of metrics; a save ends when the step is on disk, and
the run waits for the copy alone. With --delay-ms the server answers each request later, as if far away.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from arguments import Arguments, run_benchmark, whole_number

SERVER = """
import logging, sys, threading, time
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
logging.disable()
moto = DomainDispatcherApplication(create_backend_app)
answer = lambda environment, start: time.sleep(float(sys.argv[1])) or moto(environment, start)
server = make_server("127.0.0.1", 0, answer, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""
LINES = 100  # of metrics, of which one is a step's


@contextlib.contextmanager
def s3_server(delay_secs: float) -> Iterator[None]:
    """A server with one bucket; the environment names it."""
    command = [sys.executable, "-c", SERVER, str(delay_secs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"))
        os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        yield
        server.stdin.close()


def timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(folder: str, trees: dict[str, Any], step: int) -> dict[str, tuple[float, float]]:
    """What each part takes in a folder that may have steps of before."""
    import jax

    from parallax.checkpoint import steps
    from parallax.checkpoint.restore import restore
    from parallax.checkpoint.save import CheckpointWriter
    from parallax.config.sections import CheckpointConfig
    from parallax.storage import files
    from parallax.training.folder import RunFolder

    run = RunFolder(folder)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees)
    took = {}
    with contextlib.ExitStack() as ends:

        def start() -> None:
            ends.enter_context(run.locked())
            files.check_writable(run.checkpoints)
            steps.check_steps(run.checkpoints)

        took["start"] = timed(start)
        log = files.append_file(run.metrics)
        wall, cpu = timed(lambda: [log.write(f'{{"step": {line}, "train/loss": 3.0}}\n') for line in range(LINES)])
        took["step"] = wall / LINES, cpu / LINES
        writer = ends.enter_context(CheckpointWriter(run.checkpoints, CheckpointConfig(keep_last=1), settings={}))

        def copy_and_save() -> None:
            took["copy"] = timed(lambda: writer.save(step, trees))
            log.flush()
            writer.wait()

        took["save"] = timed(copy_and_save)
        log.close()
        took["restore"] = timed(lambda: jax.block_until_ready(restore(run.checkpoints, step, wanted)))
    return took


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"mib": 1, "repeats": 1})
    parser.add_argument("--mib", type=whole_number, default=64, help="of parameters")
    parser.add_argument("--arrays", type=whole_number, default=4, help="of one size")
    parser.add_argument("--repeats", type=whole_number, default=5)
    parser.add_argument("--delay-ms", type=int, default=0, help="until the server answers a request")
    args = parser.parse_args()
    import jax

    shape = (args.mib, (1 << 18) // args.arrays)
    trees = {"params": {str(k): jax.random.normal(jax.random.key(k), shape) for k in range(args.arrays)}}
    with tempfile.TemporaryDirectory() as disk, s3_server(args.delay_ms / 1000):
        rounds = {"disk": [], "bucket": []}
        for step in range(1, args.repeats + 1):
            rounds["disk"].append(measure(str(pathlib.Path(disk) / "run"), trees, step))
            rounds["bucket"].append(measure("s3://bucket/run", trees, step))
    print(f"{args.mib} MiB of parameters: milliseconds\n")
    print("| | disk: wall | CPU | bucket: wall | CPU |\n|---|---|---|---|---|")
    for part in ("start", "step", "copy", "save", "restore"):
        cells = [min(took[part][which] for took in rounds[place]) for place in rounds for which in (0, 1)]
        print(f"| {part} | {' | '.join(f'{1e3 * secs:,.3f}' for secs in cells)} |")


if __name__ == "__main__":
    run_benchmark(main)
