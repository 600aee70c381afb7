"""Reads and writes the JSON files that asv also writes: benchmarks.json, machine.json, and results files (format 2).

asv writes in place and without a lock, so a file that is read half-written may be complete a moment later
(`read_settled_file`). A file that stays broken is renamed and not overwritten, because it may still be useful
(`rename_broken_file`). Locks only synchronise the processes of fp8bench.

asv replaces benchmarks.json and machine.json by what it finds. fp8bench adds its entries to these files and preserves
unknown entries.
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
from fp8bench.files import convert_write_errors, read_file, write_whole
from fp8bench.model import Scalar, Series
from fp8bench.model.codec import MalformedValueError
from fp8bench.store.asv.rows import COLUMNS, AsvRow, are_param_lists, read_row, write_row

_RETRY_PAUSE_SECONDS = 0.02
# A file that was not changed for this many seconds is not being written.
_SETTLED_FILE_SECONDS = 10.0
_MAX_READ_RETRY_SECONDS = 2.0

T = TypeVar("T")


def read_versioned_json_object(path: Path, version: int) -> dict[str, Any]:
    """Returns the object in a JSON file without its version, which must equal `version`.

    NaN and Infinity are accepted, because asv writes them. A byte order mark, which asv refuses, is dropped when the
    file is next written.
    """
    raw_bytes = _read_bytes(path)
    try:
        content = json.loads(raw_bytes.removeprefix(codecs.BOM_UTF8).decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        # asv may still be writing the file.
        raise AsvFileTorn(f"{path} is broken: {error}.") from None
    except (ValueError, RecursionError):
        raise AsvFileBroken(
            f"{path} is broken: it is nested too deeply, or has a number with thousands of digits."
        ) from None
    if not isinstance(content, dict):
        raise AsvFileBroken(f"{path} is broken: expected an object, found {type(content).__name__}.")
    _check_file_version(path, content.pop("version", None), version)
    return content


def _read_bytes(path: Path) -> bytes:
    try:
        return read_file(path)
    except FileNotFoundError:
        raise AsvFileAbsent(f"{path} cannot be read (it does not exist).") from None
    except OSError as error:
        raise AsvFileError(f"{path} cannot be read ({error.strerror}).") from None


def _check_file_version(path: Path, written_version: object, version: int) -> None:
    if type(written_version) is not int:
        raise AsvFileBroken(f"{path} is broken: its 'version' is {shown(written_version)}, expected {version}.")
    if written_version != version:
        age_text, remedy = (
            ("an older", "Run 'asv update' first") if written_version < version else ("a newer", "Upgrade fp8bench")
        )
        raise AsvFileOfOtherVersion(
            f"{path} was written by {age_text} asv: its version is {written_version!s:.20}, "
            f"fp8bench reads version {version}. {remedy}."
        )


def write_object(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Replaces a JSON file atomically. With an indent, keys are sorted as in asv's files. Without an indent, the file
    is one line.
    """
    text = json.dumps(content, indent=indent, sort_keys=indent is not None)
    remedy = "The previous file is unchanged; make room, or choose another --store DIR."
    with convert_write_errors(path, remedy, AsvFileError):
        write_whole(path, text)


