"""Trainings in a store: their folders and files, and how to find, list, show, report and log them.

A folder is `<store>/trainings/<utc>-<commit8>-<id>/`. `steps.jsonl` has the training in its first line, then a line for
every observation, synced slice by slice. `places.json` says where a killed training can be resumed: the length of the
stream at that time, and the folder of the checkpoint. It is replaced atomically once that checkpoint is complete, and
older checkpoints are removed afterwards, so that what it names always exists.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.features.train.lines import LINE_KINDS, line_of, plain
from fp8bench.features.train.request import BANDS, SETTINGS_RULES
from fp8bench.features.train.streams import is_stream, loops_of
from fp8bench.features.train.values import (
    ArmRole,
    KeptTraining,
    LayerReading,
    Lines,
    ModelSweep,
    StreamLine,
    Training,
    WatchedLoops,
)
from fp8bench.files import (
    LineWriter,
    compact,
    digest_of,
    keeping,
    lock,
    open_file,
    read_file,
    seal,
    unseal,
    unsealed_line,
    write_whole,
)
from fp8bench.jobs.kinds import Kind, SparePart, View
from fp8bench.model.codec import SCHEMA, decode, encode
from fp8bench.model.file_names import stamp
from fp8bench.report.data.loggers import LoggedScalar, LogSource
from fp8bench.store.kept_lines import Content, UnknownKind, lines_of, read_header, sheet_of, take_lines

STREAM = "steps.jsonl"
_PLACES = "places.json"
_CHECKPOINTS = "checkpoints"
_KEPT_CHECKPOINTS = 2
_MAKE_ROOM = "What was kept before is in it; make room, or choose another --store DIR."


@dataclass(frozen=True)
class ResumePlace:
    """A place to resume a training: ahead of a step of a seed, counted from 0, with `length` bytes of its stream.
    `folder` is that of the checkpoint, '' before a seed's first step, which needs none. `out` says why arms are no
    longer trained. `digest` is of the stream's lines at that time, '' in older files."""

    number: int
    step: int
    length: int
    folder: str = ""
    out: tuple[tuple[str, str], ...] = ()
    digest: str = ""


