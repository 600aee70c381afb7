"""The base class of asv's suite files: a grid is measured once, and asv reads it metric by metric.

asv starts a process for every metric of every combination. To measure cases only once, `setup_cache` measures a
workload's declared grid, as `fp8bench suite` would; the methods only read. torch and numpy are imported only when
something is measured.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.files import read_file
from fp8bench.model import Cell, Request, Series
from fp8bench.plan.corpus import default_identity
from fp8bench.protocols import SilentObserver
from fp8bench.registry import workloads
from fp8bench.store.series import class_name, series_of
from fp8bench.user_code import import_user_modules

CONFIGURATION = "asv.conf.json"
# Options of `asv run` in every spelling that its parser accepts: abbreviated, and short ones combined.
_QUICK = re.compile(r"--q(u(i(ck?)?)?)?|-[ehknpqv]*q[a-zA-Z]*")
_APPEND = re.compile(r"--ap[a-z-]*")
_COMMIT = re.compile(r"--set[a-z-]*(?:=(.*))?", re.DOTALL)
_ANCESTORS = 4
_WORDS_BEFORE_ASV = 8  # python -X dev -W error -m asv
# asv's configuration is JSON5: this matches texts and comments in it, and the needed value.
_TEXT_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)
_RESULTS_DIR = re.compile(r"""(?:"results_dir"|'results_dir'|\bresults_dir)\s*:\s*(["'])(.*?)\1""")

# The outcome of a cell: ("samples", numbers), ("failed", reason) or ("none", reason).
Outcome = tuple[str, Any]
Measured = dict[str, dict[Cell, Outcome]]
_T = TypeVar("_T")


class CaseFailed(Fp8benchError):
    """A case failed; raised so that asv shows it as failed."""


class Suite:
    """Base class of suite files' classes. asv finds its metrics as methods `track_...`.

    A suite file imports this module instead of the class, which asv would take for a benchmark. Each class needs a
    `setup_cache` defined in its file (it gets one if it has none): asv identifies caches by module and line, and
    classes that share one would all silently get the numbers of the first.
    """

    workload: ClassVar[str]
    imports: ClassVar[tuple[str, ...]] = ()
    params: ClassVar[list[list[Any]]]
    param_names: ClassVar[list[str]]
    version: ClassVar[str]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "setup_cache"):

            def setup_cache(self: Suite) -> Measured:
                return self.measure()

            vars(setup_cache).update(timeout=3600)
            cls.setup_cache = _belonging(setup_cache, cls, "setup_cache")  # type: ignore[attr-defined]
        _check_class(cls)
        import_user_modules(_from_root(cls))
        leaf = workloads.get(cls.workload)
        series = series_of(leaf, default_identity() if leaf.uses_corpus else None)
        cls.params = [list(values) for values in series[0].params]
        cls.param_names = list(series[0].param_names)
        cls.version = series[0].version
        for followed in series:
            setattr(cls, followed.name.rpartition(".")[2], _reader(cls, followed))

    def measure(self) -> Measured:
        """Measures the grid, stores the run, and returns this commit's results so far."""
        # Heavy, and not needed by the many processes that only read.
        from fp8bench.jobs.asv import measured_by_asv

        root, words = root_of(_file(type(self))), words_of_asv()
        quick, appending, commit = options_of(words)
        if appending:
            raise UsageError("the runs of a commit are combined anyway. Leave --append-samples out.")
        grid = workloads.get(self.workload).history
        ranks = min(grid.ranks, default=1) if grid is not None else 1
        imports = _from_root(type(self))
        request = Request(self.workload, quick=quick, imports=imports, grid=True, ranks=ranks if ranks > 1 else None)
        return measured_by_asv(request, store_of_project(root), root, SilentObserver(), commit)


def root_of(file: Path) -> Path:
    """Returns the project of a suite file: the folder of its asv.conf.json. asv runs benchmarks in a temporary
    directory."""
    above = file.absolute().parents
    return next((folder for folder in above if (folder / CONFIGURATION).is_file()), above[min(1, len(above) - 1)])


