"""asv's results files (format 2): one commit's results under one environment of one machine; two of them merged.

What others wrote into a file stays in it, whether fp8bench knows what it means or not. Of two files or folders, what is
here counts, and what is missing is taken.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from fp8bench.errors import AsvFileBroken, AsvFileError
from fp8bench.model import Scalar
from fp8bench.model.codec import Malformed
from fp8bench.store.asv.files import (
    existing,
    load_benchmarks,
    load_machine,
    read_object,
    save_benchmarks,
    save_machine,
    settled_read,
    write_object,
)
from fp8bench.store.asv.rows import (
    COLUMNS,
    MOST_COMBINATIONS,
    NOT_MEASURED,
    Row,
    by_combination,
    combinations,
    is_measured,
    read_row,
    row_of,
    write_row,
)

VERSION = 2
Load = Callable[[Path], dict[str, Any]]
_COMMIT = re.compile(r"[0-9a-f]{8,64}")
_KINDS: Mapping[str, type] = {
    "commit_hash": str, "env_name": str, "date": int, "params": dict, "python": str, "requirements": dict,
    "env_vars": dict, "result_columns": list, "results": dict, "durations": dict,
}  # fmt: skip
# asv reads a file without these.
_OPTIONAL = ("env_vars", "durations")


@dataclass(frozen=True)
class ResultsFile:
    """A results file. `date` is the commit's, in ms since 1970; `params` and `env_vars` tell asv's series apart.

    `others` are keys that fp8bench does not know. `broken` are rows that could not be read, named in `troubles`: nobody
    knows what they mean, so they are kept as they are. A row in `rows` replaces a broken one of its name.
    """

    commit_hash: str
    env_name: str
    date: int
    params: Mapping[str, Scalar | None]
    python: str
    requirements: Mapping[str, Any]
    env_vars: Mapping[str, Scalar | None]
    rows: Mapping[str, Row]
    durations: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS
    others: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, Any] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()


def load_results(path: Path) -> ResultsFile:
    """Read a results file. Rows that are broken are left out, named in `troubles`, and kept as they are in `broken`.

    Raises AsvFileError in one of its kinds for a file that asv would not read, or that would make it fail.
    """
    content = read_object(path, VERSION)
    try:
        return _file(content, path)
    except Malformed as error:
        raise AsvFileBroken(f"{path} is broken: {error}.") from None


def results_files(folder: Path, pattern: str = "*.json") -> list[Path]:
    """The results files in the folder of a machine; with '*/*.json' those in all folders of results."""
    return sorted(path for path in folder.glob(pattern) if path.name not in ("benchmarks.json", "machine.json"))


def save_results(path: Path, file: ResultsFile) -> None:
    """Write a results file as asv would, in one step. Statistics and durations keep 5 digits, as in asv."""
    rows = {name: write_row(row, file.columns) for name, row in file.rows.items()}
    content: dict[str, Any] = {
        "commit_hash": file.commit_hash, "env_name": file.env_name, "date": file.date, "params": dict(file.params),
        "python": file.python, "requirements": dict(file.requirements), "env_vars": dict(file.env_vars),
        "result_columns": list(file.columns), "results": rows | {k: v for k, v in file.broken.items() if k not in rows},
        "durations": dict(file.durations),
    }  # fmt: skip
    content |= {key: value for key, value in file.others.items() if key not in content}
    try:
        _check_head(content, path)
        _check_columns(content)
    except Malformed as error:
        raise AsvFileError(f"{path} cannot be written: asv could not read it, because {error}.") from None
    write_object(path, {**content, "version": VERSION})


def _file(content: Mapping[str, Any], path: Path) -> ResultsFile:
    content = {**{key: {} for key in _OPTIONAL}, **content}
    _check_head(content, path)
    _check_columns(content)
    columns = tuple(content["result_columns"])
    rows: dict[str, Row] = {}
    broken: dict[str, Any] = {}
    troubles = []
    for name, cells in content["results"].items():
        try:
            rows[name] = read_row(columns, cells)
        except Malformed as error:
            broken[name] = cells
            troubles.append(f"the row {name!r:.120} was left out ({error})")
    return ResultsFile(
        **{key: content[key] for key in _KINDS if key not in ("result_columns", "results")},
        rows=rows,
        columns=columns + tuple(column for column in COLUMNS if column not in columns),
        others={key: value for key, value in content.items() if key not in _KINDS},
        broken=broken,
        troubles=tuple(troubles),
    )


def _check_head(content: Mapping[str, Any], path: Path) -> None:
    """What asv needs to file the results: a wrong type of any of these hides the file or makes asv fail."""
    for key, kind in _KINDS.items():
        if key not in content:
            raise Malformed(f"it has no {key!r}")
        if type(content[key]) is not kind:
            raise Malformed(f"{key!r} is {shown(content[key])}, expected {kind.__name__}")
    for mapping in ("params", "env_vars"):
        for key, value in content[mapping].items():
            if not (value is None or isinstance(value, str | int | float)):
                raise Malformed(f"{key!r:.60} of its {mapping!r} is {shown(value)}, expected a text or a number")
    if not isinstance(content["params"].get("machine"), str):
        raise Malformed("its 'params' name no 'machine'")
    commit = content["commit_hash"]
    if not _COMMIT.fullmatch(commit):
        raise Malformed(f"its commit {commit!r:.80} is no hash")
    if not path.name.startswith(f"{commit[:8]}-"):
        raise Malformed(f"its name does not begin with that of its commit, {commit[:8]}-")


def _check_columns(content: Mapping[str, Any]) -> None:
    """Cells under a name that nobody knows make asv leave the whole file out."""
    columns = content["result_columns"]
    if not all(isinstance(column, str) for column in columns) or len(set(columns)) < len(columns):
        raise Malformed(f"'result_columns' is {shown(columns)}, expected different texts")
    known = [column in COLUMNS for column in columns]
    for name, cells in content["results"].items():
        if isinstance(cells, list):
            for place, value in enumerate(cells):
                if value is not None and not (place < len(known) and known[place]):
                    column = columns[place] if place < len(known) else f"number {place + 1}"
                    raise Malformed(f"the row {name!r:.80} has data in a column that is not known, {column!r:.40}")


# What makes a machine another one under the same name.
_HARDWARE = ("arch", "cpu", "num_cpu", "gpu")


@dataclass
class Taken:
    """What was taken from other results: files that are new or have more, what was not taken, what a person checks."""

    files: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def merge_folders(ours: Path, theirs: Path) -> Taken:
    """Take what is missing here out of another folder of results, which is only read. For holders of the lock."""
    taken = Taken()
    for folder in sorted({path.parent for path in theirs.glob("*/*.json")}):
        machine = _take_machine(ours / folder.name, folder, taken)
        for path in results_files(folder):
            _take_file(ours, path, machine, taken)
    with _told(taken):
        _take_list(load_benchmarks, save_benchmarks, ours / "benchmarks.json", theirs / "benchmarks.json")
    return taken


def merge_files(ours: ResultsFile, theirs: ResultsFile) -> ResultsFile:
    """Our file with the rows, combinations and durations that it lacks."""
    rows = {name: merge_rows(ours.rows[name], row) if name in ours.rows else row for name, row in theirs.rows.items()}
    return replace(
        ours, rows={**ours.rows, **rows}, durations={**theirs.durations, **ours.durations},
        others={**theirs.others, **ours.others},
    )  # fmt: skip


def merge_rows(ours: Row, theirs: Row) -> Row:
    """Our row with the combinations that it lacks. Rows of different versions do not mix: ours stays as it is."""
    if ours.version != theirs.version or len(ours.params) != len(theirs.params):
        return ours
    params = tuple(
        tuple(dict.fromkeys((*own, *others))) for own, others in zip(ours.params, theirs.params, strict=True)
    )
    if combinations(params) > MOST_COMBINATIONS:
        return ours
    own, other = by_combination(ours), by_combination(theirs)
    known = {**own, **{texts: one for texts, one in other.items() if not is_measured(own.get(texts, NOT_MEASURED))}}
    started = ours.started_at if ours.started_at is not None else theirs.started_at
    return replace(row_of(params, ours.version, known, started, ours.duration), profile=ours.profile)


@contextlib.contextmanager
def _told(taken: Taken) -> Iterator[None]:
    """What a file cannot be taken for is a sentence among others."""
    try:
        yield
    except AsvFileError as error:
        taken.failed.append(str(error))


def _take_file(ours: Path, path: Path, machine: Mapping[str, Any], taken: Taken) -> None:
    """One file of theirs; `machine` is what we call its machine, so that one machine has one line."""
    target = ours / path.parent.name / path.name
    with _told(taken):
        theirs = settled_read(load_results, path)
        if theirs.params["machine"] != path.parent.name:
            raise AsvFileError(f"{path} lies in the folder of another machine than it names.")
        here = existing(load_results, target, [])
        own = replace(theirs, params={**theirs.params, **machine})
        merged = own if here is None else merge_files(here, own)
        if here is None or merged != here:
            save_results(target, merged)
            taken.files.append(target)
        taken.notes += [f"{path}: {trouble}" for trouble in theirs.troubles]


def _take_machine(ours: Path, theirs: Path, taken: Taken) -> Mapping[str, Any]:
    """The machine.json of one machine; returns what stands in ours then."""
    with _told(taken):
        name = (existing(load_machine, theirs / "machine.json") or {}).get("machine", theirs.name)
        if name != theirs.name:
            raise AsvFileError(f"{theirs / 'machine.json'} is of another machine than its folder, {theirs.name}.")
        other, here = _take_list(load_machine, save_machine, ours / "machine.json", theirs / "machine.json")
        for key in _HARDWARE:
            if key in other and key in here and other[key] != here[key]:
                taken.notes.append(
                    f"machine {theirs.name} has the {key} {other[key]!r:.80} there and {here[key]!r:.80} here. To asv, "
                    "two machines of one name are one; give one of them a name of its own in its ~/.asv-machine.json"
                )
        return {**other, **here}
    return {}


def _take_list(load: Load, save: Callable[[Path, Any], None], ours: Path, theirs: Path) -> tuple[Any, Any]:
    """What is missing in a list; returns what stands in theirs, and what stood in ours."""
    other, here = existing(load, theirs) or {}, existing(load, ours) or {}
    if {**other, **here} != here:
        save(ours, {**other, **here})
    return other, here
