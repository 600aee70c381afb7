"""Several workers on this machine, beside each other."""

from __future__ import annotations

import sys

from fp8bench.jobs.fleet.engine import Order
from fp8bench.jobs.fleet.tied import tied


def crew(order: Order) -> None:
    """Until its workers have ended; the store says what came of it. They end where this process is interrupted."""
    workers = [tied([sys.executable, "-m", "fp8bench", *order.words]) for _ in range(order.workers or 1)]
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        raise
