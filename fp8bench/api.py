"""fp8bench's commands as Python calls, for scripts and notebooks."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fp8bench import model
from fp8bench.analysis.findings import findings as findings_of
from fp8bench.cli.calls import request_fields, takes_options_of
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.option_types import folder, names, pairs
from fp8bench.cli.option_types import sessions as parse_sessions
from fp8bench.cli.outputs import CommandResult, in_store, log_targets
from fp8bench.cli.progress import SILENT, TERMINAL
from fp8bench.errors import UsageError
from fp8bench.jobs.after_run import Wanted, after_run
from fp8bench.jobs.kinds import kinds
from fp8bench.jobs.profile import function_named, profile_axes, profile_dtypes, profile_live
from fp8bench.jobs.profile import profile as profile_maker
from fp8bench.jobs.report_files import Pages, place_of_report
from fp8bench.jobs.several_runs import execute_sessions
from fp8bench.measure.environment import command_line
from fp8bench.model import Request
from fp8bench.pipeline import execute
from fp8bench.pipeline import resume as go_on
from fp8bench.plan.asked_suites import files_of
from fp8bench.protocols import Observer
from fp8bench.report.data.plain import results_frame
from fp8bench.report.data.run import run_rows
from fp8bench.report.elements import Page
from fp8bench.report.notebook import Findings, as_html
from fp8bench.report.panels import panels_of
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.run import page_of, render
from fp8bench.report.topics.answers import VERDICT_COLUMNS, verdict_rows
from fp8bench.store.runs.listing import find_run, load_stored_run

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from fp8bench.features.train.values import KeptTraining
    from fp8bench.report.data.loggers import LogTarget


_WIDTH = 100


class Run(model.Run):
    """A run as calls return it: the stored value, with a display for notebooks."""

    def __str__(self) -> str:
        return layout.render(replace(self._page, footer=()), _WIDTH).rstrip("\n")

    def _repr_html_(self) -> str:
        return as_html(self._page, place_of_report(self))

    @property
    def _page(self) -> Page:
        return page_of(self, findings_of(self), _WIDTH, place_of_report(self), in_store(self))

    @cached_property
    def results(self) -> pd.DataFrame:
        """The rows of --csv as a pandas frame."""
        return results_frame(run_rows([(self, findings_of(self))]))

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        """The terminal's answer as a pandas frame: a row for each case except references."""
        import pandas as pd

        rows = verdict_rows(panels_of(self, findings_of(self)))
        return pd.DataFrame(list(rows), columns=list(VERDICT_COLUMNS))


@takes_options_of(Request, without=("known_scales",))
def run(
    suite: str,
    *,
    sessions: int | str = 1,
    report: bool = True,
    log: str | Iterable[str] = (),
    store: str | Path = DEFAULT_STORE,
    progress: bool = True,
    observer: Observer | None = None,
    **options: Any,
) -> Run:
    """Plans, measures and stores a suite; returns the Run.

    `run.verdicts` is the terminal's answer as a pandas frame, a row for each case except references: its verdict,
    speed-up with interval, error, memory, energy and the reason. `run.results` are the rows of --csv as a frame, and
    `fp8bench.table(run)` is the table that the terminal prints. Raises Fp8benchError with an explanation if something
    is impossible; failed cases are records. With `isolation=False` workloads that a notebook defines can be measured,
    and a crash ends this process.
    """
    # 1. Options are checked as the command line's are, before a worker starts.
    request = Request(suite, **request_fields(Request, options))
    request = replace(request, imports=(*request.imports, *files_of(suite)))
    try:
        count, pause = parse_sessions(str(sessions))
    except ArgumentTypeError as error:
        raise UsageError(f"sessions: {error}.") from None
    # 2. Several sessions are runs of their own, from which one answer comes.
    several = partial(execute_sessions, request, sessions=count, apart=pause)
    several = several if count > 1 else partial(execute, request)
    return _measure_run(several, store, observer, progress, report, log)


suite = run


def _measure_run(
    measure: Callable[[Path, Observer, str], model.Run],
    store: str | Path,
    observer: Observer | None,
    progress: bool,
    report: bool,
    log: str | Iterable[str],
) -> Run:
    targets = log_targets(log)
    folder_of_runs = folder("store", store)
    with _observe(observer, progress) as observing:
        done = measure(folder_of_runs, observing, command_line())
    _follow_up(done, folder_of_runs, progress and observer is None, report, targets)
    return _to_frame_run(done)


def _observe(observer: Observer | None, progress: bool) -> AbstractContextManager[Observer]:
    if observer is not None:
        return nullcontext(observer)
    return (TERMINAL if progress else SILENT).measuring()


