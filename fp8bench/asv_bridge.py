"""Defines the base class of suite files for asv (airspeed velocity). The class measures all cases once, and asv then
reads one metric at a time.

asv starts a process for every metric of every combination of parameters. So that each case is measured only once,
`setup_cache` measures the declared grid of a workload, as `fp8bench suite` would, and the other methods only read the
results. torch and numpy are imported only when something is measured.
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
from fp8bench.plan.corpus import default_corpus_identity
from fp8bench.protocols import SilentObserver
from fp8bench.registry import workloads
from fp8bench.store.series import class_name, make_series
from fp8bench.user_code import import_user_modules

CONFIGURATION_FILE = "asv.conf.json"
# These patterns match options of `asv run` in every spelling that asv's parser accepts: abbreviated, or as one of
# several short options in one word.
_QUICK_OPTION_PATTERN = re.compile(r"--q(u(i(ck?)?)?)?|-[ehknpqv]*q[a-zA-Z]*")
_APPEND_OPTION_PATTERN = re.compile(r"--ap[a-z-]*")
_COMMIT_OPTION_PATTERN = re.compile(r"--set[a-z-]*(?:=(.*))?", re.DOTALL)
_MAX_ANCESTOR_PROCESSES = 4
_ARGUMENTS_BEFORE_ASV = 8  # the word `asv` is among the first 8 words: python -X dev -W error -m asv
# asv's configuration file is JSON5. These patterns match its texts and comments, and the value of results_dir.
_TEXT_OR_COMMENT_PATTERN = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)
_RESULTS_DIR_PATTERN = re.compile(r"""(?:"results_dir"|'results_dir'|\bresults_dir)\s*:\s*(["'])(.*?)\1""")

# The outcome of a cell (a combination of asv's parameters): ("samples", numbers), ("failed", reason) or ("none",
# reason).
CellOutcome = tuple[str, Any]
MeasuredOutcomes = dict[str, dict[Cell, CellOutcome]]
_Result = TypeVar("_Result")


class CaseFailed(Fp8benchError):
    """Raised in a method that asv calls, so that asv shows the case as failed."""


class Suite:
    """The base class of the classes in suite files for asv. asv finds the metrics of a class as its methods
    `track_...`.

    A suite file imports this module and not this class, because asv would take an imported class for a benchmark. asv
    identifies the cached results of a class by the module and line of `setup_cache`. If several classes shared one
    `setup_cache`, all of them would silently get the numbers of the first class. So each class needs its
    own `setup_cache`: one that is defined in its file, or one that `__init_subclass__` makes.
    """

    workload: ClassVar[str]
    imports: ClassVar[tuple[str, ...]] = ()
    params: ClassVar[list[list[Any]]]
    param_names: ClassVar[list[str]]
    version: ClassVar[str]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "setup_cache"):

            def setup_cache(self: Suite) -> MeasuredOutcomes:
                return self.measure()

            # setup_cache measures the whole grid, which may take longer than asv's default timeout.
            vars(setup_cache).update(timeout=3600)
            cls.setup_cache = _give_method_name(setup_cache, cls, "setup_cache")  # type: ignore[attr-defined]
        _check_class(cls)
        import_user_modules(_make_imports_absolute(cls))
        suite_workload = workloads.get(cls.workload)
        metric_series = make_series(suite_workload, default_corpus_identity() if suite_workload.uses_corpus else None)
        cls.params = [list(values) for values in metric_series[0].params]
        cls.param_names = list(metric_series[0].param_names)
        cls.version = metric_series[0].version
        for tracked_series in metric_series:
            setattr(cls, tracked_series.name.rpartition(".")[2], _make_reader(cls, tracked_series))

    def measure(self) -> MeasuredOutcomes:
        """Measures all cases of the workload's grid, stores the run, and returns the results of all runs of the
        commit.
        """
        # Import this late, because it is slow and the many processes that only read results do not need it.
        from fp8bench.jobs.asv import measure_for_asv

        project_folder, asv_arguments = find_project(_find_suite_file(type(self))), read_asv_arguments()
        quick, appends_samples, commit = parse_asv_options(asv_arguments)
        if appends_samples:
            raise UsageError("the runs of a commit are always combined. Leave --append-samples out.")
        grid = workloads.get(self.workload).history
        ranks = min(grid.ranks, default=1) if grid is not None else 1
        imports = _make_imports_absolute(type(self))
        request = Request(self.workload, quick=quick, imports=imports, grid=True, ranks=ranks if ranks > 1 else None)
        return measure_for_asv(request, find_store(project_folder), project_folder, SilentObserver(), commit)


def find_project(file: Path) -> Path:
    """Returns the folder of asv.conf.json above a suite file. The search does not begin in the working directory,
    because asv runs benchmarks in a temporary folder.
    """
    parent_folders = file.absolute().parents
    return next(
        (folder for folder in parent_folders if (folder / CONFIGURATION_FILE).is_file()),
        parent_folders[min(1, len(parent_folders) - 1)],
    )


