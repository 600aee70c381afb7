"""The process of one rank. Over a socket it answers the measuring process, which sends all ranks the same requests.

The launcher starts it as `python -m fp8bench.worker.ranks.main FOLDER SECONDS`. A feature that needs further requests
names a different module, which also answers those. FOLDER has the socket, and receives this rank's heartbeat and
stderr. SECONDS is how long a collective waits for other ranks. The rank ends when the launcher or the measuring
process ends.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from fp8bench.model.ranks import PARENT_SOCKET, heartbeat_file, stderr_file
from fp8bench.model.raw import Settings
from fp8bench.worker.main import run
from fp8bench.worker.ranks.bench import HeartbeatWriter, RankBench


def _connect_to_parent(folder: Path, rank: int, purpose: str) -> int:
    """Connects to the measuring process, sends it the purpose of the connection, and returns the connection's
    descriptor.
    """
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(str(folder / PARENT_SOCKET))
        # Keep a duplicate, because the `with` block closes the socket.
        socket_descriptor = os.dup(opened.fileno())
    connection = Connection(os.dup(socket_descriptor))
    connection.send((rank, os.getpid(), purpose))
    connection.close()
    return socket_descriptor


def _expose_one_gpu(rank: int) -> None:
    """Makes only one GPU visible to this rank, or none if there are too few. It must run before torch initialises
    GPUs.
    """
    # The driver of AMD's GPUs creates /dev/kfd. The index -1 hides all GPUs.
    name = "HIP_VISIBLE_DEVICES" if Path("/dev/kfd").exists() else "CUDA_VISIBLE_DEVICES"
    visible_devices = os.environ.get(name)
    device_names = [word for word in visible_devices.split(",") if word] if visible_devices is not None else None
    os.environ[name] = str(rank) if device_names is None else device_names[rank] if rank < len(device_names) else "-1"


def main(make_bench: Callable[[Settings, HeartbeatWriter, float], RankBench] = RankBench) -> None:
    folder = Path(sys.argv[1])
    collective_wait_seconds = float(sys.argv[2])
    rank = int(os.environ["RANK"])
    if os.getpgrp() != os.getpid():  # with its own process group, this rank's children are ended together with it
        os.setsid()
    with (folder / stderr_file(rank)).open("wb", buffering=0) as words:
        os.dup2(words.fileno(), 2)
    _expose_one_gpu(rank)
    heartbeat_writer = HeartbeatWriter(folder / heartbeat_file(rank))
    connection = Connection(_connect_to_parent(folder, rank, "requests"))
    lifeline_descriptor = _connect_to_parent(folder, rank, "lifeline")
    run(
        connection,
        lifeline_descriptor,
        lambda settings: make_bench(settings, heartbeat_writer, collective_wait_seconds),
        heartbeat_writer.request,
    )


if __name__ == "__main__":
    main()
