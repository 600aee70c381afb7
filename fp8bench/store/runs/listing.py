"""Lists the runs of a store, each run once. Also finds the run that a word from the user stands for.

A run is identified by its id and its content. Copies of a run file count once, whatever their name, folder or line
endings. If a file has only the first lines of a longer file, the longer file counts. If files with the same id differ
in other ways, none of them counts.
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
from fp8bench.files import check_file, is_locked, is_not_folder, open_file, read_file
from fp8bench.model import Request, Run
from fp8bench.model.request import KnownScales
from fp8bench.store.kept_lines import find_files_by_name
from fp8bench.store.runs.run_file import folder_name, load_header, load_run, make_run_file_name
from fp8bench.suggestions import guess_intended_name

RUN_COPY_REASON = "they are copies or beginnings of runs that count"
REFUSED_REASON = (
    "other files have the same ids and differ, so none of them counts; `fp8bench history verify` names them"
)
# Matches the beginning of a run's header, whose first field is the id.
_HEADER_START_PATTERN = re.compile(rb'(?:\xef\xbb\xbf)?{"schema": ?\d+, ?"header": ?{"id": ?("[^"\\]+")')
_HEADER_START_BYTES = 256
_COLLECTED_FOLDER_GLOB = "machine=*/month=*"
_COLLECTED_FILE_GLOB = f"{_COLLECTED_FOLDER_GLOB}/*.jsonl"
_MONTH_PATTERN = re.compile(r"\d{4}-\d{2}")
# Only this many newest files are checked for runs in progress, and only files that were modified within this many
# seconds.
_MAX_CHECKED_FILES = 100
_MAX_FILE_AGE_SECONDS = 7 * 86400.0
REFUSAL_REMEDY = "Keep the correct file, and move the others away"


@dataclass(frozen=True)
class RunFileListing:
    """Run files of a store that are used, newest first. `copies` maps each copy to the file that is used instead.

    `refused` maps each unused file to all files that have the same id but contain different runs.
    """

    files: tuple[Path, ...]
    copies: Mapping[Path, Path] = field(default_factory=dict)
    refused: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def skipped_run_reasons(self) -> Counter[str]:
        return +Counter({RUN_COPY_REASON: len(self.copies), REFUSED_REASON: len(self.refused)})

    @property
    def all_files(self) -> list[Path]:
        return sorted((*self.files, *self.copies, *self.refused), key=lambda path: path.name, reverse=True)

    @property
    def newest(self) -> Path | None:
        """The file of the run that started last, by the files' names, or None if no file exists. The file may be a
        refused one, but not a copy.
        """
        return next((path for path in self.all_files if path not in self.copies), None)

    def notes(self, paths: Iterable[Path]) -> list[str]:
        """Returns sentences about the files among `paths` that are copies or refused."""
        requested_paths = set(paths)
        copies = [
            f"{path} is a copy of {counted_path}, or its beginning, and the run counts once"
            for path, counted_path in self.copies.items()
            if path in requested_paths
        ]
        groups = dict.fromkeys(group for path, group in self.refused.items() if path in requested_paths)
        return [*copies, *(f"{describe_refusal(group)}. {REFUSAL_REMEDY}" for group in groups)]

    def is_counted(self, path: Path) -> bool:
        return path not in self.copies and path not in self.refused

    def raise_for_refused_files(self) -> RunFileListing:
        """Returns this listing. Raises StoreError if a file is refused."""
        for path in self.refused:
            self.find_original_run_file(path)
        return self

    def find_original_run_file(self, path: Path) -> Path:
        """Returns the file to use for a run: `path`, or the file of which it is a copy. Raises StoreError for a refused
        file.
        """
        if path in self.refused:
            raise StoreError(f"{describe_refusal(self.refused[path])}. {REFUSAL_REMEDY}.")
        return self.copies.get(path, path)


def describe_refusal(group: Sequence[Path]) -> str:
    files = " and ".join(map(str, group))
    return f"{files} have the id {find_run_id(group[0])} but different contents, so none of them counts"


def list_distinct_runs(paths: Iterable[Path]) -> RunFileListing:
    """Returns a listing with one file per run. Other files are listed as copies, or as refused if files with the same
    id differ. Each unreadable file counts as a separate run.
    """
    # 1. Group the files by the ids of their runs.
    files = list(dict.fromkeys(paths))
    paths_by_id: dict[str, list[Path]] = {}
    for path in files:
        paths_by_id.setdefault(find_run_id(path), []).append(path)
    # 2. For each run with several files, choose the file to read, or none if the files contradict each other.
    copies: dict[Path, Path] = {}
    refused: dict[Path, tuple[Path, ...]] = {}
    for group in paths_by_id.values():
        if len(group) == 1:
            continue
        try:
            counted_file = _choose_run_file(group)
        except OSError:
            continue
        if counted_file is None:
            refused |= dict.fromkeys(group, tuple(sorted(group)))
        else:
            copies |= {path: counted_file for path in group if path != counted_file}
    return RunFileListing(tuple(path for path in files if path not in copies and path not in refused), copies, refused)


def _choose_run_file(group: Sequence[Path]) -> Path | None:
    """Returns the file that counts among files with the same id, or None if they contain different runs.

    The chosen file is complete. If there are several, the one whose name and folder fit its run is chosen.
    """
    longest_file = max(group, key=_count_lines_and_bytes)
    content = read_file(longest_file)
    if not all(is_content_prefix(read_file(path), content) for path in group):
        return None
    name = folder = ""
    with contextlib.suppress(StoreError):  # the header cannot be read, for example because a newer version wrote it
        header = load_header(longest_file)
        name, folder = make_run_file_name(header), folder_name(header)
    complete_files = [path for path in group if is_content_prefix(content, read_file(path))]
    return min(complete_files, key=lambda path: (path.name != name, path.parent.name != folder, str(path)))


def find_run_id(path: Path) -> str:
    """Returns the id of the run in a file. If the file has no header, its id is a digest of its content. If it cannot
    be read, its id is its path.
    """
    try:
        with open_file(path) as file:
            # Most headers begin with the id, so do not parse the whole header.
            if start_match := _HEADER_START_PATTERN.match(file.read(_HEADER_START_BYTES)):
                return str(json.loads(start_match[1]))
        run = load_header(path)
        if run.started:
            return run.id
        with open_file(path) as file:
            return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
    except (StoreError, OSError, ValueError):
        return str(path)


def _count_lines_and_bytes(path: Path) -> tuple[int, int]:
    lines = _split_lines(read_file(path))
    return len(lines), sum(map(len, lines))


def is_content_prefix(beginning: bytes, content: bytes) -> bool:
    """Returns whether `content` begins with the lines of `beginning`. The last line of `beginning` may be cut short."""
    beginning_lines, lines = _split_lines(beginning), _split_lines(content)
    if len(beginning_lines) > len(lines):
        return False
    for number, (line, counterpart) in enumerate(zip(beginning_lines, lines, strict=False), 1):
        is_cut = number == len(beginning_lines) and counterpart.startswith(line)
        if line != counterpart and not is_cut and not _are_json_lines_equal(line, counterpart):
            return False
    return True


def _split_lines(content: bytes) -> list[bytes]:
    return [line.strip() for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]


def _are_json_lines_equal(line: bytes, counterpart: bytes) -> bool:
    try:
        return json.dumps(json.loads(line), sort_keys=True) == json.dumps(json.loads(counterpart), sort_keys=True)
    except (ValueError, RecursionError):
        return False


def name_collected_run_folder(run: Run) -> str:
    """Returns a run's folder below `runs` in a collected store: 'machine=NAME/month=YYYY-MM'."""
    start_month = run.started[:7]
    return f"machine={folder_name(run)}/month={start_month if _MONTH_PATTERN.fullmatch(start_month) else 'unknown'}"


