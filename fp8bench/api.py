"""Defines Python calls for the commands that measure and read runs, for scripts and notebooks."""

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
from fp8bench.cli.calls import accept_request_fields, request_fields
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.option_types import as_name_value_pairs, parse_folder_option, parse_sessions, split_names
from fp8bench.cli.outputs import CommandResult, format_store_option, parse_log_argument
from fp8bench.cli.progress import SILENT, TERMINAL_JOB_OBSERVER
from fp8bench.errors import UsageError
from fp8bench.jobs.after_run import RequestedOutputs, after_run
from fp8bench.jobs.kinds import kinds
from fp8bench.jobs.profile import check_function_name, make_profile_axes, profile_dtypes, profile_live_model
from fp8bench.jobs.profile import profile as profile_maker
from fp8bench.jobs.report_files import ReportDestinations, find_report_page
from fp8bench.jobs.several_runs import execute_sessions
from fp8bench.measure.environment import command_line
from fp8bench.model import Request
from fp8bench.pipeline import execute
from fp8bench.pipeline import resume as resume_run
from fp8bench.plan.asked_suites import suite_files
from fp8bench.protocols import Observer
from fp8bench.report.data.plain import results_frame
from fp8bench.report.data.run import run_rows
from fp8bench.report.elements import Page
from fp8bench.report.notebook import Findings, page_as_html
from fp8bench.report.panels import group_into_panels
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.run import answer_page, render
from fp8bench.report.topics.answers import VERDICT_COLUMNS, verdict_rows
from fp8bench.store.runs.listing import find_run, load_stored_run

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from fp8bench.features.train.values import StoredTraining
    from fp8bench.report.data.loggers import LogTarget


_DISPLAY_WIDTH = 100


class Run(model.Run):
    """A run as the Python calls return it, with pandas frames and a display for notebooks."""

    def __str__(self) -> str:
        return layout.render(replace(self._answer_page, footer=()), _DISPLAY_WIDTH).rstrip("\n")

    def _repr_html_(self) -> str:
        return page_as_html(self._answer_page, find_report_page(self))

    @property
    def _answer_page(self) -> Page:
        return answer_page(self, findings_of(self), _DISPLAY_WIDTH, find_report_page(self), format_store_option(self))

    @cached_property
    def results(self) -> pd.DataFrame:
        """The results of the run as a pandas frame, with the same rows as --csv."""
        return results_frame(run_rows([(self, findings_of(self))]))

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        """The verdicts that the terminal prints, as a pandas frame. Each case except references has a row."""
        import pandas as pd

        rows = verdict_rows(group_into_panels(self, findings_of(self)))
        return pd.DataFrame(list(rows), columns=list(VERDICT_COLUMNS))