def _follow_up(done: model.Run, store: Path, announces: bool, report: bool, log: Sequence[LogTarget] = ()) -> None:
    """Does what follows a run on the command line, too. A run that was not kept has no report."""
    outputs = Wanted(Pages() if report and done.path else None, log)
    after_run(done, store, outputs, TERMINAL.note if announces else SILENT.note)


# Fields of a request that profile does not take, or takes under another name.
_NOT_OF_A_PROFILE = {
    "suite",
    "dtypes",
    "reference",
    "set",
    "precision_map",
    "data",
    "isolation",
    "grid",
    "static_scales",
    "scales_from",
    "known_scales",
    "refresh_scales",
    "saturation_bound",
    "memory_limit",
}


@takes_options_of(Request, without=_NOT_OF_A_PROFILE)
def profile(
    model: str | torch.nn.Module,
    batch: object = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    dtypes: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
    precision_map: Mapping[str, str] | None = None,
    forward: bool = False,
    optimizer: str = "adamw",
    compile: bool = False,
    reference: str | None = None,
    isolation: bool = True,
    report: bool = True,
    log: str | Iterable[str] = (),
    store: str | Path = DEFAULT_STORE,
    progress: bool = True,
    observer: Observer | None = None,
    **how: Any,
) -> Run:
    """Measures an unchanged model next to copies whose products are in other precisions; returns the Run.

    The model is not modified: copies are measured, in other processes if it can be sent there.
    `run.verdicts` and `run.results` are pandas frames, as for `fp8bench.run`.

    model: 'module:function' as for `fp8bench profile`, or a live model
    batch: what the forward of a live model takes
    loss: a function of a live model's output, if its forward returns no loss
    """
    # A live model is pickled into the worker; a maker's name is imported there.
    live = not isinstance(model, str)
    if live == (batch is None) or (loss is not None and not live):
        raise UsageError("profile takes 'module:function' alone, or a model with a batch, and a loss if it needs one.")
    target = type(model).__name__ if live else function_named(str(model))
    request = Request(
        **profile_dtypes(names(dtypes), reference),
        **request_fields(Request, how),
        axes=profile_axes(target, forward, optimizer, compile, names(skip)),
        precision_map=pairs(precision_map),
        isolation=isolation,
    )
    parts = (model, batch) if loss is None else (model, batch, loss)
    measure = partial(profile_live, parts, request) if live else partial(profile_maker, request)
    return _measure_run(measure, store, observer, progress, report, log)


def resume(
    run: str | Path | model.Run,
    *,
    report: bool = True,
    store: str | Path = DEFAULT_STORE,
    progress: bool = True,
    observer: Observer | None = None,
) -> Run:
    """Resumes a run that was interrupted; returns a complete run unchanged.

    The run says what to measure, and how. Raises Fp8benchError if the rest would be measured under different
    conditions.

    run: the run, its id, a file's stem, a path, or 'last'
    """
    if isinstance(run, model.Run) and not run.path:
        raise UsageError(f"the run {run.id} was not stored. Give a stored run, its id, its file, or 'last'.")
    folder_of_runs = folder("store", store)
    path = Path(run.path) if isinstance(run, model.Run) else find_run(str(run), folder_of_runs)
    with _observe(observer, progress) as observing:
        resumed, done = go_on(path, folder_of_runs, observing, command_line())
    if resumed:
        _follow_up(done, folder_of_runs, progress and observer is None, report)
    return _to_frame_run(done)


def _to_frame_run(run: model.Run) -> Run:
    return run if isinstance(run, Run) else Run(**{field.name: getattr(run, field.name) for field in fields(run)})


def load(run: str | Path | model.Run, store: str | Path = DEFAULT_STORE) -> Run:
    """Returns a stored run; its `.results` are the rows of --csv, its `.verdicts` those of the terminal's answer."""
    return _to_frame_run(run if isinstance(run, model.Run) else load_stored_run(str(run), folder("store", store)))


def findings(run: model.Run) -> Findings:
    """Verdicts, ratios, best-case times and labels, computed from the run's raw samples.

    Keys are short names of cases ('bf16 shape=64'); a case's id works as well.

    run: the Run that a call returned
    """
    return Findings(findings_of(run))


def table(run: model.Run | KeptTraining | CommandResult, width: int = 100) -> str:
    """Returns a run, or another kept thing or result, as the table that the command line prints.

    run: what a call returned
    width: the most letters in a line
    """
    if isinstance(run, CommandResult):
        return layout.render(run.page(), width)
    for kind in kinds():
        if isinstance(run, kind.holds):
            return layout.render(kind.view(run).page(), width)
    return render(cast(model.Run, run), findings_of(cast(model.Run, run)), width)
