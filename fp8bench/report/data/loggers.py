"""Logs scalars to boards that draw the curves of many runs: TensorBoard, or Weights & Biases.

A scalar is named SERIES/TAG, where a series is a precision, or an arm of a training with its seed. TensorBoard gets
one folder for each series, so that all series share the chart of a tag. TensorBoard needs no torch. Weights & Biases
gets the whole name. The environment variables WANDB_MODE and WANDB_API_KEY determine where it sends scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fp8bench.analysis.metric import Metric, Reference
from fp8bench.errors import UsageError
from fp8bench.files import check_folder
from fp8bench.model import Environment, Finding, Record, Run
from fp8bench.model.file_names import make_safe_file_name
from fp8bench.model.specs import STEP, TIME, Rank

TENSORBOARD = "tensorboard"
WANDB = "wandb"
DEFAULT_DESTINATIONS = {TENSORBOARD: "tensorboard", WANDB: "fp8bench"}
# The version that TensorBoard expects in the first event of a file.
_EVENT_FORMAT = "brain.Event:2"
_UNIT_SUFFIXES = {"s": "_seconds", "B": "_bytes", "J": "_joules", "W": "_watts"}
_LOGGED_FACTS = ("machine", "fp8bench", "torch", "python", "commit", "dirty")


class LogTarget(NamedTuple):
    """The board to which scalars are logged. `place` is a folder for TensorBoard, or the name of a wandb project."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"


class LogSource(NamedTuple):
    """The run or training whose scalars are logged. `begun` is its start, in seconds since 1970. wandb shows `config`
    next to the curves. TensorBoard writes into the subfolder `folder`.
    """

    id: str
    title: str
    begun: int
    config: Mapping[str, Any]
    folder: str = ""


class LoggedScalar(NamedTuple):
    """A value that is logged at a step. `name` is the name of its curve, as SERIES/TAG."""

    name: str
    step: int
    value: float


