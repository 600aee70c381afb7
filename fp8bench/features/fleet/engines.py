"""Measures the waiting cells of a plan, each in a separate process. Starts workers on this machine, in Slurm (by
submitit) or in Ray.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import convert_write_errors, open_file
from fp8bench.model.run import CellAttempt, CellState, CellStatus, FleetPlan
from fp8bench.store.fleet_plans import OUTPUT_FILE, add_attempt, compute_cell_states, get_cell_folder, should_run_cell
from fp8bench.store.runs.run_file import check_store

# A program that asks the kernel for SIGTERM when its parent dies, and then executes fp8bench. Popen's preexec_fn
# would be unsafe, because Ray has threads.
_DIE_WITH_PARENT_SCRIPT = """
import ctypes, os, signal, sys
set_parent_death_signal = 1
ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_fp8bench(
    arguments: Sequence[str],
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts fp8bench without standard input. On Linux the started process receives SIGTERM when the calling thread
    dies, even by SIGKILL. Otherwise a cell would go on while the next cell is measured on the same device.
    """
    command = [sys.executable, "-m", "fp8bench", *arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-ISc", _DIE_WITH_PARENT_SCRIPT, str(os.getpid()), *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=environment,
        cwd=folder,
    )


def wait_for_all(*processes: subprocess.Popen[bytes]) -> int:
    """Waits for all processes and returns the exit code of the last one. An interrupt of this process terminates them
    all.
    """
    exit_code = 0
    try:
        for process in processes:
            exit_code = process.wait()
    except BaseException:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        raise
    return exit_code


# The file that a worker locks while it measures a cell. The cell's process locks a different file.
_CELL_CLAIM_FILE = "claim"


def measure_waiting_cells(
    plan: FleetPlan,
    file: Path,
    store: Path,
    retry: bool,
    report_begin: Callable[[CellState], None],
    only_cell: int | None = None,
) -> tuple[dict[int, int], dict[int, str]]:
    """Measures waiting cells until each was tried. Returns two mappings by cell: its exit code, or the reason why it
    was refused.

    With `retry`, failed cells are tried again. `report_begin` is called with each cell before it is measured. With
    `only_cell`, only that cell is measured. Raises StoreError if the store is not writable.
    """
    from fp8bench.jobs.several_runs import exclusive_lock  # this import is slow

    check_store(store)
    exit_codes: dict[int, int] = {}
    refusal_by_cell: dict[int, str] = {}
    finished_cells: set[int] = set()
    while True:
        # 1. Read the states of all cells again, because other workers measure cells too. Skip the runs of finished
        # cells.
        cell_states = compute_cell_states(plan, store, finished_cells)
        finished_cells.update(state.number for state in cell_states if state.status is CellStatus.DONE)
        waiting_cell_states = [
            state
            for state in cell_states
            if only_cell in (None, state.number)
            and state.number not in exit_codes | refusal_by_cell
            and should_run_cell(state, retry)
        ]
        if not waiting_cell_states:
            return exit_codes, refusal_by_cell
        # 2. Measure the first waiting cell, unless another worker has claimed it.
        state, number = waiting_cell_states[0], waiting_cell_states[0].number
        try:
            with exclusive_lock(
                get_cell_folder(plan, number, store) / _CELL_CLAIM_FILE, f"cell {plan.name_of(number)}"
            ):
                report_begin(state)
                exit_codes[number] = _measure_cell(plan, file, number, store)
        except (UsageError, StoreError) as error:
            refusal_by_cell[number] = str(error)


def _measure_cell(plan: FleetPlan, file: Path, number: int, store: Path) -> int:
    """Measures a cell in a new process, records the attempt, and returns the exit code. An interrupt of this worker
    also interrupts the cell, which stores its finished results.
    """
    from fp8bench.pipeline import now  # this import is slow

    folder, start_time = get_cell_folder(plan, number, store), now()
    arguments = ["suite", "--plan", str(file), "--cell", str(number), "--store", str(store), "--no-report"]
    start = time.monotonic()
    # The environment variable COLUMNS would wrap messages, so a report would quote them incompletely.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with (
        convert_write_errors(folder / OUTPUT_FILE, "Move it away."),
        open_file(folder / OUTPUT_FILE, "ab", most=None) as output,
    ):
        exit_code = wait_for_all(start_fp8bench(arguments, output, environment))
    attempt = CellAttempt(socket.gethostname(), os.getpid(), start_time, time.monotonic() - start, exit_code)
    add_attempt(plan, number, store, attempt)
    return exit_code


@dataclass(frozen=True)
class WorkerStartOrder:
    """An order to start processes that measure the cells (parts) of a plan.

    `workers` is the number of processes; None for the engine's default. `file` is the path of the plan, and `options`
    are options of the engine. If `waits_for_workers`, the caller waits for all workers.
    """

    plan: FleetPlan
    file: Path
    store: Path
    workers: int | None = None
    retry: bool = False
    waits_for_workers: bool = False
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def log_folder(self) -> Path:
        return self.store.resolve() / "cells" / "logs"

    @property
    def arguments(self) -> list[str]:
        """Returns the arguments of `fp8bench` that start one worker."""
        arguments = ["fleet", "work", str(self.file.resolve()), "--store", str(self.store.resolve())]
        return [*arguments, "--retry"] if self.retry else arguments


def run_local_workers(order: WorkerStartOrder) -> None:
    """Runs workers on this machine until all end. An interrupt of this process ends them. Raises StoreError if the
    store is not writable.
    """
    check_store(order.store)
    wait_for_all(*(start_fp8bench(order.arguments) for _ in range(order.workers or 1)))


# Called with the names of the jobs that an engine started.
JobNamesCallback = Callable[[Sequence[str]], None]


def start_workers(engine: str, order: WorkerStartOrder, report_jobs: JobNamesCallback) -> Sequence[str]:
    """Starts workers, and returns the problems of their jobs. If the order `waits_for_workers`, waits for them, and an
    interrupt of this process ends them. Raises UsageError if the engine cannot start, and StoreError if the store is
    not writable.
    """
    check_store(order.store)
    order.log_folder.mkdir(parents=True, exist_ok=True)
    return WORKER_STARTER_BY_ENGINE[engine](order, report_jobs)


_TIME_LIMIT_MINUTES = 24 * 60
# A benchmark needs a whole node. Slurm must not restart a job, because the next worker resumes its run.
_SBATCH_OPTIONS: Mapping[str, str | bool] = {"exclusive": True, "no-requeue": True}
_POLL_SECONDS = 1.0


def _run_in_slurm(order: WorkerStartOrder, report_jobs: JobNamesCallback) -> Sequence[str]:
    # 1. Check for submitit and Slurm before any job starts, so that not only a part of the workers starts.
    try:
        import submitit
    except ImportError:
        raise UsageError(
            "submitit, which starts Slurm jobs, is not installed: pip install 'fp8bench[fleet]'."
        ) from None
    try:
        slurm_executor = submitit.SlurmExecutor(folder=order.log_folder)
    except RuntimeError as error:
        raise UsageError(f"there is no Slurm here ({error}). Start it where sbatch is, or use fleet work.") from None
    # 2. The value "no" disables a default option, such as `exclusive`.
    options = {**_SBATCH_OPTIONS, **{name.replace("_", "-"): value or True for name, value in order.options.items()}}
    option_values = {name: value for name, value in options.items() if value != "no"}
    slurm_executor.update_parameters(time=_TIME_LIMIT_MINUTES, additional_parameters=option_values)
    try:
        slurm_jobs = [slurm_executor.submit(run_fleet_worker, order.arguments) for _ in range(order.workers or 1)]
    except submitit.core.utils.FailedJobError as error:
        reason = str(error).strip().rstrip(".")
        raise UsageError(f"Slurm accepted no job: {reason:.500}. --option NAME=VALUE sets its options.") from None
    # 3. Report the names of jobs before waiting, so that users can cancel the jobs by hand after an interrupt.
    names = [str(job.job_id) for job in slurm_jobs]
    report_jobs(names)
    try:
        while order.waits_for_workers and _is_queued(names):
            time.sleep(_POLL_SECONDS)
    # Slurm jobs go on after this process ends. So an interrupt must cancel them, and wait until they have ended.
    except BaseException:
        for job in slurm_jobs:
            job.cancel()
        while _is_queued(names):
            time.sleep(_POLL_SECONDS)
        raise
    return ()


def _is_queued(names: Sequence[str]) -> bool:
    """Returns whether any of the jobs still waits or runs, as Slurm's command squeue reports. submitit would ask
    Slurm's accounting, which some clusters do not have.
    """
    arguments = ["squeue", "--noheader", "--format=%i", "--jobs", ",".join(names)]
    squeue_result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    # squeue fails for jobs that it no longer knows, because they ended.
    return not squeue_result.returncode and bool(squeue_result.stdout.strip())


# Ray sets OMP_NUM_THREADS for its tasks, which affects measurements. So cells get the submitting process's value.
_THREADS_VARIABLE = "OMP_NUM_THREADS"
_ADDRESS_OPTION = "address"
_CANCEL_SECONDS = 30.0
_CONNECT_SECONDS = 10.0


def _run_on_ray(order: WorkerStartOrder, report_jobs: JobNamesCallback) -> Sequence[str]:
    """Sends each cell once to a node that offers the cell's kind of device as a Ray resource, and waits for all of
    them. Raises UsageError if the order does not wait.
    """
    # 1. Reject wrong usage that can be detected without a cluster.
    fleet_plan = order.plan
    if not order.waits_for_workers:
        raise UsageError("Ray ends its tasks when this process ends. Add --wait.")
    if unknown_options := sorted(set(order.options) - {_ADDRESS_OPTION}):
        raise UsageError(f"--on ray takes the option {_ADDRESS_OPTION} alone, not {', '.join(unknown_options)}.")
    waiting_cell_numbers = [
        state.number for state in compute_cell_states(fleet_plan, order.store) if should_run_cell(state, order.retry)
    ]
    if any(not fleet_plan.cells[cell_number].kind for cell_number in waiting_cell_numbers):
        raise UsageError(f"the plan {fleet_plan.id} does not name its devices: write it again with this version.")
    # 2. Connect to the cluster if any cell is waiting.
    ray: Any = (
        _connect_ray(order, sorted({fleet_plan.cells[cell_number].kind for cell_number in waiting_cell_numbers}))
        if waiting_cell_numbers
        else None
    )
    report_jobs([fleet_plan.name_of(cell_number) for cell_number in waiting_cell_numbers])
    # 3. Run one cell per device at a time, because two would disturb each other.
    cell_by_task: dict[Any, int] = {}
    troubles = []
    max_running_tasks = order.workers or len(waiting_cell_numbers)
    try:
        while waiting_cell_numbers or cell_by_task:
            while waiting_cell_numbers and len(cell_by_task) < max_running_tasks:
                cell_number = waiting_cell_numbers.pop(0)
                cell_by_task[_start_task(ray, order, cell_number)] = cell_number
            for task in ray.wait(list(cell_by_task))[0]:
                cell_number = cell_by_task.pop(task)
                try:
                    ray.get(task)
                except ray.exceptions.RayError as error:
                    troubles.append(f"cell {cell_number}: {type(error).__name__}: {str(error).strip():.300}")
    # Ray's tasks end together with this process, so they must store their runs first.
    except BaseException:
        for task in cell_by_task:
            ray.cancel(task)
        ray.wait(list(cell_by_task), num_returns=len(cell_by_task), timeout=_CANCEL_SECONDS)
        raise
    finally:
        if ray is not None:
            ray.shutdown()
    return troubles


def _connect_ray(order: WorkerStartOrder, kinds: Sequence[str]) -> Any:
    """Connects to a Ray cluster, which must have a node for every kind of device. Returns the module `ray`."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UsageError("Ray is not installed: pip install 'fp8bench[ray]'.") from None
    # importing ray searches for devices, which may fail
    except (AttributeError, LookupError, OSError, RuntimeError) as error:
        raise UsageError(f"Ray is installed, and its import fails ({type(error).__name__}: {error}).") from None
    address = order.options.get(_ADDRESS_OPTION) or os.environ.get("RAY_ADDRESS") or "auto"
    check_is_reachable(address)
    advice = "A node that has one is started by: ray start --resources='{\"%s\": 1}'"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip()
        raise UsageError(f"no Ray cluster answers: {reason:.300}. {advice % _make_resource_name('cpu')}") from None
    cluster_resources = ray.cluster_resources()
    for resource in map(_make_resource_name, kinds):
        if cluster_resources.get(resource, 0.0) < 1:
            ray.shutdown()
            raise UsageError(f"no node of this Ray cluster offers {resource}. {advice % resource}")
    return ray


def check_is_reachable(address: str) -> None:
    """Raises UsageError if nothing answers at HOST:PORT. Ray would notice that only after minutes. Other forms of
    addresses are not checked here.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"nothing answers at {address} ({error}). Expected HOST:PORT of a running Ray cluster."
        ) from None


def _make_resource_name(kind: str) -> str:
    """Returns the name of the Ray resource that nodes with this kind of device offer."""
    return f"fp8bench:{kind}"


def _start_task(ray: Any, order: WorkerStartOrder, number: int) -> Any:
    cell = order.plan.cells[number]
    task = ray.remote(run_on_node).options(
        name=f"fp8bench {order.plan.name_of(number)}",
        num_cpus=0,
        num_gpus=cell.gpus,
        resources={_make_resource_name(cell.kind): 1},
        max_retries=0,
        retry_exceptions=False,
    )
    log_file = order.log_folder / f"ray-{order.plan.id}-{number}.txt"
    arguments = [*order.arguments, "--cell", str(number)]
    return task.remote(arguments, str(log_file), str(Path.cwd()), os.environ.get(_THREADS_VARIABLE))


def run_fleet_worker(arguments: list[str]) -> int:
    """Runs in a process of submitit: starts a worker that ends with this process, and returns its exit code."""
    return wait_for_all(start_fp8bench(arguments))


def run_on_node(arguments: list[str], log: str, folder: str, threads: str | None) -> int:
    """Runs in a process of Ray: starts a worker for one cell, and returns its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != _THREADS_VARIABLE}
    if threads is not None:
        environment[_THREADS_VARIABLE] = threads
    # This node may not have the folder from which the plan was submitted.
    working_folder = Path(folder) if Path(folder).is_dir() else None
    with open_file(Path(log), "ab", most=None) as output:
        return wait_for_all(start_fp8bench(arguments, output, environment, working_folder))


WORKER_STARTER_BY_ENGINE: Mapping[str, Callable[[WorkerStartOrder, JobNamesCallback], Sequence[str]]] = {
    "ray": _run_on_ray,
    "slurm": _run_in_slurm,
}
