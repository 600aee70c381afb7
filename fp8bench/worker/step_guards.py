"""Finds forbidden side effects of a workload: printing in a step, and threads or processes that keep running.

Printing would be timed with its step, and threads and processes with everything that follows. A process can be ended,
and a thread cannot. The error names the threads and the processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.worker.clock import PhaseStampClock

TASK_GRACE_SECONDS = 0.5
_GRACE_WAIT_COUNT = 20
# Seconds to wait until a process ends. The process may have to wait for a core.
_EXIT_WAIT_SECONDS = 2.0
_POLL_SECONDS = 0.005
# Helper processes that may keep running: they end with the process that started them, and do nothing without a request.
_HELPER_PROCESS_COMMANDS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
)


class StepPrinted(RuntimeError):
    """A step wrote to stdout."""


class LeftRunning(RuntimeError):
    """A workload left threads or processes running."""


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects the output of the `with` block to stderr, because stdout belongs to fp8bench's tables."""
    with _end_forked_children(), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def guard_untimed_pass() -> Iterator[None]:
    """Runs an untimed pass, whose output goes to stderr. Raises LeftRunning if it leaves threads or processes
    running.
    """
    running_tasks_before = list_running_tasks()
    with stdout_to_stderr():
        yield
    if names := wait_for_running_tasks(list_running_tasks() - running_tasks_before):
        raise LeftRunning(
            f"it left {_describe_running(names)}: they would be timed with later work. Join them before returning."
        )


@contextlib.contextmanager
def require_silent_step() -> Iterator[None]:
    """Runs the `with` block, which takes timed steps. Raises an error if a step printed, or left a thread or a process
    running.
    """
    running_tasks_before = list_running_tasks()
    stdout_bytes_before = _measure_stdout_bytes()
    with _end_forked_children(), contextlib.redirect_stdout(io.StringIO()) as captured_output:
        yield
    lines = captured_output.getvalue().strip().splitlines()
    bytes_bypassing_stdout = _measure_stdout_bytes() - stdout_bytes_before
    if lines or bytes_bypassing_stdout:
        printed_output_text = repr(lines[0][:60]) if lines else f"{bytes_bypassing_stdout} bytes that bypass sys.stdout"
        further_lines_text = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
        raise StepPrinted(
            f"a step printed {printed_output_text}{further_lines_text}: printing is timed with the step. "
            "Print while preparing, or not at all."
        )
    if names := wait_for_running_tasks(list_running_tasks() - running_tasks_before, 0.0):
        raise LeftRunning(
            f"a step left {_describe_running(names)}: it would be timed with the next one. Join it in the step, or "
            "start it while preparing."
        )


def _describe_running(names: list[str]) -> str:
    return f"{len(names)} running ({', '.join(names[:5])})"


def _measure_stdout_bytes() -> int:
    try:
        status = os.fstat(1)
    except OSError:
        return 0
    # Only a regular file has a size that grows with the output.
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


_step_process_ids: list[int] = []


@contextlib.contextmanager
def _end_forked_children() -> Iterator[None]:
    """If the `with` block forks a child process, ends the child when it leaves the block. Otherwise the child would
    time steps itself, and fork in each step.
    """
    _step_process_ids.append(os.getpid())
    try:
        yield
    finally:
        if _step_process_ids.pop() != os.getpid():
            os._exit(0)


def _end_child_after_step() -> None:
    # A step ends with the clock's `end`, so a forked child ends there too.
    if _step_process_ids:
        PhaseStampClock.end = lambda *arguments: os._exit(0)  # type: ignore[method-assign]


os.register_at_fork(after_in_child=_end_child_after_step)


@dataclass(frozen=True)
class RunningTasks:
    """The threads and the descendant processes of this process."""

    threads: frozenset[threading.Thread] = frozenset()
    processes: frozenset[int] = frozenset()

    def __sub__(self, earlier: RunningTasks) -> RunningTasks:
        return RunningTasks(self.threads - earlier.threads, self.processes - earlier.processes)


_owns_process = False


def take_over_process() -> None:
    """Declares that only fp8bench and its workloads run code in this process. A worker calls it at its start.

    Without isolation the process is the user's, whose other threads may start processes too.
    """
    global _owns_process  # noqa: PLW0603 - there is one process, and it is owned from here on
    _owns_process = True


