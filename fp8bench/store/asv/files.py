"""The JSON files that fp8bench and asv both write: benchmarks.json, machine.json, and results files (format 2).

asv writes in place and without a lock, so half a file may be whole a moment later (`settled_read`). A file that stays
broken is renamed and not overwritten, because it may still be useful (`set_aside`). Locks only synchronise fp8bench's
own processes. asv replaces both lists by what it discovers; fp8bench merges into them, and preserves unknown entries.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, TypeVar

from fp8bench.errors import AsvFileAbsent, AsvFileBroken, AsvFileError, AsvFileOfOtherVersion, AsvFileTorn
from fp8bench.files import keeping, read_file, write_whole
from fp8bench.model import Scalar, Series
from fp8bench.model.codec import Malformed
from fp8bench.store.asv.rows import COLUMNS, AsvRow, are_params, read_row, write_row

_PAUSE_SECONDS = 0.02
# A file that was not changed for this time is no longer being written.
_LATELY_SECONDS = 10.0
_PATIENCE_SECONDS = 2.0

T = TypeVar("T")


def read_object(path: Path, version: int) -> dict[str, Any]:
    """Returns the object in a JSON file, without its version, which must be the one given.

    NaN and Infinity are asv's own words. A byte order mark, which asv refuses, is gone when the file is next written.
    """
    raw = _content(path)
    try:
        content = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AsvFileTorn(f"{path} is broken: {error}.") from None
    except (ValueError, RecursionError):
        raise AsvFileBroken(
            f"{path} is broken: it is nested too deeply, or has a number of thousands of digits."
        ) from None
    if not isinstance(content, dict):
        raise AsvFileBroken(f"{path} is broken: expected an object, found {type(content).__name__}.")
    _check_version(path, content.pop("version", None), version)
    return content


def _content(path: Path) -> bytes:
    try:
        return read_file(path)
    except FileNotFoundError:
        raise AsvFileAbsent(f"{path} cannot be read (it is not there).") from None
    except OSError as error:
        raise AsvFileError(f"{path} cannot be read ({error.strerror}).") from None


def _check_version(path: Path, written: object, version: int) -> None:
    if type(written) is not int:
        raise AsvFileBroken(f"{path} is broken: its 'version' is {shown(written)}, expected {version}.")
    if written != version:
        age, remedy = ("an older", "Run 'asv update' first") if written < version else ("a newer", "Upgrade fp8bench")
        raise AsvFileOfOtherVersion(
            f"{path} was written by {age} asv: it is of version {written!s:.20}, "
            f"fp8bench reads version {version}. {remedy}."
        )


def write_object(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Replaces a JSON file in one step. With an indent the keys are sorted, without one the file is compact, as asv
    does."""
    text = json.dumps(content, indent=indent, sort_keys=indent is not None)
    remedy = "The previous file is unchanged; make room, or choose another --store DIR."
    with keeping(path, remedy, AsvFileError):
        write_whole(path, text)


def settled_read(load: Callable[[Path], T], path: Path, seconds: float = _PATIENCE_SECONDS) -> T:
    """Returns what `load` makes of a file. A torn file that was changed recently is read again for up to `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return load(path)
        except AsvFileTorn:
            with contextlib.suppress(OSError):  # it has just vanished; the next attempt reports that
                if time.monotonic() >= deadline or abs(time.time() - path.stat().st_mtime) >= _LATELY_SECONDS:
                    raise
        time.sleep(_PAUSE_SECONDS)


def set_aside(path: Path) -> Path:
    """Renames a broken file to `<name>.broken-<n>` with a new n, and returns its path."""
    for number in itertools.count(1):
        target = path.with_name(f"{path.name}.broken-{number}")
        try:
            target.open("x").close()  # takes the name before another process does
        except FileExistsError:
            continue
        except OSError as error:
            raise AsvFileError(f"{path} is broken and cannot be renamed ({error.strerror}).") from None
        try:
            return path.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                target.unlink()
            raise AsvFileError(f"{path} is broken and cannot be renamed ({error.strerror}).") from None
    raise AssertionError("numbers do not end")


BENCHMARKS_VERSION = 2
MACHINE_VERSION = 1
_INDENT = 4
# The fields that readers of results use; the others are for asv's runner.
_TELLING = ("params", "version", "unit", "param_names")


def existing(load: Callable[[Path], T], path: Path, aside: list[Path] | None = None) -> T | None:
    """Loads a file of asv's; None without one. With `aside`, a broken file is renamed and its new path added to it."""
    # Its writer may have been stopped half-way, and would go on in the file that was set aside.
    patience = _PATIENCE_SECONDS if aside is None else _LATELY_SECONDS
    try:
        return settled_read(load, path, patience)
    except AsvFileAbsent:
        return None
    except AsvFileBroken:
        if aside is None:
            raise
        aside.append(set_aside(path))
        return None


def definition_of(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "type": "track",
        "unit": series.unit,
        "code": "",
        "timeout": 60.0,
        "params": [list(map(repr, param)) for param in series.params],
        "param_names": list(series.param_names),
        "version": series.version,
    }


