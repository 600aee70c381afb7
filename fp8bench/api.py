"""The same as the command line, from Python and notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from fp8bench.arguments import DEFAULT_STORE
from fp8bench.environment import command_line
from fp8bench.errors import UsageError
from fp8bench.frames import RunFrames
from fp8bench.history.runs import find_run, load_run
from fp8bench.model import Finding, Request, Run
from fp8bench.pipeline import execute
from fp8bench.pipeline import findings as findings_of
from fp8bench.plan import files_of
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.report.text import render


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
    store: str | Path = DEFAULT_STORE,
    observer: Observer | None = None,
) -> Run:
    """Plan, measure and keep a suite; returns the Run.

    Arguments are the command line's options. `set` maps an axis to a value or a list of values. With
    `isolation=False` everything runs in this process, so that workloads defined in a notebook can be measured; then
    a crash cannot be survived. Raises Fp8benchError with a sentence for what cannot be done; cases that fail are
    records with a reason.
    """
    request = Request(
        suite=suite,
        dtypes=_names(dtypes),
        devices=_names(devices),
        reference=reference,
        axes=tuple((name, _texts(value)) for name, value in (set or {}).items()),
        precision_map=tuple((precision_map or {}).items()),
        data=None if data is None else str(data),
        quick=quick,
        budget=budget,
        rounds=rounds,
        seed=seed,
        threads=threads,
        imports=(*_names(imports), *files_of(suite)),
        isolation=isolation,
    )
    _check(request)
    return execute(request, Path(store), observer or SilentObserver(), command_line())


def _check(request: Request) -> None:
    """What the command line's parser refuses is refused here too."""
    numbers: tuple[tuple[str, object, int], ...] = (
        ("rounds", request.rounds, 1),
        ("seed", request.seed, 0),
        ("threads", request.threads, 1),
    )
    for name, value, low in numbers:
        if value is not None and not (isinstance(value, int) and low <= value < 1 << 31):
            raise UsageError(f"{name} must be a whole number from {low}, got {value!r}.")
    if request.budget is not None and not 0 < request.budget < math.inf:
        raise UsageError(f"budget must be a number of seconds above 0, got {request.budget!r}.")
    for name, values in request.axes:
        if not values:
            raise UsageError(f"axis {name!r} was given no values. Give at least one, or leave it out of `set`.")


def _names(given: Iterable[str]) -> tuple[str, ...]:
    """Names from a list, or from a text with commas as on the command line."""
    return tuple(word.strip() for word in given.split(",")) if isinstance(given, str) else tuple(given)


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (str(value),)
    return tuple(str(one) for one in value)


def load(run: str | Path | Run, store: str | Path = DEFAULT_STORE) -> RunFrames:
    """A run and its tables as pandas frames: a Run at hand, or a stored one by id, file stem, path, or 'last'.

    `.run` is the Run; `.results`, `.samples` and `.statistics` are made when they are first asked for.
    """
    return RunFrames(run if isinstance(run, Run) else load_run(find_run(str(run), Path(store))))


def findings(run: Run) -> dict[str, Finding]:
    """Verdicts, ratios, best-case times and labels by case id, from the run's raw samples."""
    return findings_of(run)


def table(run: Run, width: int = 100) -> str:
    """The run as the table the command line prints."""
    return render(run, findings_of(run), width)
