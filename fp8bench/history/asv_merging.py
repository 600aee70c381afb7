"""asv's results of two files, or of two folders, put together: what is here counts, what is missing is taken.

An interpreter that counts as another is the same matter within one folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8bench.errors import AsvFileAbsent, AsvFileBroken, AsvFileError
from fp8bench.history.asv_files import set_aside, settled_read
from fp8bench.history.asv_lists import load_benchmarks, load_machine, save_benchmarks, save_machine
from fp8bench.history.asv_results import ResultsFile, load_results, save_results
from fp8bench.history.asv_rows import NOT_MEASURED, Row, by_combination, combinations, is_measured

_LISTS = ("benchmarks.json", "machine.json")
# What makes a machine another one under the same name.
_HARDWARE = ("arch", "cpu", "num_cpu", "gpu")
_MOST_COMBINATIONS = 100_000


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
        for path in sorted(folder.glob("*.json")):
            if path.name not in _LISTS:
                _take_file(ours, path, machine, taken)
    _take_benchmarks(ours / "benchmarks.json", theirs / "benchmarks.json", taken)
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
    if combinations(params) > _MOST_COMBINATIONS:
        return ours
    own, other = by_combination(ours), by_combination(theirs)
    known = {**own, **{texts: one for texts, one in other.items() if not is_measured(own.get(texts, NOT_MEASURED))}}
    cells = [known.get(texts, NOT_MEASURED) for texts in itertools.product(*params)]
    values, stats, samples = zip(*cells, strict=True) if cells else ((), (), ())
    return replace(
        ours, params=params, values=values, stats=stats, samples=samples,
        started_at=ours.started_at if ours.started_at is not None else theirs.started_at,
    )  # fmt: skip


def standing(path: Path) -> ResultsFile | None:
    """What stands in a results file of ours. One that is broken for good is set aside and counts as absent."""
    try:
        return settled_read(load_results, path)
    except AsvFileAbsent:
        return None
    except AsvFileBroken:
        set_aside(path)
        return None


def _take_file(ours: Path, path: Path, machine: Mapping[str, Any], taken: Taken) -> None:
    """One file of theirs; `machine` is what we call its machine, so that one machine has one line."""
    target = ours / path.parent.name / path.name
    try:
        theirs = settled_read(load_results, path)
        if theirs.params["machine"] != path.parent.name:
            raise AsvFileError(f"{path} lies in the folder of another machine than it names.")
        here = standing(target)
        own = replace(theirs, params={**theirs.params, **machine})
        merged = own if here is None else merge_files(here, own)
        if here is None or merged != here:
            save_results(target, merged)
            taken.files.append(target)
    except AsvFileError as error:
        taken.failed.append(str(error))
        return
    taken.notes += [f"{path}: {trouble}" for trouble in theirs.troubles]


def _take_machine(ours: Path, theirs: Path, taken: Taken) -> Mapping[str, Any]:
    """The machine.json of one machine; returns what stands in ours then."""
    try:
        other = _known(load_machine, theirs / "machine.json")
        here = _known(load_machine, ours / "machine.json")
        if other.get("machine", theirs.name) != theirs.name:
            raise AsvFileError(f"{theirs / 'machine.json'} is of another machine than its folder, {theirs.name}.")
        new = {**other, **here}
        if new != here:
            save_machine(ours / "machine.json", new)
    except AsvFileError as error:
        taken.failed.append(str(error))
        return {}
    for key in _HARDWARE:
        if key in other and key in here and other[key] != here[key]:
            taken.notes.append(
                f"machine {theirs.name} has the {key} {other[key]!r:.80} there and {here[key]!r:.80} here. To asv, two "
                "machines of one name are one; give one of them a name of its own in its ~/.asv-machine.json"
            )
    return new


def _take_benchmarks(ours: Path, theirs: Path, taken: Taken) -> None:
    try:
        here = _known(load_benchmarks, ours)
        new = {**_known(load_benchmarks, theirs), **here}
        if new != here:
            save_benchmarks(ours, new)
    except AsvFileError as error:
        taken.failed.append(str(error))


def _known(load: Any, path: Path) -> Mapping[str, Any]:
    """What is in a list; nothing without the file."""
    try:
        content: Mapping[str, Any] = settled_read(load, path)
    except AsvFileAbsent:
        return {}
    return content