def store_of_project(root: Path) -> Path:
    """Returns the store that asv's results_dir (<store>/asv/results) belongs to; else the default one."""
    path = root / _results_dir(root / CONFIGURATION)
    return path.parent.parent if path.parts[-2:] == ("asv", "results") else root / DEFAULT_STORE


def _results_dir(configuration: Path) -> str:
    try:
        text = read_file(configuration).decode()
    except (OSError, ValueError):
        return ""
    match = _RESULTS_DIR.search(_TEXT_OR_COMMENT.sub(lambda text_or_comment: text_or_comment[1] or " ", text))
    return match[2] if match else ""


def words_of_asv() -> tuple[str, ...]:
    """Returns the command line of the asv that started this process: asv does not pass its options to caches."""
    pid = os.getppid()
    for _ in range(_ANCESTORS):
        words, pid = _process(pid)
        if any(Path(word).name == "asv" for word in words[:_WORDS_BEFORE_ASV]):
            return tuple(words)
    return ()


def options_of(words: Sequence[str]) -> tuple[bool, bool, str]:
    """Returns whether asv got --quick and --append-samples, and the commit under which it saves results ('' for
    none)."""
    quick, append = (any(map(option.fullmatch, words)) for option in (_QUICK, _APPEND))
    for place, word in enumerate(words):
        match = _COMMIT.fullmatch(word)
        if match is not None:
            return quick, append, match[1] if match[1] is not None else "".join(words[place + 1 : place + 2])
    return quick, append, ""


def _process(pid: int) -> tuple[list[str], int]:
    """Returns a process's command line and its parent's id; ([], 0) if the system does not report them."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return [], 0
    return words, parent


def _check_class(cls: type[Suite]) -> None:
    # asv leaves out the first folder's name.
    module, name = cls.__module__.partition(".")[2] or cls.__module__, cls.__name__
    workload = getattr(cls, "workload", None)
    if not isinstance(workload, str):
        raise UsageError(f"the suite class {name} names no workload. Write workload = 'NAME' in it.")
    if (module, name) != (workload, class_name(workload)):
        raise UsageError(
            f"the suite class {module}.{name} is of workload {workload!r}: its runs are kept under the name "
            f"{workload}.{class_name(workload)}. Call the file {workload}.py and the class {class_name(workload)}."
        )
    if getattr(vars(cls).get("setup_cache"), "__module__", None) != cls.__module__:
        raise UsageError(
            f"the suite class {module}.{name} has no setup_cache of its own, in its own file, and asv would give it "
            "another one's numbers. Leave it out, or write `def setup_cache(self): return self.measure()`."
        )


def _from_root(cls: type[Suite]) -> tuple[str, ...]:
    """The suite's `imports`; files are named from the project's root."""
    root = root_of(_file(cls))
    return tuple(str(root / name) if name.endswith(".py") else name for name in cls.imports)


def _file(cls: type) -> Path:
    return Path(str(sys.modules[cls.__module__].__file__))


def _belonging(method: Callable[..., _T], cls: type, name: str) -> Callable[..., _T]:
    """Names the function as a method of the class, which is how asv finds it."""
    method.__name__, method.__qualname__, method.__module__ = name, f"{cls.__qualname__}.{name}", cls.__module__
    return method


def _reader(cls: type, series: Series) -> Callable[..., Any]:
    """Returns a method that reads one metric from the measured results."""

    def track(self: Suite, measured: Mapping[str, Mapping[Cell, Outcome]], *cell: Any) -> Any:
        kind, content = measured[series.name].get(cell, ("none", "not on this machine"))
        if kind == "failed":
            raise CaseFailed(str(content))
        if kind == "samples" and not all(map(math.isfinite, content)):
            raise CaseFailed(f"{series.metric} is not a finite number")
        return {"samples": content, "number": 1} if kind == "samples" else math.nan

    vars(track).update(unit=series.unit)
    return _belonging(track, cls, series.name.rpartition(".")[2])