class ScalarSink(Protocol):
    """Receives scalars. Its methods may raise any exception, which the caller reports."""

    def log(self, name: str, step: int, value: float) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Writes one event file for each series.

    TensorBoard reads files in the order of their names, so a file name has the start of the run and the first step.
    Logging the same scalars again replaces the file.
    """

    def __init__(self, folder: str, source: LogSource) -> None:
        self._folder, self._source = Path(folder, source.folder), source
        self._writers: dict[str, Any] = {}

    def log(self, name: str, step: int, value: float) -> None:
        # TensorBoard is an optional package, so import it only if it is used.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        series_name, _, tag = name.partition("/")
        if series_name not in self._writers:
            self._writers[series_name] = self._open_event_writer(series_name, step)
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        event = Event(wall_time=self._source.begun, step=step, summary=summary)
        self._writers[series_name].write(event.SerializeToString())

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _open_event_writer(self, series: str, step: int) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        begun = self._source.begun
        file = (
            self._folder
            / series
            / f"events.out.tfevents.{begun:010d}.fp8bench.{make_safe_file_name(self._source.id)}.{step}"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        # Write without a buffer, so that a killed training leaves complete events.
        writer = RecordWriter(file.open("wb", buffering=0))
        writer.write(Event(wall_time=begun, file_version=_EVENT_FORMAT).SerializeToString())
        return writer


class WandbSink:
    """Logs to a wandb run. If a run with this id exists, it is continued, so that a resumed training stays one run."""

    def __init__(self, project: str, source: LogSource) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=source.title,
            id=f"fp8bench-{make_safe_file_name(source.id)}",
            resume="allow",
            config=dict(source.config),
        )
        # Draw all curves over our step. wandb's own step counts the calls of its log().
        self._run.define_metric("*", step_metric="step")
        self._row: dict[str, float] = {}

    def log(self, name: str, step: int, value: float) -> None:
        # Each call of wandb's log() begins a new row, so collect the values of a step and send them together.
        if self._row.get("step", step) != step:
            self._send_pending_row()
        self._row["step"] = step
        self._row[name] = value

    def close(self) -> None:
        self._send_pending_row()
        self._run.finish()

    def _send_pending_row(self) -> None:
        if self._row:
            self._run.log(self._row)
        self._row = {}


_SINK_BY_LOGGER_KIND: Mapping[str, Callable[[str, LogSource], ScalarSink]] = {
    TENSORBOARD: TensorBoardSink,
    WANDB: WandbSink,
}


class ScalarLogger:
    """Sends scalars to several sinks. A sink that raises an exception is dropped and reported once. The report ends
    with `consequence`, as 'the training goes on'.
    """

    def __init__(
        self, targets: Iterable[LogTarget], source: LogSource, say: Callable[[str], None], consequence: str
    ) -> None:
        self._say, self._consequence = say, consequence
        self._sinks: dict[LogTarget, ScalarSink] = {}
        for target in targets:
            with self._drop_failing_sink(target):
                self._sinks[target] = _SINK_BY_LOGGER_KIND[target.kind](target.place, source)

    def log(self, name: str, step: int, value: float) -> None:
        """Logs a value to all sinks, unless it is infinite or NaN, which boards do not draw."""
        if not math.isfinite(value):
            return
        for target, sink in list(self._sinks.items()):
            with self._drop_failing_sink(target):
                sink.log(name, step, value)

    def close(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for target, sink in sinks.items():
            with self._drop_failing_sink(target):
                sink.close()
                self._say(f"logged to {target}")

    @contextmanager
    def _drop_failing_sink(self, target: LogTarget) -> Iterator[None]:
        try:
            yield
        # A sink may raise any exception, and none of them may end the measurement or the training.
        except Exception as error:
            self._sinks.pop(target, None)
            self._say(f"not logged to {target} ({type(error).__name__}: {error}); {self._consequence}")


def check_log_target(target: LogTarget) -> None:
    """Raises UsageError if the package of a log target is missing or its folder cannot be written."""
    if target.kind == WANDB:
        check_option_package("wandb", "'fp8bench[wandb]'", "", option=f"--log {target}")
        return
    required_modules = ".compat.proto.event_pb2", ".summary.writer.record_writer"
    check_option_package("tensorboard", "'fp8bench[tb]'", *required_modules, option=f"--log {target}")
    check_folder("--log tensorboard", Path(target.place))


def check_option_package(name: str, requirement: str, *modules: str, option: str) -> None:
    """Raises UsageError if the package that an option needs cannot be imported."""
    try:
        for module in modules:
            import_module(name + module)
    # A broken package may raise any exception when it is imported.
    except Exception as error:
        raise UsageError(
            f"{option} needs the package {name}, which does not import ({type(error).__name__}: {error}). "
            f"`pip install {requirement}` installs it; or leave {option} out."
        ) from None


def run_log_source(run: Run) -> LogSource:
    devices = ", ".join(f"{device.key}: {device.name}" for device in run.devices)
    config = {**select_logged_facts(run.environment), "command": run.command, "devices": devices}
    return LogSource(run.id, f"{run.request.suite} {run.id}", curve_position(run), config)


def iterate_run_scalars(run: Run, findings: Mapping[str, Finding]) -> Iterator[LoggedScalar]:
    """Yields the metrics of each measured case as scalars. They are in SI units, or ratios."""
    # this import is slow, and the command line imports this module
    from fp8bench.analysis.metrics import iterate_case_metrics

    step = curve_position(run)
    reference_by_setting = {record.case.setting: Reference(record) for record in run.records if record.is_reference}
    for record in run.records:
        if not record.is_ok:
            continue
        metrics = iterate_case_metrics(
            record, findings.get(record.case.id), reference_by_setting.get(record.case.setting)
        )
        for metric in metrics:
            if metric.rank is Rank.MAIN:
                for figure, value in _named_metric_values(metric):
                    if value is not None:
                        yield LoggedScalar(_scalar_name(record, figure), step, value)


def _scalar_name(record: Record, figure: str) -> str:
    """Returns the name of a scalar, as 'fp8/gemm/best_seconds m=512,n=512@cpu'.

    The parameters come last, because boards cut off the end of a name. Boards show the text after the last slash.
    """
    case = record.case
    # Times of different versions are not comparable, so a new version begins a new curve.
    version_suffix = "" if case.version == "1" else f" v{case.version}"
    params = ",".join(f"{name}={value}" for name, value in case.params)
    return f"{make_safe_file_name(case.mode)}/{case.workload}{version_suffix}/{figure} {params}@{case.device}"


def _named_metric_values(metric: Metric) -> Iterator[tuple[str, float | None]]:
    # Times of emulations must not share a chart with times that show a speed.
    prefix = "emulation_" if metric.cost else ""
    unit = _UNIT_SUFFIXES.get(metric.unit, "")
    if metric.phase != STEP:
        yield f"{prefix}phase_{metric.phase}{unit}", metric.best or None
        return
    if metric.name == TIME:
        yield f"{prefix}best{unit}", metric.best
        yield f"{prefix}median{unit}", metric.value
        yield "labels", None if metric.best is None else float(len(metric.labels))
    else:
        yield f"{prefix}{metric.name}{unit}", metric.value
    if metric.interval is not None:
        ratio_metric_name = "ratio" if metric.name == TIME else f"{metric.name}_ratio"
        yield ratio_metric_name, metric.interval.point
        yield f"{ratio_metric_name}_low", metric.interval.low
        yield f"{ratio_metric_name}_high", metric.interval.high


def curve_position(run: Run) -> int:
    """Returns the position of a run on the x axis of logged curves, in seconds since 1970.

    The position is the date of the commit, or the start of the run if files had uncommitted changes.
    """
    # The date is in ms since 1970. A damaged file may have a value of any type, and Python counts bool as int.
    commit_date = run.environment.get("commit_date")
    has_uncommitted_changes = run.environment.get("dirty")
    if (
        isinstance(commit_date, int)
        and not isinstance(commit_date, bool)
        and has_uncommitted_changes is False
        and commit_date > 0
    ):
        return commit_date // 1000
    return seconds_since_1970(run.started)


def seconds_since_1970(started: str) -> int:
    """Converts a stored ISO time into seconds since 1970, or into 0 if the text is invalid."""
    try:
        return max(0, int(datetime.fromisoformat(started).timestamp()))
    except (ValueError, OverflowError):
        return 0


def select_logged_facts(environment: Environment) -> dict[str, Any]:
    return {name: environment.get(name) for name in _LOGGED_FACTS}
