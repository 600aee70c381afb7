"""Reads a run's conditions: machine, system, Python, commit, load. torch's part comes from the worker."""

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
from fp8bench.model.run import BUSY_CORES, READ_BY_TORCH
from fp8bench.store.asv.identity import as_facts, identify
from fp8bench.user_code import digest_of

_STAT, _LOOK_SECONDS = "/proc/stat", 0.05
_VARIABLES = (QUANTISERS_VARIABLE, *READ_BY_TORCH)

_PACKAGE = Path(__file__).parents[1]
# A busy machine takes seconds for a large repository; without an answer the run would be of no commit.
_GIT_SECONDS = 60


def gather(
    software: Mapping[str, Scalar | None],
    version: str,
    threads: int,
    imports: Iterable[str] = (),
    *,
    folder: Path | None = None,
) -> Environment:
    """Everything that may explain a number; None where the system reports nothing. `imports` are the user's modules.
    `folder` is in the repository whose commit is recorded; by default the working directory."""
    facts: dict[str, Scalar | None] = {
        "fp8bench": version,
        "machine": platform.node() or "unknown",
        "system": platform.platform(),
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "cpu_count": os.cpu_count(),
        "cpu_affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_turbo_off": _read("/sys/devices/system/cpu/intel_pstate/no_turbo"),
        "smt": _read("/sys/devices/system/cpu/smt/active"),
        "cgroup_cpu_max": _read("/sys/fs/cgroup/cpu.max"),
        "load_1min": _load(),
        BUSY_CORES: _busy_cores(),
        "threads": threads,
        "imports_sha256": digest_of(imports),
        **as_facts(identify()),
        **_commit(folder or Path()),
        **{f"env_{name}": os.environ[name] for name in _VARIABLES if name in os.environ},
        **software,
    }
    return Environment(facts)


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _busy_cores() -> float | None:
    """How many cores others keep busy while this process sleeps: the mean load still has programs that have ended."""
    earlier = _ticks()
    time.sleep(_LOOK_SECONDS)
    ticks = [new - old for old, new in zip(earlier, _ticks(), strict=False)]
    # The fourth and fifth are idle.
    share = 1 - sum(ticks[3:5]) / max(1, sum(ticks))
    return round(share * (os.cpu_count() or 1), 2) if ticks else None


def _ticks() -> list[int]:
    """Time of all cores by kind since the system's start; empty where the system does not count it."""
    words = (_read(_STAT) or "").partition("\n")[0].split()
    return [int(word) for word in words[1:9]]


def load_in_words() -> str:
    """For example 'load 3.1 on 2 cores'."""
    load = _load()
    return f"load {load} on {os.cpu_count()} cores" if load is not None else f"{os.cpu_count()} cores"


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None


def _commit(folder: Path) -> dict[str, Scalar | None]:
    """The commit of a folder's repository, its author's date (ms since 1970), and whether the running code differs from
    it.

    None without a working tree or a commit. Untracked files do not count: a user's suite need not be part of the
    commit.
    """
    inside = _git(folder, "rev-parse", "--is-inside-work-tree")
    # rev-list, because a user's settings add lines to what log and show print.
    lines = (_git(folder, "rev-list", "-n", "1", "--format=%at", "HEAD") or "").split("\n")
    if inside != "true" or len(lines) != 2:
        return {"commit": None, "commit_date": None, "dirty": None, "commit_unknown": _why_no_commit(folder)}
    commit, seconds = lines[0].removeprefix("commit "), lines[1]
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    top = _git(folder, "rev-parse", "--show-toplevel")
    package = _PACKAGE if top is None else Path(top) / _PACKAGE.name
    # In fp8bench's own repository other code may be running, for example that of a second working tree.
    is_ours = (package / "__init__.py").is_file() and not package.samefile(_PACKAGE)
    differs = is_ours and _code(package) != _code(_PACKAGE)
    return {
        "commit": commit,
        "commit_date": int(seconds) * 1000 if seconds.isdecimal() else None,
        "dirty": differs or bool(changes) if changes is not None else None,
    }


def _why_no_commit(folder: Path) -> str | None:
    """Why git names no commit in a repository (git missing, or the folder belongs to somebody else); None outside of
    one."""
    start = folder.absolute()
    # Path.exists raises where it may not look.
    if not any(os.path.lexists(above / ".git") for above in (start, *start.parents)):
        return None
    done = _run_git(folder, "rev-parse", "--is-inside-work-tree")
    if done.returncode == 0:
        return "it has no commit yet" if done.stdout.strip() == "true" else "this is not a working tree"
    words = next(iter(done.stderr.splitlines()), "it gave no reason").removeprefix("fatal: ")
    return None if words.startswith("not a git repository") else words


def _code(package: Path) -> dict[Path, bytes]:
    # Editors leave links that lead nowhere.
    return {path.relative_to(package): path.read_bytes() for path in package.rglob("*.py") if path.is_file()}


def _run_git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs git in English; where git cannot be run or hangs, the result has a failing status and the reason."""
    command = ["git", *words]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"git cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"git gave no answer for {_GIT_SECONDS} s")


def _git(folder: Path, *words: str) -> str | None:
    done = _run_git(folder, *words)
    return done.stdout.strip() if done.returncode == 0 else None


def command_line() -> str:
    words = list(sys.argv)
    if words and words[0].endswith("__main__.py"):
        words[0:1] = ["python", "-m", "fp8bench"]
    elif words:
        words[0] = Path(words[0]).name or "python"
    return shlex.join(words)
