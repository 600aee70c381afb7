"""Lists the runs of a store, each once, and finds a run by a word.

A run is identified by its id and its content. Copies count once, whatever their name, folder and line endings; so do
beginnings of a run, of which the longest file counts. If files of one id differ, none counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from fp8bench.errors import RunNotFound, StoreError, UsageError
from fp8bench.files import check_file, is_locked, is_no_folder, open_file, read_file
from fp8bench.model import Request, Run
from fp8bench.model.request import KnownScales
from fp8bench.store.kept_lines import fitting
from fp8bench.store.runs.run_file import file_name, folder_name, load_head, load_run
from fp8bench.suggestions import meant_name

COPIED = "they are copies of runs, or the beginnings of runs, that count"
REFUSED = "their ids are those of other files, so that none counts; `fp8bench history verify` names them"
# The first bytes of a header; the id is its first field.
_BEGINS = re.compile(rb'(?:\xef\xbb\xbf)?{"schema": ?\d+, ?"header": ?{"id": ?("[^"\\]+")')
_PEEKED = 256
_MONTHS = "machine=*/month=*"
_COLLECTED = f"{_MONTHS}/*.jsonl"
_MONTH = re.compile(r"\d{4}-\d{2}")
# Runs that are being measured are among this many newest files, and were written to this recently.
_LOOKED_AT = 100
_RECENT_SECONDS = 7 * 86400.0
REMEDY = "Keep the file that is right, and move the others away"


@dataclass(frozen=True)
class Listing:
    """Run files, newest first. `copies` leads from a file that does not count to the one that does.

    `refused` leads from a file to all files of its id, which are not the same run.
    """

    files: tuple[Path, ...]
    copies: Mapping[Path, Path] = field(default_factory=dict)
    refused: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def left(self) -> Counter[str]:
        return +Counter({COPIED: len(self.copies), REFUSED: len(self.refused)})

    @property
    def everything(self) -> list[Path]:
        return sorted((*self.files, *self.copies, *self.refused), key=lambda path: path.name, reverse=True)

    @property
    def newest(self) -> Path | None:
        """The file with the latest start in its name, or a refused one; not a copy."""
        return next((path for path in self.everything if path not in self.copies), None)

    def notes(self, paths: Iterable[Path]) -> list[str]:
        """Returns sentences on those of some files that do not count."""
        chosen = set(paths)
        copies = [
            f"{path} is a copy of {original}, or its beginning, and the run counts once"
            for path, original in self.copies.items()
            if path in chosen
        ]
        groups = dict.fromkeys(group for path, group in self.refused.items() if path in chosen)
        return [*copies, *(f"{refusal(group)}. {REMEDY}" for group in groups)]

    def counts(self, path: Path) -> bool:
        return path not in self.copies and path not in self.refused

    def check_refusals(self) -> Listing:
        """Returns this listing. Raises StoreError where a file is refused."""
        for path in self.refused:
            self.that_counts(path)
        return self

    def that_counts(self, path: Path) -> Path:
        """Returns the file that counts for this one. Raises StoreError for a refused one."""
        if path in self.refused:
            raise StoreError(f"{refusal(self.refused[path])}. {REMEDY}.")
        return self.copies.get(path, path)


def refusal(group: Sequence[Path]) -> str:
    files = " and ".join(map(str, group))
    return f"{files} have the id {id_of(group[0])} and say different things, so that none of them counts"


def each_once(paths: Iterable[Path]) -> Listing:
    """Sorts out which files are the same runs, by their ids. Unreadable files are kept."""
    # 1. Group the files by the ids of their runs.
    files = list(dict.fromkeys(paths))
    by_id: dict[str, list[Path]] = {}
    for path in files:
        by_id.setdefault(id_of(path), []).append(path)
    # 2. In each group one file counts, or none if they differ.
    copies: dict[Path, Path] = {}
    refused: dict[Path, tuple[Path, ...]] = {}
    for group in by_id.values():
        if len(group) == 1:
            continue
        try:
            counts = _choose_file(group)
        except OSError:
            continue
        if counts is None:
            refused |= dict.fromkeys(group, tuple(sorted(group)))
        else:
            copies |= {path: counts for path in group if path != counts}
    return Listing(tuple(path for path in files if path not in copies and path not in refused), copies, refused)


def _choose_file(group: Sequence[Path]) -> Path | None:
    """Returns the file that counts among those of one id: a complete one, with its run's name and folder if one has;
    None if they differ."""
    longest = max(group, key=_length)
    content = read_file(longest)
    if not all(is_beginning(read_file(path), content) for path in group):
        return None
    name = folder = ""
    with contextlib.suppress(StoreError):  # a newer version's, for example
        head = load_head(longest)
        name, folder = file_name(head), folder_name(head)
    complete = [path for path in group if is_beginning(content, read_file(path))]
    return min(complete, key=lambda path: (path.name != name, path.parent.name != folder, str(path)))


def id_of(path: Path) -> str:
    """Returns the id of the run in a file; a digest where it has no header, its path where it cannot be read."""
    try:
        with open_file(path) as file:
            if begins := _BEGINS.match(file.read(_PEEKED)):
                return str(json.loads(begins[1]))
        run = load_head(path)
        if run.started:
            return run.id
        with open_file(path) as file:
            return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
    except (StoreError, OSError, ValueError):
        return str(path)


def _length(path: Path) -> tuple[int, int]:
    lines = _lines(read_file(path))
    return len(lines), sum(map(len, lines))


def is_beginning(part: bytes, content: bytes) -> bool:
    """Whether the lines of `part` are the first lines of `content`, or all; the last one may be cut short."""
    first, lines = _lines(part), _lines(content)
    if len(first) > len(lines):
        return False
    for number, (line, counterpart) in enumerate(zip(first, lines, strict=False), 1):
        is_cut = number == len(first) and counterpart.startswith(line)
        if line != counterpart and not is_cut and not _are_equal(line, counterpart):
            return False
    return True


def _lines(content: bytes) -> list[bytes]:
    return [line.strip() for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]


def _are_equal(line: bytes, counterpart: bytes) -> bool:
    try:
        return json.dumps(json.loads(line), sort_keys=True) == json.dumps(json.loads(counterpart), sort_keys=True)
    except (ValueError, RecursionError):
        return False


def collected_folder(run: Run) -> str:
    """Returns the folder below `runs` in a collected store: 'machine=NAME/month=YYYY-MM'."""
    month = run.started[:7]
    return f"machine={folder_name(run)}/month={month if _MONTH.fullmatch(month) else 'unknown'}"


def machine_folder(path: Path) -> str:
    return path.parent.parent.name.removeprefix("machine=") if path.match(_COLLECTED) else path.parent.name


def all_files(store: Path) -> list[Path]:
    """Returns all run files of a store, newest first, with copies; files that no memory holds are left out.

    They are in a folder of their machine, or in those of `collected_folder`.
    """
    return list(newest_files(store))


def newest_files(store: Path) -> Iterator[Path]:
    """Like all_files, one by one: checking 50,000 files takes as long as all the rest of a command."""
    runs = store / "runs"
    paths = sorted((*runs.glob("*/*.jsonl"), *runs.glob(_COLLECTED)), key=lambda path: path.name, reverse=True)
    return filter(_may_be_run, paths)


def _may_be_run(path: Path) -> bool:
    try:
        check_file(path)
    except (OSError, ValueError):
        return False
    return True


def listing(store: Path) -> Listing:
    return each_once(all_files(store))


def run_files(store: Path) -> Iterator[Path]:
    """Yields a file for each run of a store, newest first."""
    yield from listing(store).files


def closed_folders(store: Path) -> list[Path]:
    """Returns folders of runs that may not be read, so that their runs seem to be missing."""
    runs = store / "runs"
    folders = [runs, *sorted(runs.glob("*")), *sorted(runs.glob(_COLLECTED.rpartition("/")[0]))]
    # Path.is_dir raises where a folder above may not be read.
    return [folder for folder in folders if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK)]  # noqa: PTH112


def store_of(path: Path) -> Path | None:
    """Returns the store that a run file is in; None if it is in none."""
    resolved = path.resolve()
    folder = resolved.parent.parent.parent if resolved.match(_COLLECTED) else resolved.parent.parent
    return folder.parent if folder.name == "runs" else None


def find_run(word: str, store: Path) -> Path:
    """Returns a run's file by path, file stem or id, or a unique beginning of these; 'last' is the newest."""
    # 1. A path.
    direct = Path(word)
    try:
        if is_no_folder(direct):
            return direct
        runs = listing(store)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunNotFound(f"looking for run {word!r:.80} in {str(store)!r:.80} failed ({reason}).") from None
    # 2. The newest run, or the one that the word begins.
    files = runs.everything
    if word == "last" and runs.newest is not None:
        return runs.that_counts(runs.newest)
    called = {path: (path.stem, path.stem.rpartition("-")[2]) for path in files}
    meant = list(dict.fromkeys(map(runs.that_counts, fitting(word, called))))
    if len(meant) == 1:
        return meant[0]
    if meant:
        names = ", ".join(path.stem for path in meant[:5])
        raise RunNotFound(f"{word!r} fits {len(meant)} runs ({names}). Give more of the name.")
    # 3. No run: name the newest one.
    newest = f" The newest is {files[0].stem}." if files else " The store has no runs yet."
    message = f"no run {word!r:.200} in {store}.{newest} Give an id, a file's stem, a path, or 'last'."
    raise RunNotFound(message, word, meant_name("run", word, ["last"]) if files else None)