def load_benchmarks(path: Path) -> dict[str, Any]:
    """Returns the definitions in benchmarks.json by name. One that asv would fail on breaks the file."""
    content = read_object(path, BENCHMARKS_VERSION)
    for name, definition in content.items():
        if (
            not isinstance(definition, dict)
            or definition.get("name") != name
            or not are_params(definition.get("params"))
        ):
            raise AsvFileBroken(f"{path} is broken: the benchmark {name!r:.120} has no name and params.")
    return content


def merge_benchmarks(old: Mapping[str, Any], series: Iterable[Series]) -> dict[str, Any]:
    """Adds the definitions of the series; those with the same parameters, version and unit stay unchanged."""
    new = {metric.name: definition_of(metric) for metric in series}
    same = {name for name in new if name in old and all(old[name].get(key) == new[name][key] for key in _TELLING)}
    return {**old, **{name: definition for name, definition in new.items() if name not in same}}


def save_benchmarks(path: Path, benchmarks: Mapping[str, Any]) -> None:
    write_object(path, {**benchmarks, "version": BENCHMARKS_VERSION}, _INDENT)


def load_machine(path: Path) -> dict[str, Any]:
    content = read_object(path, MACHINE_VERSION)
    if not isinstance(content.get("machine"), str):
        raise AsvFileBroken(f"{path} is broken: it names no 'machine'.")
    return content


def merge_machine(old: Mapping[str, Any], new: Mapping[str, Scalar | None]) -> dict[str, Any]:
    """Adds what is new about a machine, without None."""
    return {**old, **{key: value for key, value in new.items() if value is not None}}


def save_machine(path: Path, machine: Mapping[str, Any]) -> None:
    write_object(path, {**machine, "version": MACHINE_VERSION}, _INDENT)


RESULTS_VERSION = 2
_COMMIT = re.compile(r"[0-9a-f]{8,64}")
_KINDS: Mapping[str, type] = {
    "commit_hash": str,
    "env_name": str,
    "date": int,
    "params": dict,
    "python": str,
    "requirements": dict,
    "env_vars": dict,
    "result_columns": list,
    "results": dict,
    "durations": dict,
}
# asv reads a file without these.
_OPTIONAL = ("env_vars", "durations")


@dataclass(frozen=True)
class ResultsFile:
    """A results file. `date` is the commit's, in ms since 1970; `params` and `env_vars` distinguish asv's series.

    `others` are keys that fp8bench does not know. `broken` are unreadable rows, which `troubles` name; they are written
    back unchanged, unless `rows` has a row of the same name.
    """

    commit_hash: str
    env_name: str
    date: int
    params: Mapping[str, Scalar | None]
    python: str
    requirements: Mapping[str, Any]
    env_vars: Mapping[str, Scalar | None]
    rows: Mapping[str, AsvRow]
    durations: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS
    others: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, Any] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()


def load_results(path: Path) -> ResultsFile:
    """Raises AsvFileError in one of its kinds for a file that asv would not read, or that would make it fail."""
    content = read_object(path, RESULTS_VERSION)
    try:
        return _file(content, path)
    except Malformed as error:
        raise AsvFileBroken(f"{path} is broken: {error}.") from None


def save_results(path: Path, file: ResultsFile) -> None:
    """Writes a results file as asv would, in one step: statistics and durations have 5 digits."""
    rows = {name: write_row(row, file.columns) for name, row in file.rows.items()}
    content: dict[str, Any] = {
        "commit_hash": file.commit_hash,
        "env_name": file.env_name,
        "date": file.date,
        "params": dict(file.params),
        "python": file.python,
        "requirements": dict(file.requirements),
        "env_vars": dict(file.env_vars),
        "result_columns": list(file.columns),
        "results": rows | {k: v for k, v in file.broken.items() if k not in rows},
        "durations": dict(file.durations),
    }
    content |= {key: value for key, value in file.others.items() if key not in content}
    write_object(path, {**content, "version": RESULTS_VERSION})


def _file(content: Mapping[str, Any], path: Path) -> ResultsFile:
    content = {**{key: {} for key in _OPTIONAL}, **content}
    _check_head(content, path)
    columns = tuple(content["result_columns"])
    if not all(column in COLUMNS for column in columns):  # what is in others would be lost
        raise Malformed(f"'result_columns' is {shown(columns)}, expected some of asv's")
    rows: dict[str, AsvRow] = {}
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
    """Raises Malformed where a field lacks or has a wrong type that hides the file from asv or makes it fail."""
    for key, kind in _KINDS.items():
        if key not in content:
            raise Malformed(f"it has no {key!r}")
        if type(content[key]) is not kind:
            raise Malformed(f"{key!r} is {shown(content[key])}, expected {kind.__name__}")
    if not isinstance(content["params"].get("machine"), str):
        raise Malformed("its 'params' name no 'machine'")
    commit = content["commit_hash"]
    if not _COMMIT.fullmatch(commit):
        raise Malformed(f"its commit {commit!r:.80} is no hash")
    if not path.name.startswith(f"{commit[:8]}-"):
        raise Malformed(f"its name does not begin with that of its commit, {commit[:8]}-")
