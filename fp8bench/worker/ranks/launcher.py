"""The process that torch's elastic launcher runs in: starts the ranks, never again, and says which of them failed.

Started by measure.process.WorkerProcess, and ends with its parent as a worker does. It is told once what to start.
"""

from __future__ import annotations

import logging
import sys
import uuid
from multiprocessing.connection import Connection

from fp8bench.worker.main import die_with_parent, keep_from_children

# A rank that does not end when it is asked to is ended; torch's own patience is half a minute.
_ENDING_SECONDS = 1


def launched(ranks: int, module: str, folder: str, wait_seconds: float) -> dict[int, int]:
    """Run a module in so many ranks to their end; the exit codes of those that failed of themselves, by rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    if hasattr(config, "shutdown_timeout"):  # torch 2.13
        config.shutdown_timeout = _ENDING_SECONDS
    try:
        elastic_launch(config, sys.executable)("-P", "-m", module, folder, str(wait_seconds))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def main() -> None:
    """Take the two descriptors off the command line, be told, launch, and tell."""
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(lifeline, connection)
    keep_from_children(lifeline, connection)
    logging.disable()  # what torch logs of a rank's end would stand behind the rank's own last words
    failed = launched(*connection.recv())
    connection.send(failed)


if __name__ == "__main__":
    main()