def read_settled_file(load: Callable[[Path], T], path: Path, seconds: float = _MAX_READ_RETRY_SECONDS) -> T:
    """Returns the result of `load` for a file. If the file is broken but was changed recently, it may be half-written:
    then `load` is repeated for up to `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return load(path)
        except AsvFileTorn:
            with contextlib.suppress(OSError):  # if the file was just deleted, the next call of load() reports it
                # abs(): a time of change far in the future, from a wrong clock, also counts as long ago.
                if time.monotonic() >= deadline or abs(time.time() - path.stat().st_mtime) >= _SETTLED_FILE_SECONDS:
                    raise
        time.sleep(_RETRY_PAUSE_SECONDS)


def rename_broken_file(path: Path) -> Path:
    """Renames a broken file to `<name>.broken-<n>` with an unused n, and returns the new path."""
    for number in itertools.count(1):
        broken_file_path = path.with_name(f"{path.name}.broken-{number}")
        try:
            broken_file_path.open("x").close()  # an empty file reserves the new name
        except FileExistsError:
            continue
        except OSError as error:
            raise AsvFileError(f"{path} is broken and cannot be renamed ({error.strerror}).") from None
        try:
            return path.replace(broken_file_path)
        except OSError as error:
            with contextlib.suppress(OSError):
                broken_file_path.unlink()
            raise AsvFileError(f"{path} is broken and cannot be renamed ({error.strerror}).") from None
    raise AssertionError("numbers do not end")


BENCHMARKS_FILE_VERSION = 2
MACHINE_FILE_VERSION = 1
_JSON_INDENT = 4
# The fields of a benchmark's definition that matter for reading results. All other fields are for running the
# benchmark.
_COMPARED_FIELDS = ("params", "version", "unit", "param_names")


def load_file_if_present(load: Callable[[Path], T], path: Path, renamed_files: list[Path] | None = None) -> T | None:
    """Loads a file of asv, or returns None if it is missing. If `renamed_files` is given, a broken file is renamed and
    counts as missing, and its new path is added to this list.
    """
    # Wait longer before renaming: a suspended writer would continue to write into the renamed file.
    max_retry_seconds = _MAX_READ_RETRY_SECONDS if renamed_files is None else _SETTLED_FILE_SECONDS
    try:
        return read_settled_file(load, path, max_retry_seconds)
    except AsvFileAbsent:
        return None
    except AsvFileBroken:
        if renamed_files is None:
            raise
        renamed_files.append(rename_broken_file(path))
        return None


def make_benchmark_definition(series: Series) -> dict[str, Any]:
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
    """Returns the definitions of benchmarks in benchmarks.json, by name. If asv would fail on one of them, the whole
    file counts as broken.
    """
    content = read_versioned_json_object(path, BENCHMARKS_FILE_VERSION)
    for name, definition in content.items():
        if (
            not isinstance(definition, dict)
            or definition.get("name") != name
            or not are_param_lists(definition.get("params"))
        ):
            raise AsvFileBroken(f"{path} is broken: the benchmark {name!r:.120} has no name and params.")
    return content


def merge_benchmarks(old: Mapping[str, Any], series: Iterable[Series]) -> dict[str, Any]:
    """Returns the old definitions of benchmarks, and those of the series. If the old and the new definition of a
    series have equal parameters, version and unit, the old one stays.
    """
    new_benchmark_definitions = {metric.name: make_benchmark_definition(metric) for metric in series}
    unchanged_benchmark_names = {
        name
        for name in new_benchmark_definitions
        if name in old and all(old[name].get(key) == new_benchmark_definitions[name][key] for key in _COMPARED_FIELDS)
    }
    return {
        **old,
        **{
            name: definition
            for name, definition in new_benchmark_definitions.items()
            if name not in unchanged_benchmark_names
        },
    }


def save_benchmarks(path: Path, benchmarks: Mapping[str, Any]) -> None:
    write_object(path, {**benchmarks, "version": BENCHMARKS_FILE_VERSION}, _JSON_INDENT)


def load_asv_machine(path: Path) -> dict[str, Any]:
    content = read_versioned_json_object(path, MACHINE_FILE_VERSION)
    if not isinstance(content.get("machine"), str):
        raise AsvFileBroken(f"{path} is broken: it has no field 'machine'.")
    return content


def merge_asv_machine(old: Mapping[str, Any], new: Mapping[str, Scalar | None]) -> dict[str, Any]:
    """Returns the old facts of a machine, updated with the new ones. New facts that are None are left out."""
    return {**old, **{key: value for key, value in new.items() if value is not None}}


def save_machine(path: Path, machine: Mapping[str, Any]) -> None:
    write_object(path, {**machine, "version": MACHINE_FILE_VERSION}, _JSON_INDENT)


RESULTS_VERSION = 2
_COMMIT_HASH_PATTERN = re.compile(r"[0-9a-f]{8,64}")
_TYPE_BY_FIELD: Mapping[str, type] = {
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
# asv also reads files without these fields.
_OPTIONAL_FIELDS = ("env_vars", "durations")


@dataclass(frozen=True)
class ResultsFile:
    """A results file of asv. `date` is the date of the commit, in ms since 1970. Files with different `params` or
    `env_vars` belong to different series of asv.

    `unknown_fields` are fields that fp8bench does not know. `unreadable_rows` have one sentence each in `troubles`.
    Unknown fields are written back unchanged, and so are unreadable rows, unless `rows` has a row of the same name.
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
    unknown_fields: Mapping[str, Any] = field(default_factory=dict)
    unreadable_rows: Mapping[str, Any] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()