def machine_folder(path: Path) -> str:
    return path.parent.parent.name.removeprefix("machine=") if path.match(_COLLECTED_FILE_GLOB) else path.parent.name


def list_all_files(store: Path) -> list[Path]:
    """Returns all run files of a store, including copies, newest first. Leaves out files that are too large to be read.

    A run file is in the folder of its machine, or in a folder of the form that `name_collected_run_folder` returns.
    """
    return list(iterate_newest_files(store))


def iterate_newest_files(store: Path) -> Iterator[Path]:
    """Yields the files of list_all_files one by one. This is for callers that need only a few files, because checking
    50,000 files takes as long as the rest of a command.
    """
    runs = store / "runs"
    paths = sorted(
        (*runs.glob("*/*.jsonl"), *runs.glob(_COLLECTED_FILE_GLOB)), key=lambda path: path.name, reverse=True
    )
    return filter(_may_be_run, paths)


def _may_be_run(path: Path) -> bool:
    try:
        check_file(path)
    except (OSError, ValueError):
        return False
    return True


def listing(store: Path) -> RunFileListing:
    return list_distinct_runs(list_all_files(store))


def run_files(store: Path) -> Iterator[Path]:
    """Yields one file for each run of a store, newest first."""
    yield from listing(store).files


def list_unreadable_folders(store: Path) -> list[Path]:
    """Returns the folders of runs that this process may not read. Commands report them, because otherwise their runs
    would seem to be missing.
    """
    runs = store / "runs"
    folders = [runs, *sorted(runs.glob("*")), *sorted(runs.glob(_COLLECTED_FILE_GLOB.rpartition("/")[0]))]
    # Path.is_dir raises an error if a parent folder is unreadable.
    return [folder for folder in folders if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK)]  # noqa: PTH112