@accept_request_fields(Request, excluded=("known_scales",))
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

    `run.verdicts` is a pandas frame with a row for each case except references: its verdict, its speed-up with
    interval, its error, memory and energy, and the reason. `run.results` is a frame with the same rows as --csv.
    `fp8bench.table(run)` is the table that the terminal prints.

    Raises Fp8benchError with an explanation if a request is impossible. A case that fails raises no error: it has a
    record with the reason. With `isolation=False` the run can measure workloads that a notebook defines, but a crash
    ends this process.
    """
    # 1. Check the options as the command line does, before a worker starts.
    request = Request(suite, **request_fields(Request, options))
    request = replace(request, imports=(*request.imports, *suite_files(suite)))
    try:
        count, pause_seconds = parse_sessions(str(sessions))
    except ArgumentTypeError as error:
        raise UsageError(f"sessions: {error}.") from None
    # 2. Measure. Each session is stored as a run, and the last run combines the intervals of all sessions.
    measure = partial(execute_sessions, request, sessions=count, pause=pause_seconds)
    measure = measure if count > 1 else partial(execute, request)
    return _measure_run(measure, store, observer, progress, report, log)


# This call also has the name of its command, `fp8bench suite`.
suite = run


def _measure_run(
    measure: Callable[[Path, Observer, str], model.Run],
    store: str | Path,
    observer: Observer | None,
    progress: bool,
    report: bool,
    log: str | Iterable[str],
) -> Run:
    # Check the targets and the store before the measurement, which may take long.
    targets = parse_log_argument(log)
    folder_of_runs = parse_folder_option("store", store)
    with _choose_observer(observer, progress) as chosen_observer:
        measured_run = measure(folder_of_runs, chosen_observer, command_line())
    _write_outputs(measured_run, folder_of_runs, progress and observer is None, report, targets)
    return _to_frame_run(measured_run)


def _choose_observer(observer: Observer | None, progress: bool) -> AbstractContextManager[Observer]:
    if observer is not None:
        return nullcontext(observer)
    return (TERMINAL_JOB_OBSERVER if progress else SILENT).measuring()


def _write_outputs(
    run: model.Run, store: Path, prints_notes: bool, report: bool, log: Sequence[LogTarget] = ()
) -> None:
    """Writes the history, the report and the logged figures after a run, as the command line does. A run that was not
    stored gets no report.
    """
    outputs = RequestedOutputs(ReportDestinations() if report and run.path else None, log)
    after_run(run, store, outputs, TERMINAL_JOB_OBSERVER.note if prints_notes else SILENT.note)


# The keywords of `run` that `profile` does not accept, or for which it declares its own parameter.
_FIELDS_NOT_IN_PROFILE = {
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


@accept_request_fields(Request, excluded=_FIELDS_NOT_IN_PROFILE)
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
    **options: Any,
) -> Run:
    """Measures an unchanged model next to copies whose products are in other precisions; returns the Run.

    The model is not modified: copies are measured, in other processes if it can be sent there.
    `run.verdicts` and `run.results` are pandas frames, as for `fp8bench.run`.

    model: 'module:function' as for `fp8bench profile`, or a live model
    batch: what the forward of a live model takes
    loss: a function of a live model's output, if its forward returns no loss
    """
    # A live model is sent to the worker. A model that is named by its function is made in the worker.
    is_model_object = not isinstance(model, str)
    if is_model_object == (batch is None) or (loss is not None and not is_model_object):
        raise UsageError("profile takes 'module:function' alone, or a model with a batch, and a loss if it needs one.")
    target = type(model).__name__ if is_model_object else check_function_name(str(model))
    request = Request(
        **profile_dtypes(split_names(dtypes), reference),
        **request_fields(Request, options),
        axes=make_profile_axes(target, forward, optimizer, compile, split_names(skip)),
        precision_map=as_name_value_pairs(precision_map),
        isolation=isolation,
    )
    parts = (model, batch) if loss is None else (model, batch, loss)
    measure = partial(profile_live_model, parts, request) if is_model_object else partial(profile_maker, request)
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

    The stored run defines what to measure, and how. Raises Fp8benchError if the conditions of measuring, for example
    the machine, have changed since.

    run: the run, its id, its name, a path, or 'last'
    """
    if isinstance(run, model.Run) and not run.path:
        raise UsageError(f"the run {run.id} was not stored. Give a stored run, its id, its file, or 'last'.")
    folder_of_runs = parse_folder_option("store", store)
    path = Path(run.path) if isinstance(run, model.Run) else find_run(str(run), folder_of_runs)
    with _choose_observer(observer, progress) as chosen_observer:
        was_resumed, resulting_run = resume_run(path, folder_of_runs, chosen_observer, command_line())
    if was_resumed:
        _write_outputs(resulting_run, folder_of_runs, progress and observer is None, report)
    return _to_frame_run(resulting_run)


def _to_frame_run(run: model.Run) -> Run:
    return run if isinstance(run, Run) else Run(**{field.name: getattr(run, field.name) for field in fields(run)})


def load(run: str | Path | model.Run, store: str | Path = DEFAULT_STORE) -> Run:
    """Returns a stored run. Its `.results` have the same rows as --csv, and its `.verdicts` those that the terminal
    prints.
    """
    return _to_frame_run(
        run if isinstance(run, model.Run) else load_stored_run(str(run), parse_folder_option("store", store))
    )


def findings(run: model.Run) -> Findings:
    """Returns verdicts, ratios, best-case times and labels, computed from the run's raw samples.

    Keys are short names of cases ('bf16 shape=64'); a case's id works as well.

    run: the Run that a call returned
    """
    return Findings(findings_of(run))


def table(run: model.Run | StoredTraining | CommandResult, width: int = 100) -> str:
    """Returns the table that the command line prints for a run or for another result of a call.

    run: what a call returned
    width: the largest number of characters in a line
    """
    if isinstance(run, CommandResult):
        return layout.render(run.page(), width)
    for kind in kinds():
        if isinstance(run, kind.holds):
            return layout.render(kind.view(run).page(), width)
    return render(cast(model.Run, run), findings_of(cast(model.Run, run)), width)
