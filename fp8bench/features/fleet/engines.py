"""A fleet worker, which measures waiting cells, each in a separate process; and engines that start workers: Slurm, by
submitit, and a Ray cluster, cell by cell."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import keeping, open_file
from fp8bench.model.run import Attempt, CellState, CellStatus, FleetPlan
from fp8bench.store.fleet_plans import OUTPUT, add_attempt, folder_of, should_run, states_of
from fp8bench.store.runs.run_file import check_store

# Asks the kernel for SIGTERM when the parent dies, then execs the program. preexec_fn would be unsafe: Ray has threads.
_TIE = """
import ctypes, os, signal, sys
set_parent_death_signal = 1
ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_child(
    words: Sequence[str],
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts fp8bench without input. On Linux it gets SIGTERM when the calling thread dies, even by SIGKILL. Otherwise
    a cell would continue next to the following one, on the same device."""
    tie = [sys.executable, "-ISc", _TIE, str(os.getpid())] if sys.platform == "linux" else []
    error = None if output is None else subprocess.STDOUT
    return subprocess.Popen(
        [*tie, sys.executable, "-m", "fp8bench", *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        env=environment,
        cwd=folder,
    )


def exit_code(*processes: subprocess.Popen[bytes]) -> int:
    """Waits for all processes, and returns the exit code of the last one; an interrupt of this process ends them
    all."""
    code = 0
    try:
        for process in processes:
            code = process.wait()
    except BaseException:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        raise
    return code


# The lock of the worker that measures a cell; the cell's process has a different one.
_CLAIM = "claim"


def work(
    plan: FleetPlan, file: Path, store: Path, retry: bool, began: Callable[[CellState], None], only: int | None = None
) -> tuple[dict[int, int], dict[int, str]]:
    """Measures waiting cells until all were tried; returns exit codes by cell, and why other cells were refused. With
    `retry`, failed cells are tried again. `began` is called with each cell as it begins. `only` restricts it to one
    cell. Raises StoreError if the store is not writable."""
    from fp8bench.jobs.several_runs import exclusively  # heavy

    check_store(store)
    done: dict[int, int] = {}
    refused: dict[int, str] = {}
    complete: set[int] = set()
    while (state := _next(plan, store, retry, {*done, *refused}, only, complete)) is not None:
        try:
            with exclusively(folder_of(plan, state.number, store) / _CLAIM, f"cell {plan.name_of(state.number)}"):
                began(state)
                done[state.number] = _measure(plan, file, state.number, store)
        except (UsageError, StoreError) as error:
            refused[state.number] = str(error)  # usually another worker was faster; or its folder cannot be written
    return done, refused


def _next(
    plan: FleetPlan, store: Path, retry: bool, tried: Collection[int], only: int | None, complete: set[int]
) -> CellState | None:
    """Returns the next cell. `complete` remembers finished cells, because rereading all their runs takes long."""
    states = states_of(plan, store, complete)
    complete.update(state.number for state in states if state.status is CellStatus.DONE)
    waiting = (state for state in states if should_run(state, retry) and state.number not in tried)
    return next((state for state in waiting if only is None or state.number == only), None)


def _measure(plan: FleetPlan, file: Path, number: int, store: Path) -> int:
    """Returns the cell's exit code. An interrupt of this worker interrupts the cell, which stores its finished
    results."""
    from fp8bench.pipeline import now  # heavy

    folder, started = folder_of(plan, number, store), now()
    words = ["suite", "--plan", str(file), "--cell", str(number), "--store", str(store), "--no-report"]
    begin = time.monotonic()
    # Sentences folded to a terminal's width would be truncated where they are quoted.
    unfolded = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with keeping(folder / OUTPUT, "Move it away."), open_file(folder / OUTPUT, "ab", most=None) as output:
        code = exit_code(start_child(words, output, unfolded))
    add_attempt(
        plan, number, store, Attempt(socket.gethostname(), os.getpid(), started, time.monotonic() - begin, code)
    )
    return code


@dataclass(frozen=True)
class Order:
    """An order to start a number of `workers` (None: the engine's default) for the cells of a plan, into a store.
    `file` is the plan's path, `options` are the engine's; with `stays` the caller waits for the end."""

    plan: FleetPlan
    file: Path
    store: Path
    workers: int | None = None
    retry: bool = False
    stays: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        return self.store.resolve() / "cells" / "logs"

    @property
    def words(self) -> list[str]:
        """Returns the arguments of a worker, after fp8bench."""
        words = ["fleet", "work", str(self.file.resolve()), "--store", str(self.store.resolve())]
        return [*words, "--retry"] if self.retry else words


def run_crew(order: Order) -> None:
    """Runs workers on this machine until all have ended; they end if this process is interrupted. Raises StoreError if
    the store is not writable."""
    check_store(order.store)
    exit_code(*(start_child(order.words) for _ in range(order.workers or 1)))


# Reports the names of the jobs that an engine started.
Started = Callable[[Sequence[str]], None]


def start(engine: str, order: Order, started: Started) -> Sequence[str]:
    """Starts workers, and waits for them if ordered; an interrupt of this process ends them. Returns the
    problems of jobs. Raises UsageError if the engine cannot start, and StoreError if the store is not writable."""
    check_store(order.store)
    order.logs.mkdir(parents=True, exist_ok=True)
    return ENGINES[engine](order, started)


_MINUTES = 24 * 60
# A benchmark has its node to itself, and Slurm does not restart it: the next worker resumes it.
_SBATCH: Mapping[str, str | bool] = {"exclusive": True, "no-requeue": True}
_PAUSE_SECONDS = 1.0


def _run_in_slurm(order: Order, started: Started) -> Sequence[str]:
    # 1. Refuse before starting any job: an incomplete crew would be worse than none.
    try:
        import submitit
    except ImportError:
        raise UsageError(
            "submitit, which starts Slurm jobs, is not installed: pip install 'fp8bench[fleet]'."
        ) from None
    try:
        executor = submitit.SlurmExecutor(folder=order.logs)
    except RuntimeError as error:
        raise UsageError(f"there is no Slurm here ({error}). Start it where sbatch is, or use fleet work.") from None
    # 2. "no" disables a default, such as exclusive.
    options = {**_SBATCH, **{name.replace("_", "-"): value or True for name, value in order.options.items()}}
    parameters = {name: value for name, value in options.items() if value != "no"}
    executor.update_parameters(time=_MINUTES, additional_parameters=parameters)
    try:
        jobs = [executor.submit(run_worker, order.words) for _ in range(order.workers or 1)]
    except submitit.core.utils.FailedJobError as error:
        reason = str(error).strip().rstrip(".")
        raise UsageError(f"Slurm accepted no job: {reason:.500}. --option NAME=VALUE sets its options.") from None
    # 3. Report the jobs' names before waiting, so that users who interrupt can cancel them by hand.
    names = [str(job.job_id) for job in jobs]
    started(names)
    try:
        while order.stays and _is_queued(names):
            time.sleep(_PAUSE_SECONDS)
    # Jobs outlive this process: an interrupt must cancel them, and wait until they are gone.
    except BaseException:
        for job in jobs:
            job.cancel()
        while _is_queued(names):
            time.sleep(_PAUSE_SECONDS)
        raise
    return ()


def _is_queued(names: Sequence[str]) -> bool:
    """Asks squeue: submitit would ask the accounting, which not every Slurm has."""
    words = ["squeue", "--noheader", "--format=%i", "--jobs", ",".join(names)]
    queue = subprocess.run(words, capture_output=True, text=True, check=False)
    return not queue.returncode and bool(queue.stdout.strip())


# Ray sets it for its tasks. Threads affect measurements, so cells get the submitting process's value.
_THREADS = "OMP_NUM_THREADS"
_ADDRESS = "address"
_PATIENCE_SECONDS = 30.0
_CONNECT_SECONDS = 10.0


def _run_on_ray(order: Order, started: Started) -> Sequence[str]:
    """Sends cells to nodes that offer their kind of device as a resource, one at a time; none is tried twice."""
    # 1. Reject what can be rejected without a cluster.
    plan = order.plan
    if not order.stays:
        raise UsageError("Ray ends its tasks when this process ends. Add --wait.")
    if unknown := sorted(set(order.options) - {_ADDRESS}):
        raise UsageError(f"--on ray takes the option {_ADDRESS} alone, not {', '.join(unknown)}.")
    waiting = [state.number for state in states_of(plan, order.store) if should_run(state, order.retry)]
    if any(not plan.cells[number].kind for number in waiting):
        raise UsageError(f"the plan {plan.id} does not name its devices: write it again with this version.")
    # 2. Connect, unless nothing is left to do.
    ray: Any = _connect_ray(order, sorted({plan.cells[number].kind for number in waiting})) if waiting else None
    started([plan.name_of(number) for number in waiting])
    # 3. Run one cell per device at a time: two would disturb each other.
    running: dict[Any, int] = {}
    troubles = []
    most = order.workers or len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < most:
                number = waiting.pop(0)
                running[_start_task(ray, order, number)] = number
            for task in ray.wait(list(running))[0]:
                number = running.pop(task)
                try:
                    ray.get(task)
                except ray.exceptions.RayError as error:
                    troubles.append(f"cell {number}: {type(error).__name__}: {str(error).strip():.300}")
    # Unlike Slurm's, tasks end with this process, but first they must store their runs.
    except BaseException:
        for task in running:
            ray.cancel(task)
        ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE_SECONDS)
        raise
    finally:
        if ray is not None:
            ray.shutdown()
    return troubles


def _connect_ray(order: Order, kinds: Sequence[str]) -> Any:
    """Returns the module, connected to a cluster with a node for every kind of device."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UsageError("Ray is not installed: pip install 'fp8bench[ray]'.") from None
    except (AttributeError, LookupError, OSError, RuntimeError) as error:  # it looks for devices when imported
        raise UsageError(f"Ray is installed, and its import fails ({type(error).__name__}: {error}).") from None
    address = order.options.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "auto"
    check_answers(address)
    advice = "A node that has one is started by: ray start --resources='{\"%s\": 1}'"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip()
        raise UsageError(f"no Ray cluster answers: {reason:.300}. {advice % _resource_of('cpu')}") from None
    offered = ray.cluster_resources()
    for resource in map(_resource_of, kinds):
        if offered.get(resource, 0.0) < 1:
            ray.shutdown()
            raise UsageError(f"no node of this Ray cluster offers {resource}. {advice % resource}")
    return ray


def check_answers(address: str) -> None:
    """Fails fast, because Ray tries an unreachable address for minutes; other forms of address are left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"nothing answers at {address} ({error}). Expected HOST:PORT of a running Ray cluster."
        ) from None


def _resource_of(kind: str) -> str:
    """Returns the resource name for nodes with such a device."""
    return f"fp8bench:{kind}"


def _start_task(ray: Any, order: Order, number: int) -> Any:
    cell = order.plan.cells[number]
    task = ray.remote(run_on_node).options(
        name=f"fp8bench {order.plan.name_of(number)}",
        num_cpus=0,
        num_gpus=cell.gpus,
        resources={_resource_of(cell.kind): 1},
        max_retries=0,
        retry_exceptions=False,
    )
    log = order.logs / f"ray-{order.plan.id}-{number}.txt"
    words = [*order.words, "--cell", str(number)]
    return task.remote(words, str(log), str(Path.cwd()), os.environ.get(_THREADS))


def run_worker(words: list[str]) -> int:
    """Runs in a process of submitit: returns the exit code of a worker, which ends with this process."""
    return exit_code(start_child(words))


def run_on_node(words: list[str], log: str, folder: str, threads: str | None) -> int:
    """Runs in a process of Ray: returns the exit code of a worker that takes one cell."""
    environment = {name: value for name, value in os.environ.items() if name != _THREADS}
    if threads is not None:
        environment[_THREADS] = threads
    with open_file(Path(log), "ab", most=None) as output:
        return exit_code(start_child(words, output, environment, Path(folder) if Path(folder).is_dir() else None))


ENGINES: Mapping[str, Callable[[Order, Started], Sequence[str]]] = {"ray": _run_on_ray, "slurm": _run_in_slurm}
