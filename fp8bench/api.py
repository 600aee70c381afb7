"""The same as the command line, from Python and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fp8bench.argument_types import MOST_BYTES, MOST_SECONDS
from fp8bench.arguments import DEFAULT_STORE, MOST_BATCHES, MOST_THREADS
from fp8bench.environment import command_line
from fp8bench.errors import UsageError
from fp8bench.exporting.tensorboard import check as check_tensorboard
from fp8bench.exporting.tensorboard import write as write_tensorboard
from fp8bench.frames import RunFrames
from fp8bench.history.runs import find_run, load_named, store_of
from fp8bench.index.opening import keep_figures
from fp8bench.model import Finding, Request, Run
from fp8bench.pipeline import execute
from fp8bench.pipeline import findings as findings_of
from fp8bench.pipeline import resume as go_on
from fp8bench.plan import files_of
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.report.text import render
from fp8bench.units import bytes_of
from fp8bench.view import update_view


def run(
    suite: str,
    *,
    dtypes: Iterable[str] = (),
    devices: Iterable[str] = (),
    reference: str | None = None,
    set: Mapping[str, object] | None = None,
    precision_map: Mapping[str, str] | None = None,
    data: str | Path | None = None,
    quick: bool = False,
    budget: float | None = None,
    rounds: int | None = None,
    seed: int = 0,
    threads: int = 1,
    imports: Iterable[str] = (),
    isolation: bool = True,
    case_timeout: float | None = None,
    grid: bool = False,
    trace: str | Path | None = None,
    static_scales: int | None = None,
    refresh_scales: int | None = None,
    saturation_bound: float | None = None,
    energy: bool = True,
    max_batch: bool = False,
    memory_limit: int | str | None = None,
    tensorboard: str | Path | None = None,
    store: str | Path = DEFAULT_STORE,
    observer: Observer | None = None,
) -> Run:
    """Plan, measure and keep a suite; returns the Run.

    Arguments are the command line's options. `set` maps an axis to a value or a list of values. With
    `isolation=False` everything runs in this process, so that workloads defined in a notebook can be measured; then
    a crash cannot be survived. Raises Fp8benchError with a sentence for what cannot be done; failed cases are records.
    """
    _check_kinds(
        suite=(suite, str), reference=(reference, str | None), set=(set, Mapping | None),
        precision_map=(precision_map, Mapping | None), data=(data, str | Path | None), quick=(quick, bool),
        isolation=(isolation, bool), grid=(grid, bool), energy=(energy, bool), max_batch=(max_batch, bool),
    )  # fmt: skip
    request = Request(
        suite=suite, dtypes=_names("dtypes", dtypes), devices=_names("devices", devices), reference=reference,
        axes=tuple((name, _values(name, value)) for name, value in (set or {}).items()),
        precision_map=tuple((precision_map or {}).items()), data=None if data is None else str(data), quick=quick,
        budget=_seconds("budget", budget), rounds=None if rounds is None else _whole("rounds", rounds, 1),
        seed=_whole("seed", seed, 0), threads=_whole("threads", threads, 1, MOST_THREADS),
        imports=(*_names("imports", imports), *files_of(suite)), isolation=isolation,
        case_timeout=_seconds("case_timeout", case_timeout), grid=grid,
        trace=None if trace is None else str(_folder("trace", trace)),
        static_scales=None if static_scales is None else _whole("static_scales", static_scales, 1, MOST_BATCHES),
        refresh_scales=None if refresh_scales is None else _whole("refresh_scales", refresh_scales, 1),
        saturation_bound=_percent("saturation_bound", saturation_bound), energy=energy, max_batch=max_batch,
        memory_limit=_bytes("memory_limit", memory_limit),
    )  # fmt: skip
    board = _board(tensorboard)
    done = execute(request, _store(store), observer or SilentObserver(), command_line())
    _tell_history(done, _store(store))
    if board is not None:
        write_tensorboard(done, findings_of(done), board)
    return done


def resume(run: str | Path | Run, *, store: str | Path = DEFAULT_STORE, observer: Observer | None = None) -> Run:
    """Go on with a run that was cut off: only what it lacks is measured; a run that lacks nothing is returned.

    What to measure, and how, is taken from the run. Raises Fp8benchError where its second half would not be measured
    as its first one was.
    """
    if isinstance(run, Run) and not run.path:
        raise UsageError(f"the run {run.id} was not stored. Give a stored run, its id, its file, or 'last'.")
    path = Path(run.path) if isinstance(run, Run) else find_run(str(run), _store(store))
    resumed, done = go_on(path, _store(store), observer or SilentObserver(), command_line())
    if resumed:
        _tell_history(done, store_of(path) or _store(store))
    return done


def _tell_history(run: Run, store: Path) -> None:
    update_view(run, store)
    keep_figures(store, Path(run.path))


def _check_kinds(**given: tuple[object, object]) -> None:
    for name, (value, kind) in given.items():
        pairs = value.items() if isinstance(value, Mapping) else ()
        plain = all(isinstance(key, str) and (name == "set" or isinstance(item, str)) for key, item in pairs)
        if not plain or not isinstance(value, kind):  # type: ignore[arg-type]
            raise UsageError(f"{name} cannot be {value!r:.80}: {_WANTED[name]}.")


_WANTED = {
    "suite": "give a suite's name, several with commas, 'all', or a .py file",
    "reference": "give a dtype's name",
    "set": "give a mapping of axes to values, like {'shape': [64, 128]}",
    "precision_map": "give a mapping of layers, or kinds of them, to dtypes, like {'mlp': 'fp8'}",
    "data": "give the path of a text",
    "quick": "give True or False",
    "isolation": "give True or False",
    "grid": "give True or False",
    "energy": "give True or False",
    "max_batch": "give True or False",
}


def _whole(name: str, value: object, low: int, high: int = (1 << 31) - 1) -> int:
    """A whole number, as the command line's parser would have it; True is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        most = f" to {high}" if high in (MOST_THREADS, MOST_BATCHES, MOST_BYTES) else ""
        raise UsageError(f"{name} must be a whole number from {low}{most}, got {value!r:.80}.")
    return value


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MOST_SECONDS:
        raise UsageError(f"{name} must be a number of seconds above 0, got {value!r:.80}.")
    return float(value)


