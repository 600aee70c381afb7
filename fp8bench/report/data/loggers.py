"""Scalars for boards that draw curves of many runs: event files of TensorBoard, or a run of Weights & Biases.

A scalar's name is SERIES/TAG. TensorBoard gets a folder for each series (a precision, or an arm in a seed), so that all
series share the chart of a tag; no torch is needed. Weights & Biases gets the whole name, and its settings (WANDB_MODE,
WANDB_API_KEY) determine the destination.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fp8bench.analysis.metric import Metric, Reference
from fp8bench.errors import UsageError
from fp8bench.files import check_folder
from fp8bench.model import Environment, Finding, Record, Run
from fp8bench.model.file_names import safe
from fp8bench.model.specs import STEP, TIME, Rank

TENSORBOARD = "tensorboard"
WANDB = "wandb"
DEFAULT_PLACES = {TENSORBOARD: "tensorboard", WANDB: "fp8bench"}
_EVENT_FORMAT = "brain.Event:2"
_UNIT_WORDS = {"s": "_seconds", "B": "_bytes", "J": "_joules", "W": "_watts"}
_TOLD_OF_ENVIRONMENT = ("machine", "fp8bench", "torch", "python", "commit", "dirty")


class LogTarget(NamedTuple):
    """The destination of scalars: a folder for TensorBoard, or a project of wandb."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"


class LogSource(NamedTuple):
    """The source of scalars. `begun` is in seconds since 1970, `config` is shown by wandb next to the curves, and
    `folder` is below TensorBoard's."""

    id: str
    title: str
    begun: int
    config: Mapping[str, Any]
    folder: str = ""


class LoggedScalar(NamedTuple):
    """A point of a curve named SERIES/TAG."""

    name: str
    step: int
    value: float


