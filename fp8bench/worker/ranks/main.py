"""A rank: answers the same requests as the other ranks, over a socket to the process that measures.

The launcher starts it as `python -m fp8bench.worker.ranks.main FOLDER SECONDS` (or another module, whose bench does
more). FOLDER holds the socket, and takes this rank's heartbeat and stderr; SECONDS is how long a collective waits for
the others. The rank ends with the launcher, and with the process that measures.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from fp8bench.model.ranks import PARENT, beat_file, words_file
from fp8bench.model.raw import Settings
from fp8bench.worker.main import run
from fp8bench.worker.ranks.bench import Heart, RankBench


def _connect(folder: Path, rank: int, purpose: str) -> int:
    """Connects to the process that measures and sends the purpose of the connection; returns its descriptor."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(str(folder / PARENT))
        descriptor = os.dup(opened.fileno())
    connection = Connection(os.dup(descriptor))
    connection.send((rank, os.getpid(), purpose))
    connection.close()
    return descriptor


def _show_one_gpu(rank: int) -> None:
    """Makes only one GPU visible to this rank, or none if there are fewer; must run before torch initializes."""
    name = "HIP_VISIBLE_DEVICES" if Path("/dev/kfd").exists() else "CUDA_VISIBLE_DEVICES"
    variable = os.environ.get(name)
    visible = [word for word in variable.split(",") if word] if variable is not None else None
    os.environ[name] = str(rank) if visible is None else visible[rank] if rank < len(visible) else "-1"


def main(make_bench: Callable[[Settings, Heart, float], RankBench] = RankBench) -> None:
    folder, wait_seconds = Path(sys.argv[1]), float(sys.argv[2])
    rank = int(os.environ["RANK"])
    if os.getpgrp() != os.getpid():  # whoever ends this rank ends its group
        os.setsid()
    with (folder / words_file(rank)).open("wb", buffering=0) as words:
        os.dup2(words.fileno(), 2)
    _show_one_gpu(rank)
    heart = Heart(folder / beat_file(rank))
    connection = Connection(_connect(folder, rank, "requests"))
    lifeline = _connect(folder, rank, "lifeline")
    run(connection, lifeline, lambda settings: make_bench(settings, heart, wait_seconds), heart.request)


if __name__ == "__main__":
    main()