@dataclass
class TrainingWriter(LineWriter):
    """An open stream, locked until it is closed, and the places where its training can be resumed."""

    called: str = "the training's file"
    places: tuple[ResumePlace, ...] = ()

    def append(self, lines: Lines) -> None:
        self._lines([plain(line) for line in lines])

    def checkpoint(self, number: int, step: int) -> Path:
        """Returns a new folder for a checkpoint before that step."""
        folder = self.path.parent.resolve() / _CHECKPOINTS / f"{number}-{step}"
        with keeping(self.path.parent, _MAKE_ROOM):
            folder.parent.mkdir(exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def folder_of(self, place: ResumePlace) -> Path:
        return self.path.parent.resolve() / _CHECKPOINTS / place.folder

    def keep(self, number: int, step: int, folder: Path | None, out: Sequence[tuple[str, str]]) -> None:
        """Makes this a place to resume at, and keeps the last earlier checkpoint."""
        # The place names its checkpoint, which is on disk first.
        name = folder.name if folder is not None else ""
        place = ResumePlace(number, step, self._file.seek(0, os.SEEK_END), name, tuple(out), digest_of(self._sums))
        # The place before a seed's first step is kept: it needs no checkpoint, and works if both others are damaged.
        earlier = [old for old in self.places if old.number == number and old.step < step]
        begun, checkpoints = earlier[:1], earlier[1:][1 - _KEPT_CHECKPOINTS :]
        with keeping(self.path.parent, _MAKE_ROOM):
            self._write((*begun, *checkpoints, place))

    def go_back(self, place: ResumePlace) -> None:
        """Cuts the stream at that place, but keeps events that do not belong to a step, such as 'resumed'."""
        places = tuple(old for old in self.places if (old.number, old.step) <= (place.number, place.step))
        with keeping(self.path.parent, _MAKE_ROOM):
            if places != self.places:  # otherwise repeated steps would seem to precede later places
                self._write(places)
            # Keep events such as 'resumed', which repeated steps do not generate again.
            cut = read_file(self.path)[place.length :].split(b"\n")
            kept_events = [line for line in cut[:-1] if line.startswith(_EVENT) and any(kind in line for kind in _STAY)]
            self._file.truncate(place.length)
            self._file.seek(place.length)
            self._recount()
        contents = (unsealed_line(line)[0] for line in kept_events)
        self._lines([{name: value for name, value in content.items() if name in LINE_KINDS} for content in contents])

    def _write(self, places: tuple[ResumePlace, ...]) -> None:
        write_whole(self.path.with_name(_PLACES), compact(seal({"places": encode(places)})))
        self.places = places
        remove_others(self.path.parent, places)


# Events of the training as a whole, which do not recur when steps are repeated.
_EVENT, _STAY = b'{"event":', tuple(f'"kind":"{kind}"'.encode() for kind in ("resumed", "restarted", "out"))


def start_training(training: Training, store: Path) -> TrainingWriter:
    commit = str(training.environment.get("commit") or "nocommit")[:8]
    folder = store / "trainings" / f"{stamp(training.started)}-{commit}-{training.id}"
    return TrainingWriter.start(folder / STREAM, {"schema": SCHEMA, "training": encode(training)})


def reopen_training(path: Path) -> TrainingWriter:
    """Opens a stream to continue it. Raises StoreError if another process is writing it."""
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
        writer.places = _places(path)
    except StoreError:
        writer.close()
        raise
    remove_others(path.parent, writer.places)
    return writer


def _places(path: Path) -> tuple[ResumePlace, ...]:
    """Returns the places up to which the stream is intact, or else the first step of the first seed."""
    file = path.with_name(_PLACES)
    try:
        plain = json.loads(read_file(file))
        places = decode(tuple[ResumePlace, ...], plain if isinstance(plain, list) else unseal(plain)["places"])
    except FileNotFoundError:
        places = ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{file}, which says where to resume, is broken ({error!s:.120}). Remove it to begin at the first step."
        ) from None
    # A place is only used if the stream before it is unchanged, bit for bit.
    stream = read_file(path)
    begun = ResumePlace(0, 0, stream.find(b"\n") + 1)

    def is_reached(place: ResumePlace) -> bool:
        start = sheet_of(stream[: place.length])
        intact = not place.digest or (not start.lost and digest_of(start.sums) == place.digest)
        return place.length <= len(stream) and intact

    return tuple(filter(is_reached, places)) or (begun,)


def newest_checkpoint(path: Path) -> tuple[Path, ResumePlace] | None:
    """Returns the folder of the newest checkpoint and its place, or None."""
    place = _places(path)[-1]
    return (path.parent.resolve() / _CHECKPOINTS / place.folder, place) if place.folder else None


def remove_others(folder: Path, places: Iterable[ResumePlace]) -> None:
    """Removes checkpoints that no place names: older ones, and incomplete ones after a kill."""
    named = {place.folder for place in places}
    for path in (folder / _CHECKPOINTS).glob("*"):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)


def find_training(word: str, store: Path) -> Path:
    """Like KIND.find, with 'last' for the newest; raises RunNotFound if nothing is found."""
    newest = KIND.newest(store)
    path = newest if word == "last" else KIND.find(word, store)
    if path is None:
        hint = f" The newest is {newest.parent.name}." if newest else " The store has no trainings yet."
        raise RunNotFound(f"no training {word!r:.200} in {store}.{hint} Give an id, its folder, or 'last'.")
    return path


_ROLES = {role.value for role in ArmRole}