def running_beside(path: Path) -> list[str]:
    """Returns the stems of other runs that are being measured into the same store."""
    path = path.resolve()
    store = store_of(path)
    if store is None:
        return []
    recent = time.time() - _RECENT_SECONDS
    # Locks are looked at only for files that somebody may still write.
    stems = []
    for recent_path in islice(newest_files(store), _LOOKED_AT):
        with contextlib.suppress(OSError):
            if recent_path != path and recent_path.stat().st_mtime > recent and is_locked(recent_path):
                stems.append(recent_path.stem)
    return stems


def load_stored_run(word: str, store: Path) -> Run:
    return load_run(find_run(word, store))


def scales_of(run: Run) -> KnownScales:
    """Returns the largest magnitude of each layer and role, over all cases of one precision."""
    scales = []
    for record in run.records:
        scales += [(record.case.precision, scale.layer, scale.role, scale.amax) for scale in record.scales]
    return largest_scales(scales)


def largest_scales(scales: Iterable[tuple[str, str, str, float]]) -> KnownScales:
    largest: dict[tuple[str, str, str], float] = {}
    for mode, layer, role, amax in scales:
        key = str(mode), str(layer), str(role)
        largest[key] = max(amax, largest.get(key, 0.0))
    return tuple((*key, amax) for key, amax in largest.items())


def with_stored_scales(request: Request, store: Path) -> Request:
    if request.scales_from is None or request.known_scales:
        return request
    run = load_stored_run(request.scales_from, store)
    return replace(request, known_scales=refuse_no_scales(scales_of(run), f"run {run.id}"))


def refuse_no_scales(scales: KnownScales, of: str) -> KnownScales:
    if not scales:
        raise UsageError(
            f"--scales-from: {of} has kept no scales. Measure it with --static-scales N, which finds and keeps them."
        )
    return scales