def find_store(project_folder: Path) -> Path:
    """Returns the store that contains asv's results_dir (<store>/asv/results). Returns the default store if none
    does.
    """
    path = project_folder / _read_results_dir(project_folder / CONFIGURATION_FILE)
    return path.parent.parent if path.parts[-2:] == ("asv", "results") else project_folder / DEFAULT_STORE


def _read_results_dir(configuration: Path) -> str:
    try:
        text = read_file(configuration).decode()
    except (OSError, ValueError):
        return ""
    match = _RESULTS_DIR_PATTERN.search(
        _TEXT_OR_COMMENT_PATTERN.sub(lambda text_or_comment: text_or_comment[1] or " ", text)
    )
    return match[2] if match else ""


def read_asv_arguments() -> tuple[str, ...]:
    """Returns the command line of asv, which is an ancestor of this process. It is read from the system, because asv
    does not pass its options to `setup_cache`.
    """
    pid = os.getppid()
    for _ in range(_MAX_ANCESTOR_PROCESSES):
        arguments, pid = _read_process(pid)
        if any(Path(argument).name == "asv" for argument in arguments[:_ARGUMENTS_BEFORE_ASV]):
            return tuple(arguments)
    return ()


def parse_asv_options(arguments: Sequence[str]) -> tuple[bool, bool, str]:
    """Returns whether asv was called with --quick, whether with --append-samples, and the commit under which it saves
    results ('' if none was given).
    """
    quick, appends_samples = (
        any(map(option.fullmatch, arguments)) for option in (_QUICK_OPTION_PATTERN, _APPEND_OPTION_PATTERN)
    )
    for index, argument in enumerate(arguments):
        match = _COMMIT_OPTION_PATTERN.fullmatch(argument)
        if match is not None:
            return (
                quick,
                appends_samples,
                match[1] if match[1] is not None else "".join(arguments[index + 1 : index + 2]),
            )
    return quick, appends_samples, ""


def _read_process(pid: int) -> tuple[list[str], int]:
    """Returns the command line of a process and the id of its parent process. Returns ([], 0) if the system does not
    report them.
    """
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        # The second field is the program's name in parentheses, which may itself contain blanks and parentheses.
        parent_pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return [], 0
    return arguments, parent_pid


def _check_class(cls: type[Suite]) -> None:
    # asv's names of benchmarks do not contain the first part of the module's name.
    module, name = cls.__module__.partition(".")[2] or cls.__module__, cls.__name__
    workload = getattr(cls, "workload", None)
    if not isinstance(workload, str):
        raise UsageError(f"the suite class {name} names no workload. Write workload = 'NAME' in it.")
    expected_class_name = class_name(workload)
    if (module, name) != (workload, expected_class_name):
        raise UsageError(
            f"the suite class {module}.{name} is of workload {workload!r}: its runs are stored under the name "
            f"{workload}.{expected_class_name}. Call the file {workload}.py and the class {expected_class_name}."
        )
    if getattr(vars(cls).get("setup_cache"), "__module__", None) != cls.__module__:
        raise UsageError(
            f"the suite class {module}.{name} does not define setup_cache in its own file, so asv would give it "
            "the numbers of a different class. Leave it out, or write `def setup_cache(self): return self.measure()`."
        )


def _make_imports_absolute(cls: type[Suite]) -> tuple[str, ...]:
    """Returns the `imports` of a suite class, with absolute paths for files."""
    project_folder = find_project(_find_suite_file(cls))
    return tuple(str(project_folder / name) if name.endswith(".py") else name for name in cls.imports)


def _find_suite_file(cls: type) -> Path:
    return Path(str(sys.modules[cls.__module__].__file__))


def _give_method_name(method: Callable[..., _Result], cls: type, name: str) -> Callable[..., _Result]:
    """Returns the function, after giving it the name of a method of the class: asv finds methods by their `__name__`
    and `__qualname__`.
    """
    method.__name__, method.__qualname__, method.__module__ = name, f"{cls.__qualname__}.{name}", cls.__module__
    return method


def _make_reader(cls: type, series: Series) -> Callable[..., Any]:
    """Returns a method that returns the samples of one metric from the measured results."""

    def track(self: Suite, measured: Mapping[str, Mapping[Cell, CellOutcome]], *cell: Any) -> Any:
        kind, outcome_content = measured[series.name].get(cell, ("none", "not on this machine"))
        if kind == "failed":
            raise CaseFailed(str(outcome_content))
        if kind == "samples" and not all(map(math.isfinite, outcome_content)):
            raise CaseFailed(f"{series.metric} is not a finite number")
        return {"samples": outcome_content, "number": 1} if kind == "samples" else math.nan

    vars(track).update(unit=series.unit)
    return _give_method_name(track, cls, series.name.rpartition(".")[2])