class Sink(Protocol):
    """Receives scalars; either method may raise anything."""

    def log(self, name: str, step: int, value: float) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Writes a file for each series.

    TensorBoard reads files in the order of their names, so a file is named by its start and its first step; the same
    scalars, logged again, replace it.
    """

    def __init__(self, folder: str, source: LogSource) -> None:
        self._folder, self._source = Path(folder, source.folder), source
        self._writers: dict[str, Any] = {}

    def log(self, name: str, step: int, value: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        series, _, tag = name.partition("/")
        if series not in self._writers:
            self._writers[series] = self._begin(series, step)
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        event = Event(wall_time=self._source.begun, step=step, summary=summary)
        self._writers[series].write(event.SerializeToString())

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _begin(self, series: str, step: int) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        begun = self._source.begun
        file = self._folder / series / f"events.out.tfevents.{begun:010d}.fp8bench.{safe(self._source.id)}.{step}"
        file.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that a killed training leaves complete events.
        writer = RecordWriter(file.open("wb", buffering=0))
        writer.write(Event(wall_time=begun, file_version=_EVENT_FORMAT).SerializeToString())
        return writer


class WandbSink:
    """Logs to a wandb run, which is continued if it exists: a resumed training has one run."""

    def __init__(self, project: str, source: LogSource) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=source.title,
            id=f"fp8bench-{safe(source.id)}",
            resume="allow",
            config=dict(source.config),
        )
        self._run.define_metric("*", step_metric="step")
        self._row: dict[str, float] = {}

    def log(self, name: str, step: int, value: float) -> None:
        if self._row.get("step", step) != step:
            self._send()
        self._row["step"] = step
        self._row[name] = value

    def close(self) -> None:
        self._send()
        self._run.finish()

    def _send(self) -> None:
        if self._row:
            self._run.log(self._row)
        self._row = {}


_SINKS: Mapping[str, Callable[[str, LogSource], Sink]] = {TENSORBOARD: TensorBoardSink, WANDB: WandbSink}


class ScalarLogger:
    """Sends scalars to sinks. A sink that fails is reported once with the `consequence`, and then skipped."""

    def __init__(
        self, targets: Iterable[LogTarget], source: LogSource, say: Callable[[str], None], consequence: str
    ) -> None:
        self._say, self._consequence = say, consequence
        self._sinks: dict[LogTarget, Sink] = {}
        for target in targets:
            try:
                self._sinks[target] = _SINKS[target.kind](target.place, source)
            except Exception as error:
                self._report(target, error)

    def log(self, name: str, step: int, value: float) -> None:
        """Logs a value to all sinks; values that are not finite are left out, because boards do not draw them."""
        if not math.isfinite(value):
            return
        for target, sink in list(self._sinks.items()):
            try:
                sink.log(name, step, value)
            except Exception as error:
                del self._sinks[target]
                self._report(target, error)

    def close(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for target, sink in sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._report(target, error)
            else:
                self._say(f"logged to {target}")

    def _report(self, target: LogTarget, error: Exception) -> None:
        self._say(f"not logged to {target} ({type(error).__name__}: {error}); {self._consequence}")


def check_target(target: LogTarget) -> None:
    """Raises UsageError if the target is not usable."""
    if target.kind == WANDB:
        check_package("wandb", "'fp8bench[wandb]'", "", wanted_by=f"--log {target}")
        return
    modules = ".compat.proto.event_pb2", ".summary.writer.record_writer"
    check_package("tensorboard", "'fp8bench[tb]'", *modules, wanted_by=f"--log {target}")
    check_folder("--log tensorboard", Path(target.place))


def check_package(name: str, install: str, *modules: str, wanted_by: str) -> None:
    """Raises UsageError if the package that an option needs cannot be imported."""
    try:
        for module in modules:
            import_module(name + module)
    except Exception as error:
        raise UsageError(
            f"{wanted_by} needs the package {name}, which does not import ({type(error).__name__}: {error}). "
            f"`pip install {install}` installs it; or leave {wanted_by} out."
        ) from None


def run_source(run: Run) -> LogSource:
    devices = ", ".join(f"{device.key}: {device.name}" for device in run.devices)
    config = {**config_of(run.environment), "command": run.command, "devices": devices}
    return LogSource(run.id, f"{run.request.suite} {run.id}", place_on_curve(run), config)


def run_scalars(run: Run, findings: Mapping[str, Finding]) -> Iterator[LoggedScalar]:
    """Yields the figures of each measured case, in SI units and ratios."""
    from fp8bench.analysis.metrics import metrics_of  # heavy, and the command line imports this module

    place = place_on_curve(run)
    references = {record.case.setting: Reference(record) for record in run.records if record.is_reference}
    for record in run.records:
        if not record.is_ok:
            continue
        metrics = metrics_of(record, findings.get(record.case.id), references.get(record.case.setting))
        for metric in metrics:
            if metric.rank is Rank.MAIN:
                for figure, value in _figures_of(metric):
                    if value is not None:
                        yield LoggedScalar(_name(record, figure), place, value)


def _name(record: Record, figure: str) -> str:
    """Returns 'fp8/gemm/best_seconds m=512,n=512@cpu': boards show the part after the last slash, and truncate its
    end."""
    case = record.case
    version = "" if case.version == "1" else f" v{case.version}"
    params = ",".join(f"{name}={value}" for name, value in case.params)
    return f"{safe(case.mode)}/{case.workload}{version}/{figure} {params}@{case.device}"


def _figures_of(metric: Metric) -> Iterator[tuple[str, float | None]]:
    # The cost of emulation must not share a chart with speeds.
    kind = "emulation_" if metric.cost else ""
    unit = _UNIT_WORDS.get(metric.unit, "")
    if metric.phase != STEP:
        yield f"{kind}phase_{metric.phase}{unit}", metric.best or None
        return
    if metric.name == TIME:
        yield f"{kind}best{unit}", metric.best
        yield f"{kind}median{unit}", metric.value
        yield "labels", None if metric.best is None else float(len(metric.labels))
    else:
        yield f"{kind}{metric.name}{unit}", metric.value
    if metric.interval is not None:
        ratio = "ratio" if metric.name == TIME else f"{metric.name}_ratio"
        yield ratio, metric.interval.point
        yield f"{ratio}_low", metric.interval.low
        yield f"{ratio}_high", metric.interval.high


def place_on_curve(run: Run) -> int:
    """Returns a run's step, in seconds since 1970: its commit's date, or its start if files had changed."""
    date = run.environment.get("commit_date")
    dirty = run.environment.get("dirty")
    if isinstance(date, int) and not isinstance(date, bool) and dirty is False and date > 0:
        return date // 1000
    return begun_at(run.started)


def begun_at(started: str) -> int:
    """Returns a stored time in seconds since 1970; 0 if it is invalid."""
    try:
        return max(0, int(datetime.fromisoformat(started).timestamp()))
    except (ValueError, OverflowError):
        return 0


def config_of(environment: Environment) -> dict[str, Any]:
    return {name: environment.get(name) for name in _TOLD_OF_ENVIRONMENT}
