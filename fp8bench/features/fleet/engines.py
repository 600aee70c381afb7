"""A worker of a fleet, which measures waiting cells, each in a process of its own; and engines that start workers.

Engines are this machine and Slurm, by submitit, and a Ray cluster, cell by cell.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import keeping
from fp8bench.model.run import Attempt, CellState, CellStatus, FleetPlan
from fp8bench.store.fleet_plans import OUTPUT, add_attempt, folder_of, should_run, states_of
from fp8bench.store.runs.run_file import check_store

# Asks the kernel for SIGTERM when the parent dies, and becomes the program. preexec_fn would not do: Ray has threads.
_TIE = """
import ctypes, os, signal, sys
set_parent_death_signal = 1
ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(
    words: Sequence[str],
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts fp8bench without input. On Linux it gets SIGTERM when the thread that calls this dies, even by SIGKILL.
    Otherwise a cell would go on beside the next one, on the same device."""
    tie = [sys.executable, "-ISc", _TIE, str(os.getpid())] if sys.platform == "linux" else []
    error = None if output is None else subprocess.STDOUT
    return subprocess.Popen(
        [*tie, sys.executable, "-m", "fp8bench", *words],
        stdin=subprocess.DEVNULL, stdout=output, stderr=error, env=environment, cwd=folder,
    )  # fmt: skip


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


# The lock of the worker that measures a cell; the cell's process has another one.
_CLAIM = "claim"


def work(
    plan: FleetPlan, file: Path, store: Path, retry: bool, began: Callable[[CellState], None], only: int | None = None
) -> tuple[dict[int, int], dict[int, str]]:
    """Measures waiting cells until none is left that was not tried; returns exit codes by cell, and why others were
    not taken. Failed cells are tried again with `retry`. `began` is called with each cell as it begins. `only`
    restricts it to one cell. Raises StoreError where nothing can be kept in the store."""
    from fp8bench.jobs.several_runs import exclusively  # heavy

    check_store(store)
    done: dict[int, int] = {}
    left: dict[int, str] = {}
    whole: set[int] = set()
    while (state := _next(plan, store, retry, {*done, *left}, only, whole)) is not None:
        try:
            with exclusively(folder_of(plan, state.number, store) / _CLAIM, f"cell {plan.name_of(state.number)}"):
                began(state)
                done[state.number] = _measure(plan, file, state.number, store)
        except (UsageError, StoreError) as error:
            left[state.number] = str(error)  # usually another worker was faster; or its folder cannot be written
    return done, left


def _next(
    plan: FleetPlan, store: Path, retry: bool, tried: Collection[int], only: int | None, whole: set[int]
) -> CellState | None:
    """Returns the next cell. `whole` remembers cells that are done, because reading all their runs again takes long."""
    states = states_of(plan, store, whole)
    whole.update(state.number for state in states if state.status is CellStatus.DONE)
    waiting = (state for state in states if should_run(state, retry) and state.number not in tried)
    return next((state for state in waiting if only is None or state.number == only), None)


def _measure(plan: FleetPlan, file: Path, number: int, store: Path) -> int:
    """Returns the cell's exit code. An interrupt of this worker interrupts the cell, which keeps what it has."""
    from fp8bench.pipeline import now  # heavy

    folder, started = folder_of(plan, number, store), now()
    words = ["suite", "--plan", str(file), "--cell", str(number), "--store", str(store), "--no-report"]
    begin = time.monotonic()
    # Sentences folded to a terminal's width would be cut where they are quoted.
    unfolded = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with keeping(folder / OUTPUT, "Move it away."), (folder / OUTPUT).open("ab") as output:
        code = exit_code(tied(words, output, unfolded))
    add_attempt(
        plan, number, store, Attempt(socket.gethostname(), os.getpid(), started, time.monotonic() - begin, code)
    )
    return code


@dataclass(frozen=True)
class Order:
    """What to start: so many `workers` (None: the engine's default) for the cells of a plan, into a store. `file` is
    where the plan lies, `options` are the engine's own; with `stays` the caller waits for the end."""

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
        """The arguments of a worker, behind fp8bench."""
        words = ["fleet", "work", str(self.file.resolve()), "--store", str(self.store.resolve())]
        return [*words, "--retry"] if self.retry else words


def crew(order: Order) -> None:
    """Runs workers on this machine until all have ended; they end if this process is interrupted. Raises StoreError
    where nothing can be kept in the store."""
    check_store(order.store)
    exit_code(*(tied(order.words) for _ in range(order.workers or 1)))


@dataclass(frozen=True)
class StartedWorkers:
    """Workers that were started; `names` are the engine's own. `wait` returns when all have ended, with the engine's
    troubles; an interrupt of this process ends them."""

    names: Sequence[str]
    wait: Callable[[], tuple[str, ...]]


@dataclass(frozen=True)
class Engine:
    """`begin` starts an order; `takes` describes its --option, '' if it has none."""

    summary: str
    begin: Callable[[Order], StartedWorkers]
    takes: str = ""


def start(name: str, order: Order) -> StartedWorkers:
    """Raises UsageError where the engine cannot start, and StoreError where nothing can be kept in the store."""
    engine = ENGINES[name]
    if order.options and not engine.takes:
        raise UsageError(f"--option is not for --on {name}, which knows none. Leave it out.")
    check_store(order.store)
    order.logs.mkdir(parents=True, exist_ok=True)
    return engine.begin(order)


_MINUTES = 24 * 60


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise UsageError(
            "submitit, which hands out workers, is not installed: pip install 'fp8bench[fleet]'."
        ) from None
    return submitit


def _jobs(
    engine: str, executor: Any, order: Order, until: Callable[[Sequence[Any]], None],
    variables: Mapping[str, str | None] | None = None,
) -> StartedWorkers:  # fmt: skip
    """Starts workers as jobs of submitit's executor; `until` waits for their end. `variables` are set in their
    environment, or removed where they are None."""
    given = (order.words, dict(variables or {}))
    try:
        jobs = [executor.submit(worked, *given) for _ in range(order.workers or 1)]
    except _submitit().core.utils.FailedJobError as error:
        why = str(error).strip().rstrip(".")
        raise UsageError(f"{engine} took no job: {why:.500}. --option NAME=VALUE sets its options.") from None

    def wait() -> tuple[str, ...]:
        try:
            until(jobs)
        except BaseException:
            for job in jobs:
                job.cancel()
            until(jobs)
            raise
        return ()

    return StartedWorkers([str(job.job_id) for job in jobs], wait)


def worked(words: list[str], variables: dict[str, str | None]) -> int:
    """Runs in a process of submitit's: returns the exit code of a worker, which ends with this process."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    return exit_code(tied(words, environment=environment))


# submitit's local executor hides all GPUs from its jobs unless their numbers are given to it.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _local(order: Order) -> StartedWorkers:
    """Starts processes of this machine, which go on when the command has ended."""
    executor = _submitit().LocalExecutor(folder=order.logs)
    executor.update_parameters(timeout_min=_MINUTES)

    def until(jobs: Sequence[Any]) -> None:
        for job in jobs:
            job.wait()

    with _stderr_in(order.logs / "local.txt"):
        return _jobs("local", executor, order, until, {_VISIBLE: os.environ.get(_VISIBLE)})


@contextmanager
def _stderr_in(file: Path) -> Iterator[None]:
    """Sends the stderr of what is started meanwhile to a file: submitit's controllers print tracebacks when
    cancelled."""
    saved = os.dup(2)
    try:
        with file.open("ab") as opened:
            os.dup2(opened.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


# A benchmark has its node to itself, and Slurm does not restart it: the next worker resumes what it left.
_SBATCH: Mapping[str, str | bool] = {"exclusive": True, "no-requeue": True}
_PAUSE_SECONDS = 1.0


def _slurm(order: Order) -> StartedWorkers:
    try:
        executor = _submitit().SlurmExecutor(folder=order.logs)
    except RuntimeError as error:
        raise UsageError(f"there is no Slurm here ({error}). Start it where sbatch is, or give --on local.") from None
    executor.update_parameters(time=_MINUTES, additional_parameters=sbatch_options(order.options))
    return _jobs("slurm", executor, order, _out_of_queue)


def sbatch_options(options: Mapping[str, str]) -> dict[str, str | bool]:
    """Returns the defaults, overridden by those that were given; 'no' takes one away."""
    given = {name.replace("_", "-"): value or True for name, value in options.items()}
    return {name: value for name, value in {**_SBATCH, **given}.items() if value != "no"}


def _out_of_queue(jobs: Sequence[Any]) -> None:
    """Asks squeue: submitit would ask the accounting, which not every Slurm has."""
    words = ["squeue", "--noheader", "--format=%i", "--jobs", ",".join(str(job.job_id) for job in jobs)]
    while True:
        queue = subprocess.run(words, capture_output=True, text=True, check=False)
        if queue.returncode or not queue.stdout.strip():
            return
        time.sleep(_PAUSE_SECONDS)


# Ray sets it for its tasks. Threads are part of what is measured, so cells get the submitting process's value.
_THREADS = "OMP_NUM_THREADS"
_ADDRESS = "address"
_PATIENCE_SECONDS = 30.0
_CONNECT_SECONDS = 10.0


def _ray(order: Order) -> StartedWorkers:
    """Starts cells as tasks, each on a node that offers its kind of device as a resource, one at a time."""
    if not order.stays:
        raise UsageError("Ray ends its tasks with the process that gave them. Add --wait.")
    if other := sorted(set(order.options) - {_ADDRESS}):
        raise UsageError(f"--on ray takes the option {_ADDRESS} alone, not {', '.join(other)}.")
    plan = order.plan
    cells = [state.number for state in states_of(plan, order.store) if should_run(state, order.retry)]
    kinds = sorted({plan.cells[number].kind for number in cells})
    if "" in kinds:
        raise UsageError(f"the plan {plan.id} does not say what devices it is for: write it again with this version.")
    try:
        import ray
    except ImportError:
        raise UsageError("Ray is not installed: pip install 'fp8bench[ray]'.") from None
    except (AttributeError, LookupError, OSError, RuntimeError) as error:  # it looks for devices at its import
        raise UsageError(f"Ray is installed, and its import fails ({type(error).__name__}: {error}).") from None
    if cells:
        _connect(ray, order.options.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "auto", kinds)
    return StartedWorkers([plan.name_of(number) for number in cells], partial(_until_measured, ray, order, cells))


def _connect(ray: Any, address: str, kinds: Sequence[str]) -> None:
    check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster answers: {str(error).strip():.300}. {_start_one('cpu')}") from None
    offered = ray.cluster_resources()
    lacking = next((kind for kind in kinds if offered.get(_resource_of(kind), 0.0) < 1), "")
    if lacking:
        ray.shutdown()
        raise UsageError(f"no node of this Ray cluster offers {_resource_of(lacking)}. {_start_one(lacking)}")


def check_answers(address: str) -> None:
    """Fails fast, because Ray tries an address where nobody listens for minutes; other forms of address are left to
    Ray."""
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
    """Returns the resource that a node with such a device is started with."""
    return f"fp8bench:{kind}"


def _start_one(kind: str) -> str:
    return f"A node that has one is started by: ray start --resources='{{\"{_resource_of(kind)}\": 1}}'"


def _until_measured(ray: Any, order: Order, cells: Sequence[int]) -> tuple[str, ...]:
    """Hands cells to nodes as these become free; none is tried twice."""
    waiting, running, troubles = list(cells), dict[Any, int](), list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < (order.workers or len(cells)):
                number = waiting.pop(0)
                running[_start_task(ray, order, number)] = number
            for task in ray.wait(list(running))[0]:
                number = running.pop(task)
                try:
                    ray.get(task)
                except ray.exceptions.RayError as error:
                    troubles.append(f"cell {number}: {type(error).__name__}: {str(error).strip():.300}")
    except BaseException:
        for task in running:
            ray.cancel(task)
        ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE_SECONDS)
        raise
    finally:
        ray.shutdown()
    return tuple(troubles)


def _start_task(ray: Any, order: Order, number: int) -> Any:
    cell = order.plan.cells[number]
    task = ray.remote(measured_on_node).options(
        name=f"fp8bench {order.plan.name_of(number)}", num_cpus=0, num_gpus=cell.gpus,
        resources={_resource_of(cell.kind): 1}, max_retries=0, retry_exceptions=False,
    )  # fmt: skip
    log = order.logs / f"ray-{order.plan.id}-{number}.txt"
    threads = {name: value for name, value in os.environ.items() if name == _THREADS}
    return task.remote([*order.words, "--cell", str(number)], str(log), str(Path.cwd()), threads)


def measured_on_node(words: list[str], log: str, folder: str, threads: dict[str, str]) -> int:
    """Runs in a process of Ray's: returns the exit code of a worker that takes one cell."""
    environment = {name: value for name, value in os.environ.items() if name != _THREADS} | threads
    with Path(log).open("ab") as output:
        return exit_code(tied(words, output, environment, Path(folder) if Path(folder).is_dir() else None))


ENGINES = {
    "local": Engine("this machine, by submitit", _local),
    "ray": Engine(
        "a Ray cluster that runs, a cell to each node that offers the plan's kind of device (fp8bench[ray])", _ray,
        "address=HOST:PORT of the cluster; default RAY_ADDRESS, or the one on this machine",
    ),
    "slurm": Engine(
        "Slurm, by submitit", _slurm,
        "options of sbatch, like partition=gpu or gres=gpu:1; exclusive, which is the default, may be 'no'",
    ),
}  # fmt: skip
