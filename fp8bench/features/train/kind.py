"""Reads and writes trainings in a store, which are folders with several files. Also finds, lists, shows, reports and
logs them.

A training's folder is `<store>/trainings/<utc>-<commit8>-<id>/`. The first line of `steps.jsonl` is the training, and
every other line is an observation. Lines are synced to disk after every turn of an arm.

`places.json` has the steps at which a killed training can be resumed. For each of them, it has the length that the
stream had then, and the folder of the checkpoint. The file is replaced atomically once a checkpoint is complete.
Older checkpoints are removed only afterwards, so the file never names a checkpoint that does not exist.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.features.train.lines import LINE_TYPE_BY_KIND, line_from_json, line_to_json
from fp8bench.features.train.streams import is_stream_file, load_recorded_loops
from fp8bench.features.train.values import (
    ArmRole,
    LayerReading,
    Lines,
    ModelSweep,
    StoredTraining,
    StreamLine,
    Training,
    WatchedLoops,
)
from fp8bench.files import (
    LineWriter,
    add_checksum,
    convert_write_errors,
    digest_checksums,
    format_compact_json,
    lock,
    open_file,
    parse_json,
    read_file,
    remove_checksum,
    write_whole,
)
from fp8bench.jobs.kinds import RemovableFiles, ResultKind, ResultView
from fp8bench.model.codec import SCHEMA, decode, encode
from fp8bench.model.file_names import format_start_time
from fp8bench.report.data.loggers import LoggedScalar, LogSource
from fp8bench.store.kept_lines import (
    LineContent,
    UnknownKind,
    parse_file_lines,
    process_line_contents,
    read_file_lines,
    read_header,
)

STREAM_FILE = "steps.jsonl"
_RESUME_POINTS_FILE = "places.json"
_CHECKPOINTS_FOLDER = "checkpoints"
# If the newest checkpoint is damaged, the training resumes from the one before.
_CHECKPOINT_COUNT = 2
_FULL_DISK_ADVICE = "It holds the lines stored until now. Make room, or choose a different --store DIR."


@dataclass(frozen=True)
class ResumePoint:
    """A point where a training can be resumed: before a step of a seed, counted from 0. `length` is the number of
    bytes that the stream had at this point, and `digest` is the digest of these bytes. `folder` is the folder of the
    checkpoint. It is '' before a seed's first step, which needs no checkpoint. `out` has the reasons why some arms are
    no longer trained.
    """

    number: int
    step: int
    length: int
    folder: str = ""
    out: tuple[tuple[str, str], ...] = ()
    digest: str = ""


@dataclass
class TrainingWriter(LineWriter):
    """Writes the stream of a training, and the points where it can be resumed. The file stays locked until it is
    closed.
    """

    called: str = "the training's file"
    points: tuple[ResumePoint, ...] = ()

    def append(self, lines: Lines) -> None:
        self._append_numbered_lines([line_to_json(line) for line in lines])

    def make_checkpoint_folder(self, number: int, step: int) -> Path:
        """Returns a path for a checkpoint before a step. Nothing exists at this path."""
        folder = _get_checkpoints_folder(self.path) / f"{number}-{step}"
        with convert_write_errors(self.path.parent, _FULL_DISK_ADVICE):
            folder.parent.mkdir(exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def checkpoint_folder(self, place: ResumePoint) -> Path:
        return _get_checkpoints_folder(self.path) / place.folder

    def store_point(self, number: int, step: int, folder: Path | None, out: Sequence[tuple[str, str]]) -> None:
        """Stores a point where the training can be resumed, and drops earlier points whose checkpoints are not needed
        any more. `out` has the reasons why some arms are no longer trained.
        """
        # The checkpoint in `folder` is already on disk.
        name = folder.name if folder is not None else ""
        point = ResumePoint(
            number, step, self._file.seek(0, os.SEEK_END), name, tuple(out), digest_checksums(self._sums)
        )
        # Keep the resume point before a seed's first step: it works even if all checkpoints are damaged.
        earlier_resume_points = [old for old in self.points if old.number == number and old.step < step]
        seed_start_resume_points = earlier_resume_points[:1]
        checkpoints = earlier_resume_points[1:][1 - _CHECKPOINT_COUNT :]
        with convert_write_errors(self.path.parent, _FULL_DISK_ADVICE):
            self._write_resume_points((*seed_start_resume_points, *checkpoints, point))

    def truncate_at_resume_point(self, point: ResumePoint) -> None:
        """Truncates the stream at a resume point. Keeps later events about the training itself, such as 'resumed'."""
        points = tuple(old for old in self.points if (old.number, old.step) <= (point.number, point.step))
        with convert_write_errors(self.path.parent, _FULL_DISK_ADVICE):
            if points != self.points:  # drop the resume points after `point`
                self._write_resume_points(points)
            truncated_lines = parse_file_lines(read_file(self.path)[point.length :]).lines
            self._file.truncate(point.length)
            self._file.seek(point.length)
            self._count_lines()
        # Append events such as 'resumed' again, because the repeated steps do not write them.
        events = [
            content for _, content in truncated_lines if content.get("event", {}).get("kind") in _UNREPEATED_EVENT_KINDS
        ]
        self._append_numbered_lines(events)

    def _write_resume_points(self, places: tuple[ResumePoint, ...]) -> None:
        write_whole(
            self.path.with_name(_RESUME_POINTS_FILE), format_compact_json(add_checksum({"places": encode(places)}))
        )
        self.points = places
        remove_old_checkpoints(self.path.parent, places)


# Events that stay when the stream is truncated, because repeated steps do not write them again.
_UNREPEATED_EVENT_KINDS = ("resumed", "restarted", "out")


def start_training(training: Training, store: Path) -> TrainingWriter:
    commit = str(training.environment.get("commit") or "nocommit")[:8]
    folder = store / "trainings" / f"{format_start_time(training.started)}-{commit}-{training.id}"
    return TrainingWriter.start(folder / STREAM_FILE, {"schema": SCHEMA, "training": encode(training)})


def reopen_training(path: Path) -> TrainingWriter:
    """Opens a stream to continue it. Raises StoreError if another process is writing to it."""
    try:
        file = open_file(path, "r+b")
    except OSError as error:
        raise StoreError(f"the training's file {path} cannot be written ({error.strerror}).") from None
    # Two appending processes would interleave their lines.
    if not lock(file, 0):
        file.close()
        raise StoreError(f"another process is writing the training {path.parent.name}. Wait for its end.")
    file.seek(0, os.SEEK_END)
    writer = TrainingWriter(path, file)
    try:
        writer.points = _read_resume_points(path)
    except StoreError:
        writer.close()
        raise
    remove_old_checkpoints(path.parent, writer.points)
    return writer


def _read_resume_points(path: Path) -> tuple[ResumePoint, ...]:
    """Returns the resume points of a training before which the stream is unchanged. If there are none, returns a point
    before the first step of the first seed.
    """
    file = path.with_name(_RESUME_POINTS_FILE)
    try:
        points = decode(tuple[ResumePoint, ...], remove_checksum(parse_json(read_file(file)))["places"])
    except FileNotFoundError:
        points = ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{file}, which says where to resume, is broken ({error!s:.120}). Remove it to begin at the first step."
        ) from None
    # Use a resume point only if the stream before it is unchanged, bit for bit.
    stream_bytes = read_file(path)
    stream_start_resume_point = ResumePoint(0, 0, stream_bytes.find(b"\n") + 1)

    def is_usable_point(point: ResumePoint) -> bool:
        start = parse_file_lines(stream_bytes[: point.length])
        return (
            point.length <= len(stream_bytes)
            and not start.has_lost_line
            and digest_checksums(start.sums) == point.digest
        )

    return tuple(filter(is_usable_point, points)) or (stream_start_resume_point,)


def newest_checkpoint(path: Path) -> tuple[Path, ResumePoint] | None:
    """Returns the folder of the newest checkpoint, and its resume point. Returns None if there is no checkpoint."""
    point = _read_resume_points(path)[-1]
    return (_get_checkpoints_folder(path) / point.folder, point) if point.folder else None


def _get_checkpoints_folder(path: Path) -> Path:
    return path.parent.resolve() / _CHECKPOINTS_FOLDER


def remove_old_checkpoints(folder: Path, places: Iterable[ResumePoint]) -> None:
    """Removes all checkpoint folders that no resume point in `places` refers to: old ones, and incomplete ones of a
    killed process.
    """
    used_checkpoint_folders = {place.folder for place in places}
    for path in (folder / _CHECKPOINTS_FOLDER).glob("*"):
        if path.name not in used_checkpoint_folders:
            shutil.rmtree(path, ignore_errors=True)


def find_training(word: str, store: Path) -> Path:
    """Returns the path that `word` names: an id, a folder, or 'last' for the newest training. Raises RunNotFound."""
    newest_training_path = KIND.newest(store)
    path = newest_training_path if word == "last" else KIND.find(word, store)
    if path is None:
        hint = (
            f" The newest is {newest_training_path.parent.name}."
            if newest_training_path
            else " The store has no trainings yet."
        )
        raise RunNotFound(f"no training {word!r:.200} in {store}.{hint} Give an id, its folder, or 'last'.")
    return path


_KNOWN_ROLES = {role.value for role in ArmRole}


def _decode_training(header: Any) -> Training:
    """Returns a training from the header of its file. Leaves out arms with roles that only another version of
    fp8bench defines, because they cannot be judged here.
    """
    arms = [arm for arm in header["arms"] if arm["role"] in _KNOWN_ROLES]
    return decode(Training, {**header, "arms": arms})


def load_training_header(path: Path) -> Training:
    try:
        with open_file(path) as file:
            first_line = parse_file_lines(file.readline())
        return read_header(first_line, path, "training", _decode_training)
    except OSError as error:
        raise RunNotFound(f"the training's file {path} cannot be read ({error.strerror}).") from None


def load_training(path: Path) -> StoredTraining:
    """Reads a training. Broken lines are left out, and described in `troubles`. Raises StoreError for a file of another
    kind.
    """
    file_lines = read_file_lines(path, "the training's file")
    training = read_header(file_lines, path, "training", _decode_training)
    # Lines without an arm are about the whole training.
    names = {"", *(arm.name for arm in training.arms)}
    lines: list[StreamLine] = []
    end_kinds = []

    def take_line(content: LineContent) -> None:
        ((name, value),) = content.items()
        if name == "end":
            end_kinds.append(value)
        elif name in LINE_TYPE_BY_KIND:
            if value["arm"] in names:
                lines.append(line_from_json(content))
        else:
            raise UnknownKind

    troubles = process_line_contents(file_lines, take_line, except_line=1)
    return StoredTraining(training, tuple(lines), end_kinds[-1:] == ["finished"], str(path), tuple(troubles))


class TrainingKind(ResultKind[StoredTraining]):
    """Reads, shows and reports stored trainings. Tables of a report leave out the readings of tensors, because there
    may be millions. `fp8bench show --csv` includes them.
    """

    name = "training"
    holds = StoredTraining
    pattern = f"trainings/*/{STREAM_FILE}"

    load = staticmethod(load_training)

    def newest(self, store: Path) -> Path | None:
        return next(iter(self.files(store)), None)

    def view(self, stored: StoredTraining) -> ResultView:
        from fp8bench.features.train.data import list_csv_rows, training_to_json
        from fp8bench.features.train.verdicts.summary import JudgedTraining
        from fp8bench.features.train.view import render_answer

        judged_training = JudgedTraining(stored)
        return ResultView(
            partial(render_answer, judged_training),
            partial(training_to_json, judged_training),
            partial(list_csv_rows, judged_training),
        )

    def make_complete_view(self, stored: StoredTraining) -> ResultView:
        from fp8bench.features.train.verdicts.summary import JudgedTraining
        from fp8bench.features.train.view import render_all

        return TrainingKind.view(self, stored)._replace(page=partial(render_all, JudgedTraining(stored)))

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        return (partial(_describe_training, path) for path in self.files(store))

    def spare(self, store: Path) -> Iterator[RemovableFiles]:
        for path in self.files(store):
            if (path.parent / _CHECKPOINTS_FOLDER).is_dir():
                try:
                    # The last line is enough to know whether the training is finished.
                    last_log_lines = parse_file_lines(read_file(path).rstrip().rpartition(b"\n")[2]).lines[-1:]
                except OSError:  # an unreadable file does not show whether its training is finished
                    continue
                finished = bool(last_log_lines) and last_log_lines[0][1].get("end") == "finished"
                state = (
                    "which is finished"
                    if finished
                    else "which was cut off: `train --resume` would start at its first step"
                )
                description = f"checkpoints of the training {self.names(path)[0]}, {state}"
                yield RemovableFiles(
                    [path.with_name(_RESUME_POINTS_FILE), path.parent / _CHECKPOINTS_FOLDER], description, path
                )

    def report(self, stored: StoredTraining) -> ResultView:
        from fp8bench.features.train.data import list_csv_rows
        from fp8bench.features.train.page import render_page
        from fp8bench.features.train.verdicts.summary import JudgedTraining

        # A page with the readings of all tensors would have many megabytes.
        training_without_readings = replace(
            stored, lines=tuple(line for line in stored.lines if not isinstance(line, LayerReading))
        )
        return ResultView(
            partial(render_page, JudgedTraining(stored)),
            rows=partial(list_csv_rows, JudgedTraining(training_without_readings)),
        )

    def log_source(self, stored: StoredTraining) -> LogSource:
        from fp8bench.features.train.data import make_log_source

        return make_log_source(stored.training)

    def scalars(self, stored: StoredTraining) -> Iterator[LoggedScalar]:
        from fp8bench.features.train.data import list_scalars, list_summary_scalars
        from fp8bench.features.train.verdicts.summary import JudgedTraining

        yield from list_scalars(stored.training, stored.lines)
        yield from list_summary_scalars(JudgedTraining(stored))


def _describe_training(path: Path) -> str:
    """Returns a line of `history list`, such as '0a1b2c3d of 2026-01-05 12:00:00: nano in bf16, fp8'."""
    training = load_training_header(path)
    arms = ", ".join(arm.name for arm in training.arms if not arm.is_chance_arm)
    ranks = training.request.ranks
    settings = training.request.settings
    ranks_text = "" if ranks is None else f", {ranks} ranks by {settings.parallel}"
    return f"{training.id} of {training.started[:19].replace('T', ' ')}: {settings.display_name} in {arms}{ranks_text}"


class StreamKind(TrainingKind):
    """Reads and shows the files that `fp8bench.watch` has written. These may be anywhere, and are never in a store."""

    name = "stream"
    holds = WatchedLoops
    pattern = ""

    def find(self, word: str, store: Path) -> Path | None:
        return path if is_stream_file(path := Path(word)) else None

    def names(self, path: Path) -> tuple[str, str]:
        # Many streams have equal file names, so the folder is added to the name.
        return path.stem, f"{path.resolve().parent.name}-{path.stem}"

    def load(self, path: Path) -> StoredTraining:
        return load_recorded_loops([[path]])

    def join(self, words: Sequence[str], store: Path) -> StoredTraining | None:
        """Returns loops recorded by `fp8bench.watch` as the arms of one training. Each word is the file of a loop or,
        for several seeds, their files, separated by commas. Returns None if a word is not such a file.
        """
        stream_files = [list(map(Path, word.split(","))) for word in words]
        return load_recorded_loops(stream_files) if all(is_stream_file(paths[0]) for paths in stream_files) else None

    def view(self, stored: StoredTraining) -> ResultView:
        return self.make_complete_view(stored)


class ModelSizesKind(ResultKind[ModelSweep]):
    """Shows several trainings with different models as one comparison."""

    name = "comparison of sizes"
    holds = ModelSweep
    pattern = ""

    def find(self, word: str, store: Path) -> Path | None:
        return None

    def names(self, path: Path) -> tuple[str, str]:
        return path.name, path.name

    def load(self, path: Path) -> ModelSweep:
        raise StoreError(f"{path} is several trainings. Name each of them.")

    def join(self, words: Sequence[str], store: Path) -> ModelSweep | None:
        from fp8bench.features.train.sizes import ModelSizeComparison

        paths = [path for word in words if (path := KIND.find(word, store)) is not None]
        if len(paths) < len(words) or len(paths) < 2:
            return None
        trainings = tuple(map(load_training, paths))
        sizes = ModelSizeComparison(trainings, "+".join(training.training.id for training in trainings))
        model_names = {training.request.settings.model for training in trainings}
        # Gaps show the effect of model size only if the requests are equal in everything else.
        requests = [training.request for training in trainings]
        same_model_requests = {
            replace(request, settings=replace(request.settings, model="nano")) for request in requests
        }
        are_sizes_comparable = (
            len(model_names) == len(paths) and len(same_model_requests) == 1 and not requests[0].settings.make
        )
        return sizes if are_sizes_comparable and sizes.arms else None

    def view(self, sweep: ModelSweep) -> ResultView:
        from fp8bench.features.train.sizes import ModelSizeComparison, list_csv_rows, render_page, sizes_to_json

        sizes = ModelSizeComparison(sweep.kept, sweep.path)
        return ResultView(partial(render_page, sizes), partial(sizes_to_json, sizes), partial(list_csv_rows, sizes))

    def report(self, sweep: ModelSweep) -> ResultView:
        return self.view(sweep)


KIND = TrainingKind()
STREAM_KIND = StreamKind()
MODEL_SIZES_KIND = ModelSizesKind()
# Try StreamKind first, because a stream's file may have the same name as a training's file.
KINDS = (STREAM_KIND, KIND, MODEL_SIZES_KIND)
