"""Collects the conditions of a run: machine, system, Python, commit and load. The worker adds torch's versions and
settings.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from fp8bench.model import Environment, Scalar
from fp8bench.model.raw import QUANTISERS_VARIABLE
from fp8bench.model.run import BUSY_CORES_FACT, TORCH_VARIABLES
from fp8bench.store.asv.identity import find_machine_identity, list_identity_facts
from fp8bench.user_code import hash_user_code

_CPU_TIMES_FILE, _SLEEP_SECONDS = "/proc/stat", 0.05
_RECORDED_ENV_VARIABLES = (QUANTISERS_VARIABLE, *TORCH_VARIABLES)

_PACKAGE_FOLDER = Path(__file__).parents[1]
# The time limit for a call of git, in seconds. It is long, because git is slow on a busy machine, and a run without
# git's answer has no commit.
_GIT_TIMEOUT_SECONDS = 60


def gather(
    software: Mapping[str, Scalar | None],
    version: str,
    threads: int,
    imports: Iterable[str] = (),
    *,
    folder: Path | None = None,
) -> Environment:
    """Returns all facts that may explain a measured number. A fact is None if the system does not report it.

    `imports` are the user's modules. The commit is that of the repository that contains `folder`, by default the
    working directory.
    """
    facts: dict[str, Scalar | None] = {
        "fp8bench": version,
        "machine": platform.node() or "unknown",
        "system": platform.platform(),
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "cpu_count": os.cpu_count(),
        "cpu_affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_governor": _read_file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_turbo_off": _read_file("/sys/devices/system/cpu/intel_pstate/no_turbo"),
        "smt": _read_file("/sys/devices/system/cpu/smt/active"),
        "cgroup_cpu_max": _read_file("/sys/fs/cgroup/cpu.max"),
        "load_1min": _read_system_load(),
        BUSY_CORES_FACT: _measure_busy_cores(),
        "threads": threads,
        "imports_sha256": hash_user_code(imports),
        **list_identity_facts(find_machine_identity()),
        **_read_commit(folder or Path()),
        **{f"env_{name}": os.environ[name] for name in _RECORDED_ENV_VARIABLES if name in os.environ},
        **software,
    }
    return Environment(facts)


def _read_system_load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _measure_busy_cores() -> float | None:
    """Measures how many cores other processes keep busy while this process sleeps. The system's load average would be
    too high, because it still counts programs that have ended.
    """
    earlier_cpu_ticks = _read_cpu_ticks()
    time.sleep(_SLEEP_SECONDS)
    elapsed_cpu_ticks = [new - old for old, new in zip(earlier_cpu_ticks, _read_cpu_ticks(), strict=False)]
    # In /proc/stat, the fourth and fifth values are idle time and I/O wait.
    busy_time_share = 1 - sum(elapsed_cpu_ticks[3:5]) / max(1, sum(elapsed_cpu_ticks))
    return round(busy_time_share * (os.cpu_count() or 1), 2) if elapsed_cpu_ticks else None


def _read_cpu_ticks() -> list[int]:
    """Reads the processor time of all cores since boot, in ticks, by kind of use. Returns [] if the system has no
    /proc/stat.
    """
    counts = (_read_file(_CPU_TIMES_FILE) or "").partition("\n")[0].split()
    # Leave out the last two columns: the time of guests is part of user time already.
    return [int(word) for word in counts[1:9]]


def describe_current_load() -> str:
    """Returns the load and the number of cores, for example 'load 3.1 on 2 cores'."""
    system_load = _read_system_load()
    return f"load {system_load} on {os.cpu_count()} cores" if system_load is not None else f"{os.cpu_count()} cores"


def _read_file(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None


def _read_commit(folder: Path) -> dict[str, Scalar | None]:
    """Returns the commit of a folder's repository, the author date of the commit (ms since 1970), and whether the
    running code differs from the commit.

    The facts are None without a working tree or a commit. Untracked files do not count as a difference, because a
    user's suite need not be committed.
    """
    is_work_tree = _read_git_output(folder, "rev-parse", "--is-inside-work-tree")
    # `rev-list`, because the user's configuration changes the output of `log` and `show`.
    commit_lines = (_read_git_output(folder, "rev-list", "-n", "1", "--format=%at", "HEAD") or "").split("\n")
    # rev-list prints a line with the commit and a line with the date.
    if is_work_tree != "true" or len(commit_lines) != 2:
        return {"commit": None, "commit_date": None, "dirty": None, "commit_unknown": _explain_missing_commit(folder)}
    commit, seconds = commit_lines[0].removeprefix("commit "), commit_lines[1]
    changed_files = _read_git_output(folder, "status", "--porcelain", "--untracked-files=no")
    repository = _read_git_output(folder, "rev-parse", "--show-toplevel")
    repository_package = _PACKAGE_FOLDER if repository is None else Path(repository) / _PACKAGE_FOLDER.name
    # If `folder` is in fp8bench's own repository, the running code may still come from elsewhere, for example from a
    # second working tree.
    is_our_repository = (repository_package / "__init__.py").is_file() and not repository_package.samefile(
        _PACKAGE_FOLDER
    )
    package_code_differs = is_our_repository and _read_package_code(repository_package) != _read_package_code(
        _PACKAGE_FOLDER
    )
    return {
        "commit": commit,
        "commit_date": int(seconds) * 1000 if seconds.isdecimal() else None,
        "dirty": package_code_differs or bool(changed_files) if changed_files is not None else None,
    }


def _explain_missing_commit(folder: Path) -> str | None:
    """Returns why git names no commit in a repository, for example because git is missing, or because another user
    owns the folder.

    Returns None outside of a repository.
    """
    start = folder.absolute()
    # Path.exists raises PermissionError in folders without access.
    if not any(os.path.lexists(above / ".git") for above in (start, *start.parents)):
        return None
    result = _run_git(folder, "rev-parse", "--is-inside-work-tree")
    if result.returncode == 0:
        return "it has no commit yet" if result.stdout.strip() == "true" else "this is not a working tree"
    first_line = next(iter(result.stderr.splitlines()), "it gave no reason").removeprefix("fatal: ")
    return None if first_line.startswith("not a git repository") else first_line


def _read_package_code(package: Path) -> dict[Path, bytes]:
    # `is_file` excludes links to missing files, which some editors leave behind.
    return {path.relative_to(package): path.read_bytes() for path in package.rglob("*.py") if path.is_file()}


def _run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs git with English messages. If git is missing or hangs, the returned result has a failing status and the
    reason.
    """
    command = ["git", *arguments]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"git cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"git gave no answer for {_GIT_TIMEOUT_SECONDS} s")


def _read_git_output(folder: Path, *arguments: str) -> str | None:
    result = _run_git(folder, *arguments)
    return result.stdout.strip() if result.returncode == 0 else None


def command_line() -> str:
    arguments = list(sys.argv)
    # `python -m fp8bench` has the path of `__main__.py` as its first argument.
    if arguments and arguments[0].endswith("__main__.py"):
        arguments[0:1] = ["python", "-m", "fp8bench"]
    elif arguments:
        arguments[0] = Path(arguments[0]).name or "python"
    return shlex.join(arguments)
