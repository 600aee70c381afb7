"""A run on boards that draw curves of many runs: as TensorBoard scalars, or sent to Weights & Biases.

TensorBoard gets a folder for each precision, so that its curve has one colour in every chart; no torch is needed.
TensorBoard reads files in the order of their names and drops what goes back, so a file is named by its place on the
curve, and by the run, so that a rewritten file replaces itself. Weights & Biases gets the same figures, and the run's
files as an artifact; its own settings (WANDB_MODE, WANDB_API_KEY) say where they go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from fp8bench.analysis.metric import Metric, Reference
from fp8bench.errors import UsageError
from fp8bench.files import check_folder, keeping, safe, write_whole
from fp8bench.model import Environment, Finding, Record, Run, Scalar, Status
from fp8bench.model.specs import STEP, TIME, Rank
from fp8bench.report.panels import together

_FORMAT = "brain.Event:2"
_UNIT_WORDS = {"s": "_seconds", "B": "_bytes", "J": "_joules", "W": "_watts"}


@dataclass(frozen=True)
class BoardScalar:
    """A figure. All precisions of a group share its `tag`, and so a chart; `mode` tells them apart."""

    mode: str
    tag: str
    value: float


def figures(run: Run, findings: Mapping[str, Finding]) -> Iterator[BoardScalar]:
    """The figures of each measured case, in SI units and ratios; those that are not finite are left out."""
    from fp8bench.analysis.metrics import metrics_of  # heavy, and the door knows boards

    references = {record.case.setting: Reference(record) for record in run.records if record.is_reference}
    for record in run.records:
        if record.status is Status.OK:
            told = metrics_of(record, findings.get(record.case.id), references.get(record.case.setting))
            for name, value in (pair for metric in told if metric.rank is Rank.MAIN for pair in _named(metric)):
                if value is not None and math.isfinite(value):
                    yield BoardScalar(record.case.mode, _tag(record, name), value)


def _tag(record: Record, name: str) -> str:
    """'gemm/best_seconds m=512,n=512@cpu': boards show what follows the last slash, and cut it at its end."""
    case = record.case
    version = "" if case.version == "1" else f" v{case.version}"
    params = ",".join(f"{name}={value}" for name, value in case.params)
    return f"{case.workload}{version}/{name} {params}@{case.device}"


def _named(metric: Metric) -> Iterator[tuple[str, float | None]]:
    # The cost of an emulation must not share a chart with speeds.
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
    """A run's place on a curve, in seconds since 1970: its commit's date, or its own start if files had changed."""
    date, dirty = run.environment.get("commit_date"), run.environment.get("dirty")
    if isinstance(date, int) and not isinstance(date, bool) and dirty is False and date > 0:
        return date // 1000
    return begun_at(run.started)


def begun_at(started: str) -> int:
    """A stored time in seconds since 1970; 0 if it is none."""
    try:
        return max(0, int(datetime.fromisoformat(started).timestamp()))
    except (ValueError, OverflowError):
        return 0


def check_tensorboard(folder: Path) -> None:
    check_package("tensorboard", "'fp8bench[tb]'", ".compat.proto.event_pb2", ".summary.writer.record_writer")
    check_folder("--tensorboard", folder)


def check_package(name: str, install: str, *modules: str, wanted_by: str = "") -> None:
    """Raises UsageError if the package that an option needs does not import."""
    wanted_by = wanted_by or f"--{name}"
    try:
        for module in modules:
            import_module(name + module)
    except Exception as error:
        raise UsageError(
            f"{wanted_by} needs the package {name}, which does not import ({type(error).__name__}: {error}). "
            f"`pip install {install}` installs it; or leave {wanted_by} out."
        ) from None


def write_tensorboard(run: Run, findings: Mapping[str, Finding], folder: Path) -> tuple[Path, ...]:
    """Writes a file for each precision. Raises StoreError if one cannot be written."""
    at, files = moment(run), []
    for mode, scalars in together((figure.mode, figure) for figure in figures(run, findings)).items():
        values = {figure.tag: figure.value for figure in scalars}
        files.append(write_scalars(folder / safe(mode), run.id, at, [(at, values)]))
    return tuple(files)


def write_scalars(folder: Path, name: str, at: int, points: Iterable[tuple[int, Mapping[str, float]]]) -> Path:
    """Writes a file of values by tag, at each place of the curve."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    content = BytesIO()
    records = RecordWriter(content)
    records.write(Event(wall_time=at, file_version=_FORMAT).SerializeToString())
    for place, values in points:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        records.write(Event(wall_time=at, step=place, summary=summary).SerializeToString())
    file = folder / f"events.out.tfevents.{at:010d}.fp8bench.{safe(name)}"
    with keeping(file):
        write_whole(file, content.getvalue())
    return file


def check_wandb() -> None:
    check_package("wandb", "'fp8bench[wandb]'", "")


def send_to_wandb(run: Run, findings: Mapping[str, Finding], project: str, files: Sequence[Path]) -> None:
    """Sends a run. May raise anything: it is another program's network."""
    devices = ", ".join(f"{device.key}: {device.name}" for device in run.devices)
    config = {"command": run.command, "devices": devices, "moment": moment(run), "run": run.id}
    config = {**told_of(run.environment), **config}
    with sending(project=project, name=f"{run.request.suite} {run.id}", config=config) as sent:
        sent.log({f"{figure.mode}/{figure.tag}": figure.value for figure in figures(run, findings)})
        attach(sent, run.id, "fp8bench-run", files)


@contextmanager
def sending(**options: Any) -> Iterator[Any]:
    """A run of wandb, which is told whether it succeeded."""
    import wandb

    sent = wandb.init(**options)
    try:
        yield sent
    except BaseException:
        sent.finish(exit_code=1)
        raise
    sent.finish()


def attach(sent: Any, name: str, kind: str, files: Iterable[Path]) -> None:
    import wandb

    artifact = wandb.Artifact(f"fp8bench-{safe(name)}", type=kind)
    for file in files:
        artifact.add_file(str(file), name=file.name)
    sent.log_artifact(artifact)


def told_of(environment: Environment) -> dict[str, Scalar | None]:
    return {name: environment.get(name) for name in ("machine", "fp8bench", "torch", "python", "commit", "dirty")}