def _percent(name: str, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 100:
        raise UsageError(f"{name} must be a percentage from 0 to below 100, got {value!r:.80}.")
    return float(value)


def _bytes(name: str, value: object) -> int | None:
    """Bytes, or a size in words."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = bytes_of(value)
        except ValueError as error:
            raise UsageError(f"{name}: {error}, got {value!r:.80}.") from None
    return _whole(name, value, 1, MOST_BYTES)


def _store(given: object) -> Path:
    return _folder("store", given)


def _folder(name: str, given: object) -> Path:
    if not isinstance(given, str | Path) or not str(given):
        raise UsageError(f"{name} cannot be {given!r:.80}: give a folder.")
    return Path(given)


def _board(given: object) -> Path | None:
    """The folder for TensorBoard, None where none was asked for; raises where nothing can be written there."""
    if given is None:
        return None
    folder = _folder("tensorboard", given)
    check_tensorboard(folder)
    return folder


def _names(option: str, given: object) -> tuple[str, ...]:
    """Names from a list, or from a text with commas as on the command line."""
    if isinstance(given, str):
        return tuple(word.strip() for word in given.split(","))
    found = tuple(given) if isinstance(given, Iterable) else (None,)
    names = tuple(name for name in found if isinstance(name, str))
    if len(names) != len(found):
        raise UsageError(f"{option} cannot be {given!r:.80}: give a list of names, or leave it out.")
    return names


def _values(axis: str, given: object) -> tuple[str, ...]:
    texts = _texts(given)
    if not texts:
        raise UsageError(f"axis {axis!r} was given no values. Give at least one, or leave it out of `set`.")
    return texts


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (str(value),)
    return tuple(str(one) for one in value)


def load(run: str | Path | Run, store: str | Path = DEFAULT_STORE) -> RunFrames:
    """A run and its tables as pandas frames: a Run at hand, or a stored one by id, file stem, path, or 'last'.

    `.run` is the Run; `.results`, `.samples` and `.statistics` are made when they are first asked for.
    """
    return RunFrames(run if isinstance(run, Run) else load_named(str(run), _store(store)))


def findings(run: Run) -> dict[str, Finding]:
    """Verdicts, ratios, best-case times and labels by case id, from the run's raw samples."""
    return findings_of(run)


def table(run: Run, width: int = 100) -> str:
    """The run as the table the command line prints."""
    return render(run, findings_of(run), width)
