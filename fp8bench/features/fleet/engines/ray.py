"""Cells as tasks of a Ray cluster: each on a node that offers its kind of device, which runs one at a time."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.features.fleet.engine import Engine, Order, Workers, engines
from fp8bench.features.fleet.tied import ended, tied
from fp8bench.model.fleet import FleetPlan
from fp8bench.store.fleet_plans import states_of, wanted

# Ray sets it for its tasks, and threads are part of what is measured: cells get what the submitting process has.
_THREADS = "OMP_NUM_THREADS"
_ADDRESS = "address"
_PATIENCE_SECONDS = 30.0
_CONNECT_SECONDS = 10.0


@engines.register("ray")
class Ray(Engine):
    """Its nodes offer kinds of devices as resources, one a node."""

    name = "ray"
    summary = "a Ray cluster that runs, a cell to each node that offers the plan's kind of device (fp8bench[ray])"
    takes = "address=HOST:PORT of the cluster; default RAY_ADDRESS, or the one on this machine"

    def _started(self, order: Order) -> Workers:
        if not order.stays:
            raise UsageError("Ray ends its tasks with the process that gave them. Add --wait.")
        if other := sorted(set(order.options) - {_ADDRESS}):
            raise UsageError(f"--on ray takes the option {_ADDRESS} alone, not {', '.join(other)}.")
        cells = [state.number for state in states_of(order.plan, order.store) if wanted(state, order.retry)]
        _check_kinds(order.plan, cells)
        ray = _package()
        if cells:
            _connect(ray, order, cells)
        return _Tasks(ray, order, cells)


def _connect(ray: Any, order: Order, cells: Sequence[int]) -> None:
    address = order.options.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "auto"
    check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster answers: {str(error).strip():.300}. {_start_one('cpu')}") from None
    lacking = _lacking(order.plan, cells, ray.cluster_resources())
    if lacking:
        ray.shutdown()
        raise UsageError(f"no node of this Ray cluster offers {resource_of(lacking)}. {_start_one(lacking)}")


def check_answers(address: str) -> None:
    """Ray itself tries an address where nobody listens for minutes. Other forms of an address are for Ray to judge."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"nothing answers at {address} ({error}). Expected HOST:PORT of a running Ray cluster."
        ) from None


def resource_of(kind: str) -> str:
    """What a node is started with that has such a device."""
    return f"fp8bench:{kind}"


def _start_one(kind: str) -> str:
    return f"A node that has one is started by: ray start --resources='{{\"{resource_of(kind)}\": 1}}'"


def _check_kinds(plan: FleetPlan, cells: Sequence[int]) -> None:
    if any(not plan.cells[number].kind for number in cells):
        raise UsageError(f"the plan {plan.id} does not say what devices it is for: write it again with this version.")


def _lacking(plan: FleetPlan, cells: Sequence[int], offered: Mapping[str, float]) -> str:
    kinds = sorted({plan.cells[number].kind for number in cells})
    return next((kind for kind in kinds if offered.get(resource_of(kind), 0.0) < 1), "")


def _package() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError("Ray is not installed: pip install 'fp8bench[ray]'.") from None
    except (AttributeError, LookupError, OSError, RuntimeError) as error:  # it looks for devices at its import
        raise UsageError(f"Ray is installed, and its import fails ({type(error).__name__}: {error}).") from None
    return ray


class _Tasks(Workers):
    """Cells that are handed to nodes as these become free; none is tried twice."""

    def __init__(self, ray: Any, order: Order, cells: Sequence[int]) -> None:
        self.names = [order.plan.name_of(number) for number in cells]
        self._ray, self._order, self._waiting = ray, order, list(cells)
        self._running: dict[Any, int] = {}
        threads = os.environ.get(_THREADS)
        self._threads = {} if threads is None else {_THREADS: threads}

    def wait(self) -> tuple[str, ...]:
        troubles: list[str] = []
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < (self._order.workers or len(self.names)):
                    self._hand_out(self._waiting.pop(0))
                for task in self._ray.wait(list(self._running))[0]:
                    number = self._running.pop(task)
                    try:
                        self._ray.get(task)
                    except self._ray.exceptions.RayError as error:
                        troubles.append(f"cell {number}: {type(error).__name__}: {str(error).strip():.300}")
        except BaseException:
            for task in self._running:
                self._ray.cancel(task)
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_PATIENCE_SECONDS)
            raise
        finally:
            self._ray.shutdown()
        return tuple(troubles)

    def _hand_out(self, number: int) -> None:
        cell = self._order.plan.cells[number]
        task = self._ray.remote(measured_on_node).options(
            name=f"fp8bench {self._order.plan.name_of(number)}", num_cpus=0, num_gpus=cell.gpus,
            resources={resource_of(cell.kind): 1}, max_retries=0, retry_exceptions=False,
        )  # fmt: skip
        log = self._order.logs / f"ray-{self._order.plan.id}-{number}.txt"
        words = [*self._order.words, "--cell", str(number)]
        self._running[task.remote(words, str(log), str(Path.cwd()), self._threads)] = number


def measured_on_node(words: list[str], log: str, folder: str, threads: dict[str, str]) -> int:
    """In a process of Ray's: the exit code of a worker that takes one cell. An interrupt is one of the worker."""
    environment = {name: value for name, value in os.environ.items() if name != _THREADS} | threads
    with Path(log).open("ab") as output:
        where = Path(folder) if Path(folder).is_dir() else None
        return ended(tied([sys.executable, "-m", "fp8bench", *words], output, environment, where))
