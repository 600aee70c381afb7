"""A run as scalars of TensorBoard: a folder for each precision, so that its curve has one colour in every chart.

Written by tensorboard's own protocol and without torch. A file is named by its place on the curve, because
TensorBoard reads files in the order of their names and drops what goes back; and by the run, so that one that is
written again replaces itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fp8bench.errors import StoreError, UsageError
from fp8bench.exporting.scalars import Figure, figures, moment
from fp8bench.model import Finding, Run
from fp8bench.paths import check_folder, safe

_FORMAT = "brain.Event:2"


def check(folder: Path) -> None:
    """Raise UsageError where nothing can be written: without the package, or into that folder."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: F401
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: F401
    except Exception as error:
        raise UsageError(
            f"--tensorboard needs the package tensorboard, which does not import ({type(error).__name__}: {error}). "
            "`pip install 'fp8bench[tb]'` installs it; or leave --tensorboard out."
        ) from None
    check_folder("--tensorboard", folder)


def write(run: Run, findings: Mapping[str, Finding], folder: Path) -> tuple[Path, ...]:
    """The files, one for each precision. Raises StoreError with a sentence where one cannot be written."""
    by_mode: dict[str, list[Figure]] = {}
    for figure in figures(run, findings):
        by_mode.setdefault(figure.mode, []).append(figure)
    at = moment(run)
    name = f"events.out.tfevents.{at:010d}.fp8bench.{safe(run.id)}"
    files = []
    for mode, found in by_mode.items():
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

    file.parent.mkdir(parents=True, exist_ok=True)
    values = [Summary.Value(tag=figure.tag, simple_value=figure.value) for figure in found]
    events = [
        Event(wall_time=at, file_version=_FORMAT),
        Event(wall_time=at, step=at, summary=Summary(value=values)),
    ]
    # Not a name with 'tfevents' in it, which TensorBoard would read half-written.
    part = file.with_name(f".{safe(file.parent.name)}.part")
    with part.open("wb") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())
    part.replace(file)
