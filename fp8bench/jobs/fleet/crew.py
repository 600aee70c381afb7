"""Several workers on this machine, beside each other."""

from __future__ import annotations

import sys

from fp8bench.jobs.fleet.engine import Order
from fp8bench.jobs.fleet.tied import tied
from fp8bench.store.runs.write import check_store


def crew(order: Order) -> None:
    """Until its workers have ended; the store says what came of it. They end where this process is interrupted.

    Raises StoreError where nothing can be kept in the store.
    """
    check_store(order.store)
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
