"""Run files: `<store>/runs/<machine>/<utc>-<commit8>-<id>.jsonl`, append-only, one for each run.

The first line is the header; records, notes, resumptions and an end follow. Broken lines, and those of unknown kinds,
are left out and named. docs/run-format.md describes the lines.

A group is through to the disk before the next one starts. The file is locked while it is written, so that no two
processes write one run, and a run can tell whether another one is measuring. A kill at any moment leaves a file that
can be read: it appears with its header, and readers skip a line that was cut short.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.files import LineWriter, end_line, keeping, lock, make_store, open_file, try_writing, unsealed_line
from fp8bench.model import (
    CELL_PHASES,
    Environment,
    Group,
    Plan,
    PlannedCase,
    Record,
    Request,
    Resumption,
    Run,
    Status,
    Timing,
)
from fp8bench.model.codec import SCHEMA, Malformed, decode, encode
from fp8bench.model.file_names import stamp
from fp8bench.store.kept_lines import Content, FileLines, UnknownKind, check_schema, lines_of, refuse_newer, take_lines

# For nanoseconds, bytes and other counts.
_MOST = 1 << 62


def why_unsound(record: Record) -> str:
    """Returns why a record's samples cannot be a clock's; '' if they can."""
    numbers = (record.work.flops, record.work.bytes, record.work.least_memory)
    if not all(map(_is_time, numbers)) or not 0 <= record.work.tokens < _MOST:
        return "its work is no count"
    timings = [timing for timing in (record.timing, record.control, record.paired_with) if timing is not None]
    return next(filter(None, map(_why_unsound_timing, timings)), "")


def _is_time(value: float) -> bool:
    return 0 <= value < math.inf


def _why_unsound_timing(timing: Timing) -> str:
    phases = timing.segments.phases
    cells = len(phases)
    if len(timing.segments.blocks) != cells or not set(phases) <= set(CELL_PHASES):
        return "its cells are of no known phases"
    if len({slot.round for slot in timing.slots}) != len(timing.slots):
        return "two slots have the same round"
    calls = list(chain.from_iterable(slot.calls_ns for slot in timing.slots))
    if not all(slot.calls_ns for slot in timing.slots) or not set(map(len, calls)) <= {cells}:
        return f"a step has not the {cells} cells of its segments"
    if calls and (min(map(min, calls)) < 0 or max(map(max, calls)) >= _MOST or not all(map(any, calls))):
        return "a step took no time, or more than any clock counts"
    for slot in timing.slots:
        clocks = (slot.wall_seconds, slot.cpu_seconds, slot.host_seconds)
        optional = (slot.thread_seconds, slot.stolen_seconds, slot.waited_seconds, slot.clock)
        if not all(clock is None or 0 <= clock < math.inf for clock in (*clocks, *optional)):
            return "a slot's clocks have no times"
    return ""


@dataclass
class _RunReading:
    """The values of the lines read until now."""

    run: Run | None = None
    records: list[Record] = field(default_factory=list)
    resumptions: list[Resumption] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    finished: bool = False


def load_run(path: Path) -> Run:
    """Reads a run file. Broken lines are named in `troubles`; without a header the records stand alone.

    Raises StoreError for a file of a newer version, and for one without a header or a record.
    """
    return load_sheet(path)[0]


def load_sheet(path: Path) -> tuple[Run, FileLines]:
    """Like load_run, with the lines of the file."""
    sheet = lines_of(path, "the run file")
    if not (sheet.lines or sheet.broken):
        raise StoreError(f"{path} is not a run file: it is empty.")
    refuse_newer(sheet, path)
    header, run, reason = _find_header(sheet, path)
    reading = _RunReading(run)
    reading.troubles += take_lines(sheet, partial(_take, reading), header)
    if run is None:
        broken = f"line {header}, the header, is broken ({reason})" if header else ""
        if not reading.records:
            raise StoreError(f"{path} is not a run file: {broken or 'it has no header'}.")
        reading.troubles.insert(0, f"{broken or 'the header is gone'}: what was asked, planned and run on is lost")
    return _to_run(reading, path), sheet


def load_head(path: Path) -> Run:
    """Reads a run without its records, from the first line if that is the header. Raises StoreError as load_run."""
    try:
        with open_file(path) as file:
            content, _ = unsealed_line(file.readline().removeprefix(b"\xef\xbb\xbf"))
        if "schema" in content:
            return replace(_header(content, path), path=str(path))
    except OSError as error:
        raise RunNotFound(f"the run file {path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        pass
    return load_run(path)


def _find_header(sheet: FileLines, path: Path) -> tuple[int, Run | None, str]:
    """Returns the number of the first line that is a header, wherever it is, and the run that it begins.

    Without one: the number of the line that probably was it (0 for none), None, and what is wrong with it.
    """
    suspects: list[tuple[int, None, str]] = [(broken.number, None, broken.why) for broken in sheet.broken]
    for number, content in sheet.lines:
        if "schema" in content:
            try:
                return number, _header(content, path), ""
            except ValueError as error:
                suspects.append((number, None, str(error)[:200]))
    # A broken line that still has the word "schema" was the header; else the first line was.
    begins = {broken.number: broken.begins for broken in sheet.broken}
    for suspect in sorted(suspects):
        if '"schema"' in begins.get(suspect[0], '"schema"'):
            return suspect
    first = min([*begins, *dict(sheet.lines)], default=0)
    return next((suspect for suspect in suspects if suspect[0] == first), (0, None, ""))


def _take(reading: _RunReading, content: Content) -> None:
    """Adds the value of a line; raises Malformed or UnknownKind for a line that has none."""
    if "record" in content:
        record = decode(Record, content["record"])
        if reason := why_unsound(record):
            raise Malformed(f"Record: {reason}")
        reading.records.append(record)
    elif "resumed" in content:
        resumption = decode(Resumption, content["resumed"])
        # Groups without all records are measured again, and a group must not have records of two sittings.
        if reading.run is not None:
            cut = missing_groups(replace(reading.run, records=tuple(reading.records)))
            remeasured = set(chain.from_iterable(map(_case_ids, cut)))
            reading.records = [record for record in reading.records if record.case.id not in remeasured]
        reading.resumptions.append(resumption)
        reading.finished = False
    elif "note" in content:
        reading.notes.append(decode(str, content["note"]))
    elif "end" in content:
        if content["end"] not in ("finished", "interrupted"):
            raise Malformed("an end of an unknown kind")
        reading.finished = content["end"] == "finished"
    elif "schema" in content:
        raise Malformed("an invalid header, or a second one")
    else:
        raise UnknownKind


def _case_ids(group: Group) -> list[str]:
    return [planned.case.id for planned in group.cases]


def _to_run(reading: _RunReading, path: Path) -> Run:
    """Returns the run, with the newest record of each case in the order of the plan."""
    # 1. Without a header, the records show what was planned.
    run = reading.run
    if run is None:
        suites = ",".join(dict.fromkeys(record.case.workload for record in reading.records))
        plan = plan_of(reading.records)
        run = Run(path.stem.rpartition("-")[2], "", "", Request(suites), plan, Environment({}), ())
    # 2. A case that was measured again counts with its newest record.
    places = {case: place for place, case in enumerate(chain.from_iterable(map(_case_ids, run.plan)))}
    latest = {record.case.id: record for record in reading.records}
    ordered = sorted(latest.values(), key=lambda record: places.get(record.case.id, len(places)))
    return replace(
        run,
        records=tuple(ordered),
        path=str(path),
        finished=reading.finished,
        troubles=tuple(reading.troubles),
        notes=tuple(reading.notes),
        resumptions=tuple(reading.resumptions),
    )


def _header(content: Content, path: Path) -> Run:
    check_schema(content, path)
    run = decode(Run, content.get("header"))
    if not all(0 <= group.reference < len(group.cases) for group in run.plan):
        raise Malformed("the reference of a group is not among its cases")
    return run


def missing_groups(run: Run) -> tuple[Group, ...]:
    """Returns the groups of the plan that lack records."""
    measured = {record.case.id for record in run.records}
    return tuple(group for group in run.plan if not measured.issuperset(_case_ids(group)))


def plan_of(records: Sequence[Record]) -> Plan:
    """Returns the plan that records alone show: groups by their settings."""
    by_setting: dict[str, list[Record]] = {}
    for record in records:
        by_setting.setdefault(record.case.setting, []).append(record)
    groups = []
    for members in by_setting.values():
        cases = []
        for record in members:
            skipped = record.reason if record.status is Status.SKIPPED else ""
            cases.append(PlannedCase(record.case, record.support, record.work, skipped))
        reference = next((place for place, record in enumerate(members) if record.is_reference), 0)
        groups.append(Group(tuple(cases), reference))
    return Plan(tuple(groups))


def file_name(run: Run) -> str:
    """Returns the name of a run's file: start, commit, id. A commit's runs are found by it."""
    commit = str(run.environment.get("commit") or "nocommit")[:8]
    return f"{stamp(run.started)}-{commit}-{run.id}.jsonl"


def folder_name(run: Run) -> str:
    return safe_folder(str(run.environment.get("machine") or ""))


def safe_folder(machine: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", machine).strip(".") or "unknown"


_HEADER_LEFT_OUT = {"records", "path", "finished", "troubles", "notes", "resumptions"}
LEAST_FREE_BYTES = 4 << 20  # a short run needs more


@dataclass
class RunWriter(LineWriter):
    """An open run file, locked until it is closed."""

    called: str = "the run file"

    def append(self, records: Sequence[Record]) -> None:
        self._lines([{"record": encode(record)} for record in records])


def check_store(store: Path) -> None:
    """Raises StoreError if runs cannot be written there, or there is hardly any room."""
    folder = store / "runs"
    with keeping(f"the store {store}", "Choose another --store DIR."):
        make_store(store)
        try_writing(folder)
        free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise StoreError(f"the store {store} has only {free} bytes left. Make room, or choose another --store DIR.")


def start_run(run: Run, store: Path) -> RunWriter:
    """Creates the run's file with its header in one step."""
    path = store / "runs" / folder_name(run) / file_name(run)
    header = {
        field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name not in _HEADER_LEFT_OUT
    }
    return RunWriter.start(path, {"schema": SCHEMA, "header": header})


def reopen_run(path: Path, resumption: Resumption) -> RunWriter:
    """Opens a run's file to go on with it; a last line that was cut short stays alone on its line."""
    try:
        file = open_file(path, "a+b")
        lock_run(file, path)
        end_line(file)
    except OSError as error:
        raise StoreError(f"the run file {path} cannot be written ({error.strerror}).") from None
    writer = RunWriter(path, file)
    writer._lines([{"resumed": encode(resumption)}])
    return writer


def lock_run(file: IO[Any], path: Path) -> None:
    """Locks the file, where the file system has locks. Raises StoreError where another process has it."""
    if not lock(file, 0):
        file.close()
        raise StoreError(f"another process is writing the run {path.stem}. Wait for its end, or start another run.")