def _training_from(plain: Any) -> Training:
    """Returns a training from the header of its file, without arms and values that only other versions know."""
    # Arms with roles of other versions cannot be judged here.
    arms = [dict(arm) for arm in plain["arms"] if arm.get("role", "candidate") in _ROLES]
    for arm in arms:
        arm["settings"] = [pair for pair in arm.get("settings", ()) if pair[0] in SETTINGS_RULES]
    request = plain["request"]
    # Bands and settings of other versions are unknown here, and do not affect measurements.
    bands = [band for band in request.get("bands", BANDS) if band in BANDS] or ["none"]
    settings = _with_keys(request.get("settings", {}))
    settings = {name: value for name, value in settings.items() if not _is_of_others(name, value)}
    return decode(Training, {**plain, "arms": arms, "request": {**request, "bands": bands, "settings": settings}})


# Settings of older headers, with their defaults, which are now keys of the optimizer or the schedule.
_OLDER_KEYS: Mapping[str, tuple[str, object]] = {
    "betas": ("optimizer", []),
    "weight_decay": ("optimizer", 0.1),
    "warmup": ("schedule", 0.1),
    "floor": ("schedule", 0.1),
}


def _with_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a header; older ones have separate numbers of the optimizer and the schedule."""
    words = dict(settings)
    for key, (option, default) in _OLDER_KEYS.items():
        value = words.pop(key, default)
        if value == default or option not in words:
            continue
        text = f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        if key == "betas" and words[option] == "sgd":
            text = f"momentum={value[0]}"
        words[option] += f":{text}"
    return words


def _is_of_others(name: str, value: object) -> bool:
    try:
        return name in SETTINGS_RULES and isinstance(value, str) and not SETTINGS_RULES[name].holds(value)
    except UsageError:
        return True


def load_head(path: Path) -> Training:
    try:
        with open_file(path) as file:
            first = sheet_of(file.readline())
        return read_header(first, path, "training", _training_from)
    except OSError as error:
        raise RunNotFound(f"the training's file {path} cannot be read ({error.strerror}).") from None


def load_training(path: Path) -> KeptTraining:
    """Reads a training. Broken lines are left out and named in `troubles`; raises StoreError for any other file."""
    sheet = lines_of(path, "the training's file")
    training = read_header(sheet, path, "training", _training_from)
    names = {"", *(arm.name for arm in training.arms)}
    lines: list[StreamLine] = []
    ends = []

    def take(content: Content) -> None:
        ((name, plain),) = content.items()
        if name == "end":
            ends.append(plain)
        elif name in LINE_KINDS:
            if plain["arm"] in names:
                lines.append(line_of(content))
        else:
            raise UnknownKind

    troubles = take_lines(sheet, take, but=1)
    return KeptTraining(training, tuple(lines), ends[-1:] == ["finished"], str(path), tuple(troubles))


class TrainingKind(Kind[KeptTraining]):
    """Its report's table leaves out readings of tensors, which may be millions; `show --csv` has them."""

    name = "training"
    holds = KeptTraining
    pattern = f"trainings/*/{STREAM}"

    load = staticmethod(load_training)

    def newest(self, store: Path) -> Path | None:
        return next(iter(self.files(store)), None)

    def view(self, stored: KeptTraining) -> View:
        from fp8bench.features.train.data import rows_of, value_of
        from fp8bench.features.train.verdicts.summary import JudgedTraining
        from fp8bench.features.train.view import page_of

        judged = JudgedTraining(stored)
        return View(partial(page_of, judged), partial(value_of, judged), partial(rows_of, judged))

    def whole_view(self, stored: KeptTraining) -> View:
        from fp8bench.features.train.verdicts.summary import JudgedTraining
        from fp8bench.features.train.view import whole_page

        return TrainingKind.view(self, stored)._replace(page=partial(whole_page, JudgedTraining(stored)))

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        return (partial(_line, path) for path in self.files(store))

    def spare(self, store: Path) -> Iterator[SparePart]:
        for path in self.files(store):
            if (path.parent / _CHECKPOINTS).is_dir():
                try:
                    # Only the last line shows whether the training is finished.
                    ended = sheet_of(read_file(path).rstrip().rpartition(b"\n")[2]).lines[-1:]
                except OSError:  # then it is unknown whether they are needed
                    continue
                finished = bool(ended) and ended[0][1].get("end") == "finished"
                state = "which is finished" if finished else "which was cut off: `train --resume` would begin it anew"
                description = f"checkpoints of the training {self.names(path)[0]}, {state}"
                yield SparePart([path.with_name(_PLACES), path.parent / _CHECKPOINTS], description, path)

    def report(self, stored: KeptTraining) -> View:
        from fp8bench.features.train.data import rows_of
        from fp8bench.features.train.page import page_of
        from fp8bench.features.train.verdicts.summary import JudgedTraining

        # Readings of all tensors would make a page of many megabytes.
        few = replace(stored, lines=tuple(line for line in stored.lines if not isinstance(line, LayerReading)))
        return View(partial(page_of, JudgedTraining(stored)), rows=partial(rows_of, JudgedTraining(few)))

    def log_source(self, stored: KeptTraining) -> LogSource:
        from fp8bench.features.train.data import source_of

        return source_of(stored.training)

    def scalars(self, stored: KeptTraining) -> Iterator[LoggedScalar]:
        from fp8bench.features.train.data import scalars_of, summary_scalars
        from fp8bench.features.train.verdicts.summary import JudgedTraining

        yield from scalars_of(stored.training, stored.lines)
        yield from summary_scalars(JudgedTraining(stored))


