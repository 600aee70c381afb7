"""Options, tables, processes and alternating timings that the programs of this folder share."""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fp8bench

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = Path(fp8bench.__file__).resolve().parents[1]
FP8BENCH = (sys.executable, "-m", "fp8bench")
Row = dict[str, Any]


def options(description: str | None, **choices: tuple[Any, str]) -> argparse.Namespace:
    """Parses command-line options, each given as (default, help). A default of False makes a switch, and a type makes
    an option without a default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, words) in choices.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=words)
        elif isinstance(default, type):
            parser.add_argument(f"--{name}", type=default, help=words)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{words}; default {default}")
    return parser.parse_args()


def say(words: str) -> None:
    """Prints a line without buffering, because a trial takes long."""
    print(words, flush=True)


def write_document(document: Mapping[str, Any], path: Path | None = None, prints: bool = True) -> None:
    """Prints a document as JSON and, with `path`, writes it to a file."""
    text = json.dumps(document, indent=1)
    if path:
        path.write_text(text + "\n")
    if prints:
        say(text)


class Table:
    """Prints rows of figures as soon as they are computed. Floats are shares, and printed in percent."""

    def __init__(self, title: str, *heads: str, name: int = 14) -> None:
        self._name, self._widths = name, [max(len(head), 7) + 2 for head in heads]
        say(title)
        self.row("", *heads)

    def row(self, name: str, *cells: object) -> None:
        shown = (f"{100 * cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        columns = (f"{cell:>{width}}" for cell, width in zip(shown, self._widths, strict=True))
        say(f"{name:<{self._name}}{''.join(columns)}")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns an environment in which processes import this fp8bench and the programs of this folder.

    asv replaces PYTHONPATH by ASV_PYTHONPATH in its processes, so both are set.
    """
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"), str(ROOT))))
    return {**os.environ, "PYTHONPATH": path, "ASV_PYTHONPATH": path, **(more or {})}


def run_command(
    words: Sequence[str], folder: Path | None = None, ends: Sequence[int] = (0,), more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns its result. Raises RuntimeError if its exit code is not in `ends`."""
    done = subprocess.run(words, cwd=folder, env=environment(more), capture_output=True, text=True, check=False)
    if done.returncode not in ends:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
    return done


def cpu_seconds(words: Sequence[str], folder: Path, ends: Sequence[int] = (0,)) -> float:
    """Returns the CPU time of a command."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_command(words, folder, ends)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def conditions() -> Row:
    """Returns the versions, the machine and the load under which a result was made."""
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "fp8bench": fp8bench.__version__,
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fp8bench-") as folder:
        yield Path(folder)


def seconds(call: Callable[[], object]) -> float:
    """Returns the CPU time of a call in this thread, which other processes on the machine hardly affect."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def least_seconds(turns: int, *calls: Callable[[], object]) -> list[float]:
    """Calls all functions in turns, and returns the shortest time of each. The first turn does not count."""
    times = [[seconds(call) for call in calls] for _ in range(turns + 1)]
    return [min(column) for column in zip(*times[1:], strict=True)]