def find_store_of_run(path: Path) -> Path | None:
    """Returns the store that contains a run file, or None."""
    resolved_path = path.resolve()
    folder = (
        resolved_path.parent.parent.parent if resolved_path.match(_COLLECTED_FILE_GLOB) else resolved_path.parent.parent
    )
    return folder.parent if folder.name == "runs" else None


def find_run(word: str, store: Path) -> Path:
    """Returns the run file that a word stands for. The word is the path, the stem or the id of a run file, or an
    unambiguous beginning of its stem or id. 'last' stands for the newest run.
    """
    # 1. Try the word as a path.
    word_as_path = Path(word)
    try:
        if is_not_folder(word_as_path):
            return word_as_path
        runs = listing(store)
    except (OSError, ValueError) as error:
        raise make_search_error(word, store, error) from None
    # 2. Find the newest run, or the run whose name or id begins with the word.
    files = runs.all_files
    if word == "last" and runs.newest is not None:
        return runs.find_original_run_file(runs.newest)
    names_by_path = {path: (path.stem, path.stem.rpartition("-")[2]) for path in files}
    matches = list(dict.fromkeys(map(runs.find_original_run_file, find_files_by_name(word, names_by_path))))
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(path.stem for path in matches[:5])
        raise RunNotFound(f"{word!r} fits {len(matches)} runs ({names}). Give more of the name.")
    # 3. No run was found, so the error names the newest run.
    if word_as_path.suffix == ".jsonl":
        raise RunNotFound(f"no such file: {word:.200}.")
    newest_run_text = f" The newest is {files[0].stem}." if files else " The store has no runs yet."
    message = f"no run {word!r:.200} in {store}.{newest_run_text} Give an id, a run's name, a path, or 'last'."
    raise RunNotFound(message, word, guess_intended_name("run", word, ["last"]) if files else None)


def make_search_error(word: str, store: Path, error: OSError | ValueError) -> RunNotFound:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return RunNotFound(f"looking for {word!r:.80} in {str(store)!r:.80} failed ({reason}).")


def list_running_file_stems(path: Path) -> list[str]:
    """Returns the file stems of the other runs that are being measured into the same store."""
    path = path.resolve()
    store = find_store_of_run(path)
    if store is None:
        return []
    oldest_modification_time = time.time() - _MAX_FILE_AGE_SECONDS
    # Check only the newest files, because checking all files of a large store takes long.
    running_file_stems = []
    for recent_path in islice(iterate_newest_files(store), _MAX_CHECKED_FILES):
        with contextlib.suppress(OSError):
            if (
                recent_path != path
                and recent_path.stat().st_mtime > oldest_modification_time
                and is_locked(recent_path)
            ):
                running_file_stems.append(recent_path.stem)
    return running_file_stems


def load_stored_run(word: str, store: Path) -> Run:
    return load_run(find_run(word, store))


def collect_scales(run: Run) -> KnownScales:
    """Returns the static scales that a run has stored, for use in a later run. For each precision, layer and role, this
    is the largest magnitude (amax) over all cases of the precision.
    """
    scales = []
    for record in run.records:
        scales += [(record.case.precision, scale.layer, scale.role, scale.amax) for scale in record.scales]
    return merge_largest_scales(scales)


def merge_largest_scales(scales: Iterable[tuple[str, str, str, float]]) -> KnownScales:
    amax_by_key: dict[tuple[str, str, str], float] = {}
    for mode, layer, role, amax in scales:
        key = str(mode), str(layer), str(role)
        amax_by_key[key] = max(amax, amax_by_key.get(key, 0.0))
    return tuple((*key, amax) for key, amax in amax_by_key.items())


def add_scales_from_run(request: Request, store: Path) -> Request:
    if request.scales_from is None or request.known_scales:
        return request
    run = load_stored_run(request.scales_from, store)
    return replace(request, known_scales=require_scales(collect_scales(run), f"run {run.id}"))


def require_scales(scales: KnownScales, source: str) -> KnownScales:
    if not scales:
        raise UsageError(
            f"--scales-from: {source} has no stored scales. Measure it with --static-scales N, which stores them."
        )
    return scales