def load_results(path: Path) -> ResultsFile:
    """Loads a results file. Raises AsvFileError or one of its subclasses if asv would not read the file or would fail
    on it.
    """
    content = read_versioned_json_object(path, RESULTS_VERSION)
    try:
        return _parse_results(content, path)
    except MalformedValueError as error:
        raise AsvFileBroken(f"{path} is broken: {error}.") from None


def save_results(path: Path, file: ResultsFile) -> None:
    """Replaces a results file atomically. Statistics and durations have 5 digits, as in asv's files."""
    rows = {name: write_row(row, file.columns) for name, row in file.rows.items()}
    converted_file_fields = {
        "result_columns": file.columns,
        "results": rows | {k: v for k, v in file.unreadable_rows.items() if k not in rows},
    }
    # asv writes the fields in this order.
    content = {
        key: converted_file_fields[key] if key in converted_file_fields else getattr(file, key)
        for key in _TYPE_BY_FIELD
    }
    write_object(path, {**content, **file.unknown_fields, "version": RESULTS_VERSION})


def _parse_results(content: Mapping[str, Any], path: Path) -> ResultsFile:
    content = {**{key: {} for key in _OPTIONAL_FIELDS}, **content}
    _check_result_fields(content, path)
    columns = tuple(content["result_columns"])
    # Refuse unknown columns, because saving the file would lose their values.
    if not all(column in COLUMNS for column in columns):
        raise MalformedValueError(f"'result_columns' is {shown(columns)}, expected columns of asv")
    rows: dict[str, AsvRow] = {}
    unreadable_rows: dict[str, Any] = {}
    troubles = []
    for name, cells in content["results"].items():
        try:
            rows[name] = read_row(columns, cells)
        except MalformedValueError as error:
            # Drop cells beyond the last column: writing the file again may add columns, which would get them.
            unreadable_rows[name] = cells[: len(columns)] if isinstance(cells, list) else cells
            troubles.append(f"the row {name!r:.120} was left out ({error})")
    return ResultsFile(
        **{key: content[key] for key in _TYPE_BY_FIELD if key not in ("result_columns", "results")},
        rows=rows,
        columns=columns + tuple(column for column in COLUMNS if column not in columns),
        unknown_fields={key: value for key, value in content.items() if key not in _TYPE_BY_FIELD},
        unreadable_rows=unreadable_rows,
        troubles=tuple(troubles),
    )


def _check_result_fields(content: Mapping[str, Any], path: Path) -> None:
    """Raises MalformedValueError if asv would ignore a results file or fail on it, because a field is missing or
    wrong.
    """
    for key, kind in _TYPE_BY_FIELD.items():
        if key not in content:
            raise MalformedValueError(f"it has no {key!r}")
        if type(content[key]) is not kind:
            raise MalformedValueError(f"{key!r} is {shown(content[key])}, expected {kind.__name__}")
    if not isinstance(content["params"].get("machine"), str):
        raise MalformedValueError("its 'params' have no field 'machine'")
    commit = content["commit_hash"]
    if not _COMMIT_HASH_PATTERN.fullmatch(commit):
        raise MalformedValueError(f"its commit {commit!r:.80} is not a hash")
    if not path.name.startswith(f"{commit[:8]}-"):
        raise MalformedValueError(f"its name does not start with its commit, {commit[:8]}-")