def _line(path: Path) -> str:
    """Returns a line of `history list`: '0a1b2c3d of 2026-01-05 12:00:00: nano in bf16, fp8'."""
    training = load_head(path)
    arms = ", ".join(arm.name for arm in training.arms if not arm.is_band)
    ranks, settings = training.request.ranks, training.request.settings
    together = "" if ranks is None else f", {ranks} ranks by {settings.parallel}"
    return f"{training.id} of {training.started[:19].replace('T', ' ')}: {settings.display_name} in {arms}{together}"


class StreamKind(TrainingKind):
    """Files of `fp8bench.watch`, wherever they are; a store has none."""

    name = "stream"
    holds = WatchedLoops
    pattern = ""

    def find(self, word: str, store: Path) -> Path | None:
        return path if is_stream(path := Path(word)) else None

    def names(self, path: Path) -> tuple[str, str]:
        # Many streams have the same name, so that their folder is part of it.
        return path.stem, f"{path.resolve().parent.name}-{path.stem}"

    def load(self, path: Path) -> KeptTraining:
        return loops_of([[path]])

    def join(self, words: Sequence[str], store: Path) -> KeptTraining | None:
        """Returns loops side by side. A word with commas names the seeds of a loop."""
        files = [list(map(Path, word.split(","))) for word in words]
        return loops_of(files) if all(is_stream(paths[0]) for paths in files) else None

    def view(self, stored: KeptTraining) -> View:
        return self.whole_view(stored)


class SizesKind(Kind[ModelSweep]):
    """Trainings of several models side by side."""

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
        from fp8bench.features.train.sizes import Sizes

        paths = [path for word in words if (path := KIND.find(word, store)) is not None]
        if len(paths) < len(words) or len(paths) < 2:
            return None
        trainings = tuple(map(load_training, paths))
        sizes = Sizes(trainings, "+".join(training.training.id for training in trainings))
        models = {training.request.settings.model for training in trainings}
        # The trend is that of the model's size only if nothing else differs.
        requests = [training.request for training in trainings]
        distinct_requests = {replace(request, settings=replace(request.settings, model="nano")) for request in requests}
        comparable = len(models) == len(paths) and len(distinct_requests) == 1 and not requests[0].settings.make
        return sizes if comparable and sizes.arms else None

    def view(self, sweep: ModelSweep) -> View:
        from fp8bench.features.train.sizes import Sizes, page_of, rows_of, value_of

        sizes = Sizes(sweep.kept, sweep.path)
        return View(partial(page_of, sizes), partial(value_of, sizes), partial(rows_of, sizes))

    def report(self, sweep: ModelSweep) -> View:
        return self.view(sweep)


KIND = TrainingKind()
STREAM_KIND = StreamKind()
SIZES_KIND = SizesKind()
# A stream may have the name of a training's file.
KINDS = (STREAM_KIND, KIND, SIZES_KIND)