def owns_process() -> bool:
    return _owns_process


def list_running_tasks() -> RunningTasks:
    calling_thread_id = None if _owns_process else threading.get_native_id()
    descendant_pids = () if _has_no_child() else _iterate_descendants(os.getpid(), calling_thread_id)
    return RunningTasks(frozenset(threading.enumerate()), frozenset(descendant_pids))


def wait_for_running_tasks(started: RunningTasks, grace_seconds: float = TASK_GRACE_SECONDS) -> list[str]:
    """Returns the names of threads that do not end within `grace_seconds` seconds, and of processes. Ends these
    processes.

    Threads of torch do not count.
    """
    threads = [thread for thread in started.threads if not _is_torch_thread(thread)]
    # wait in several pieces: if the system suspends this process for a while, only one piece is lost
    for _ in range(_GRACE_WAIT_COUNT):
        if threads := [thread for thread in threads if thread.is_alive()]:
            threads[0].join(grace_seconds / _GRACE_WAIT_COUNT)
    return [thread.name for thread in threads if thread.is_alive()] + _end_processes(started.processes)


@contextlib.contextmanager
def end_processes_on_error() -> Iterator[None]:
    """If the `with` block raises, ends the processes that the block has started, because no state exists whose release
    would end them.
    """
    running_tasks_before = list_running_tasks()
    try:
        yield
    except BaseException:
        wait_for_running_tasks(list_running_tasks() - running_tasks_before, 0.0)
        raise


def _is_torch_thread(thread: threading.Thread) -> bool:
    # If tqdm is installed, torch's compiler starts its monitor thread, which sleeps.
    module_names = str(getattr(getattr(thread, "_target", None), "__module__", "")), type(thread).__module__
    if any(module.startswith(("torch", "tqdm._monitor")) for module in module_names):
        return True
    # Threads of Inductor's pool wait for work as long as the process lives, and their names do not contain 'torch'.
    inductor_module = sys.modules.get("torch._inductor.async_compile")
    thread_pool: Any = getattr(getattr(inductor_module, "AsyncCompile", None), "pool", None)
    return (
        thread_pool is not None
        and thread_pool.cache_info().currsize > 0
        and thread in getattr(thread_pool(), "_threads", ())
    )


def _has_no_child() -> bool:
    """Returns whether this process has no child. This takes one system call, and listing the children would read a
    file per thread.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _iterate_descendants(pid: int, thread: int | str | None = None) -> Iterator[int]:
    """Yields the descendants of a process, or of one of its threads. Some descendants may have ended. Yields none
    without /proc. This function runs around every slot of a workload with children, so it avoids pathlib, which takes
    five times as long.
    """
    try:
        thread_ids = os.listdir(f"/proc/{pid}/task") if thread is None else (thread,)  # noqa: PTH208
    except OSError:
        return
    for task in thread_ids:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:  # noqa: PTH123
                child_pids = list(map(int, file.readall().split()))
        except OSError:  # the thread has ended
            continue
        for child_pid in child_pids:
            yield child_pid
            yield from _iterate_descendants(child_pid)


def _end_processes(started: Iterable[int]) -> list[str]:
    deadline = time.monotonic() + _EXIT_WAIT_SECONDS
    while (remaining := [pid for pid in sorted(started) if _is_busy(pid)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    descriptions = [f"process {pid}: {_read_command_line(pid):.60}" for pid in remaining]
    for pid in remaining:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the system allows no waiting for a grandchild
            os.waitpid(pid, 0)
    return descriptions


def _is_busy(pid: int) -> bool:
    """Returns whether a process runs and is not a harmless helper, judged by its command line."""
    # A new process whose command line is still empty counts as busy.
    return _is_alive(pid) and not any(word in _read_command_line(pid) for word in _HELPER_PROCESS_COMMANDS)


def _read_command_line(pid: int) -> str:
    """Returns the name of a process's program without its folder, and its arguments; '' if the process has ended."""
    try:
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return " ".join([program.rpartition("/")[2], *arguments]).strip()


def _is_alive(pid: int) -> bool:
    """Returns whether a process is alive. A zombie, which only waits for its parent to read its status, is not."""
    try:
        # The state follows the program's name, which is in parentheses and may itself contain parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
