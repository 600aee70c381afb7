"""A run on boards that draw curves of many runs: as scalars of TensorBoard, or sent to Weights & Biases.

TensorBoard gets a folder for each precision, so that its curve has one colour in every chart; it is written by
tensorboard's own protocol and without torch. A file is named by its place on the curve, because TensorBoard reads files
in the order of their names and drops what goes back; and by the run, so that one that is written again replaces itself.

Weights & Biases gets the same figures, and the run's files as an artifact. Where it goes, and whether at all over a
network, is for wandb's own settings to say (WANDB_MODE, WANDB_API_KEY).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from io import BytesIO
from pathlib import Path

from fp8bench.analysis.metric import STEP, TIME, Metric, Rank, Reference
from fp8bench.errors import StoreError, UsageError
from fp8bench.files import check_folder, safe, write_whole
from fp8bench.model import Finding, Record, Run, Scalar, Status
from fp8bench.report.panels import together

_FORMAT = "brain.Event:2"
_UNIT_WORDS = {"s": "_seconds", "B": "_bytes", "J": "_joules", "W": "_watts"}


@dataclass(frozen=True)
class Figure:
    """`tag` is the same for all precisions of a group, so that their curves share a chart; `mode` tells them apart."""

    mode: str
    tag: str
    value: float


def figures(run: Run, findings: Mapping[str, Finding]) -> Iterator[Figure]:
    """What each case that was measured has come to. SI units and plain ratios; what is not finite is left out."""
    from fp8bench.analysis.metrics import metrics_of  # heavy, and the door knows boards

    references = {record.case.setting: Reference(record) for record in run.records if record.is_reference}
    for record in run.records:
        if record.status is Status.OK:
            told = metrics_of(record, findings.get(record.case.id), references.get(record.case.setting))
            for name, value in (pair for metric in told if metric.rank is Rank.MAIN for pair in _named(metric)):
                if value is not None and math.isfinite(value):
                    yield Figure(record.case.mode, _tag(record, name), value)


def _tag(record: Record, name: str) -> str:
    """'gemm/best_seconds m=512,n=512@cpu': boards show what follows the last slash, and cut it at its end.

    A version of a workload that does not compare with the first has charts of its own.
    """
    case = record.case
    version = "" if case.version == "1" else f" v{case.version}"
    params = ",".join(f"{name}={value}" for name, value in case.params)
    return f"{case.workload}{version}/{name} {params}@{case.device}"


def _named(metric: Metric) -> Iterator[tuple[str, float | None]]:
    # What an emulation costs is no speed, and shares no chart with one.
    kind, unit = "emulation_" if metric.cost else "", _UNIT_WORDS.get(metric.unit, "")
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


def moment(run: Run) -> int:
    """When a run stands on a curve, in seconds since 1970: its commit's date, or its own start if files had changed."""
    date, dirty = run.environment.get("commit_date"), run.environment.get("dirty")
    if isinstance(date, int) and not isinstance(date, bool) and dirty is False and date > 0:
        return date // 1000
    try:
        return max(0, int(datetime.fromisoformat(run.started).timestamp()))
    except (ValueError, OverflowError):
        return 0


def check_tensorboard(folder: Path) -> None:
    """Raise UsageError where nothing can be written: without the package, or into that folder."""
    _check_package("tensorboard", "'fp8bench[tb]'", ".compat.proto.event_pb2", ".summary.writer.record_writer")
    check_folder("--tensorboard", folder)


def _check_package(name: str, install: str, *modules: str) -> None:
    """Raise UsageError for the option of that name, where the package does not import."""
    try:
        for module in modules:
            import_module(name + module)
    except Exception as error:
        raise UsageError(
            f"--{name} needs the package {name}, which does not import ({type(error).__name__}: {error}). "
            f"`pip install {install}` installs it; or leave --{name} out."
        ) from None


def write_tensorboard(run: Run, findings: Mapping[str, Finding], folder: Path) -> tuple[Path, ...]:
    """The files, one for each precision. Raises StoreError with a sentence where one cannot be written."""
    at = moment(run)
    name = f"events.out.tfevents.{at:010d}.fp8bench.{safe(run.id)}"
    files = []
    for mode, found in together((figure.mode, figure) for figure in figures(run, findings)).items():
        file = folder / safe(mode) / name
        try:
            _write(found, at, file)
        except OSError as error:
            raise StoreError(f"{file} cannot be written ({error.strerror}).") from None
        files.append(file)
    return tuple(files)


def _write(found: Iterable[Figure], at: int, file: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    values = [Summary.Value(tag=figure.tag, simple_value=figure.value) for figure in found]
    events = [
        Event(wall_time=at, file_version=_FORMAT),
        Event(wall_time=at, step=at, summary=Summary(value=values)),
    ]
    content = BytesIO()
    for event in events:
        RecordWriter(content).write(event.SerializeToString())
    write_whole(file, content.getvalue())


def check_wandb() -> None:
    """Raise UsageError where the package is not there."""
    _check_package("wandb", "wandb", "")


def send_to_wandb(run: Run, findings: Mapping[str, Finding], project: str, files: Sequence[Path]) -> None:
    """One run of wandb for one of ours. It may raise anything: it is another program's network."""
    import wandb

    sent = wandb.init(project=project, name=f"{run.request.suite} {run.id}", config=_config(run))
    try:
        sent.log({f"{figure.mode}/{figure.tag}": figure.value for figure in figures(run, findings)})
        artifact = wandb.Artifact(f"fp8bench-{safe(run.id)}", type="fp8bench-run")
        for file in files:
            artifact.add_file(str(file), name=file.name)
        sent.log_artifact(artifact)
    except BaseException:
        sent.finish(exit_code=1)
        raise
    sent.finish()


def _config(run: Run) -> dict[str, Scalar | None]:
    """By which runs are told apart and put in order."""
    wanted = ("machine", "fp8bench", "torch", "python", "commit", "dirty")
    config = {name: run.environment.get(name) for name in wanted}
    devices = ", ".join(f"{one.key}: {one.name}" for one in run.devices)
    return {**config, "command": run.command, "devices": devices, "moment": moment(run), "run": run.id}
