"""Processes that tokenise shards side by side."""

import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path

from parallax.data.shard import Shard, write_shard
from parallax.data.tokenizer import Tokenizer
from parallax.runtime.errors import DataError

Group = tuple[str, list[str]]  # name of a shard, its texts


def write_shards(folder: Path, groups: Iterable[Group], tokenizer: Tokenizer, *, workers: int) -> Iterator[Shard]:
    """Write a shard of each group and yield it when it is finished, in any order.

    With one worker all happens in this process.

    Raises:
        DataError: a worker ended.
    """
    if workers == 1:
        return (write_shard(folder, name, texts, tokenizer) for name, texts in groups)
    return _in_processes(folder, groups, tokenizer, workers)


def _in_processes(folder: Path, groups: Iterable[Group], tokenizer: Tokenizer, workers: int) -> Iterator[Shard]:
    # Spawned, not forked: the parent may have JAX's threads.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=_start, initargs=(tokenizer,))
    waiting = set()
    try:
        for group in groups:
            waiting.add(pool.submit(_write, folder, *group))
            # One spare group per worker; more would only fill the memory.
            if len(waiting) >= 2 * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from [future.result() for future in done]
        yield from [future.result() for future in waiting]
    except BrokenProcessPool:
        raise DataError(
            f"a worker that tokenised was killed, perhaps for lack of memory; run again to resume, "
            f"with fewer than {workers} workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    # The processes share the cores already; threads of the library's own would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A pool's workers do not notice when their parent is killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _write(folder: Path, name: str, texts: list[str]) -> Shard:
    return write_shard(folder, name, texts, _tokenizer)
