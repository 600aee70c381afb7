"""Reads and writes run files: `<store>/runs/<machine>/<utc>-<commit8>-<id>.jsonl`, append-only, one per run.

The first line is the header. Records, notes, resumptions and an end follow. Broken lines and lines of unknown kinds
are left out and reported. docs/run-format.md describes the lines.

The records of a group are written through to the disk before the next group starts. The file is locked while it is
written, so that two processes never write one run and a run can find other running ones. A kill at any moment leaves
a readable file: it is created with its header, and readers skip a line that was cut short.
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
from fp8bench.store.kept_lines import (
    Content,
    FileLines,
    UnknownKind,
    check_schema,
    process_lines,
    read_file_lines,
    refuse_newer,
)

# Counts of nanoseconds, bytes and other units are valid below this number.
_MAX_COUNT = 1 << 62


def explain_invalid_record(record: Record) -> str:
    """Returns why a record's numbers cannot have been measured. Returns '' if they can."""
    work_numbers = (record.work.flops, record.work.bytes, record.work.least_memory)
    if not all(0 <= number < math.inf for number in work_numbers) or not 0 <= record.work.tokens < _MAX_COUNT:
        return "its work is not a valid count"
    recorded_timings = [timing for timing in (record.timing, record.control, record.paired_with) if timing is not None]
    return next(filter(None, map(_explain_invalid_timing, recorded_timings)), "")


def _explain_invalid_timing(timing: Timing) -> str:
    phases = timing.segments.phases
    cells = len(phases)
    if len(timing.segments.blocks) != cells or not set(phases) <= set(CELL_PHASES):
        return "its cells have unknown phases"
    if len({slot.round for slot in timing.slots}) != len(timing.slots):
        return "two slots have the same round"
    calls = list(chain.from_iterable(slot.calls_ns for slot in timing.slots))
    if not all(slot.calls_ns for slot in timing.slots) or not set(map(len, calls)) <= {cells}:
        return f"a step does not have the {cells} cells of its segments"
    if calls and (min(map(min, calls)) < 0 or max(map(max, calls)) >= _MAX_COUNT or not all(map(any, calls))):
        return "a step has a time of 0, or more than a clock can count"
    for slot in timing.slots:
        clocks = (slot.wall_seconds, slot.cpu_seconds, slot.host_seconds)
        optional_clocks = (slot.thread_seconds, slot.stolen_seconds, slot.waited_seconds, slot.clock)
        if not all(clock is None or 0 <= clock < math.inf for clock in (*clocks, *optional_clocks)):
            return "a slot has invalid times"
    return ""


@dataclass
class _RunReading:
    """The values that were read from the lines of a run file so far."""

    run: Run | None = None
    records: list[Record] = field(default_factory=list)
    resumptions: list[Resumption] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    finished: bool = False


def load_run(path: Path) -> Run:
    """Reads a run file. Broken lines are described in `troubles`. A missing header is inferred from the records.

    Raises StoreError for a file of a newer version, and for a file without a header or a record.
    """
    return load_run_with_lines(path)[0]


def load_run_with_lines(path: Path) -> tuple[Run, FileLines]:
    """Reads a run file like load_run, and also returns its lines."""
    file_lines = read_file_lines(path, "the run file")
    if not (file_lines.lines or file_lines.broken):
        raise StoreError(f"{path} is not a run file: it is empty.")
    refuse_newer(file_lines, path)
    header, run, reason = _find_header(file_lines, path)
    reading = _RunReading(run)
    reading.troubles += process_lines(file_lines, partial(_add_line, reading), header)
    if run is None:
        header_problem = f"line {header}, the header, is broken ({reason})" if header else ""
        if not reading.records:
            raise StoreError(f"{path} is not a run file: {header_problem or 'it has no header'}.")
        reading.troubles.insert(
            0, f"{header_problem or 'the header is missing'}: the request, plan and environment are lost"
        )
    return _to_run(reading, path), file_lines


def load_header(path: Path) -> Run:
    """Reads a run without its records, from the first line of its file. If that line is not a header, reads the whole
    file. Raises StoreError like load_run.
    """
    try:
        with open_file(path) as file:
            content, _ = unsealed_line(file.readline().removeprefix(b"\xef\xbb\xbf"))
        if "schema" in content:
            return replace(_parse_header(content, path), path=str(path))
    except OSError as error:
        raise RunNotFound(f"the run file {path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        pass
    return load_run(path)


def _find_header(file_lines: FileLines, path: Path) -> tuple[int, Run | None, str]:
    """Returns the number of the first line that is a header, the run that it describes, and ''. Without a header,
    returns the number of the line that was probably the header (0 for none), None, and what is wrong with that line.
    """
    suspects: list[tuple[int, None, str]] = [(broken.number, None, broken.why) for broken in file_lines.broken]
    for number, content in file_lines.lines:
        if "schema" in content:
            try:
                return number, _parse_header(content, path), ""
            except ValueError as error:
                suspects.append((number, None, str(error)[:200]))
    # The header was probably the broken line with the word "schema". Without such a line, it was the first line.
    start_by_line = {broken.number: broken.begins for broken in file_lines.broken}
    for suspect in sorted(suspects):
        if '"schema"' in start_by_line.get(suspect[0], '"schema"'):
            return suspect
    first_line = min([*start_by_line, *dict(file_lines.lines)], default=0)
    return next((suspect for suspect in suspects if suspect[0] == first_line), (0, None, ""))


def _add_line(reading: _RunReading, content: Content) -> None:
    """Adds the value of a line. Raises Malformed or UnknownKind for a line without a value."""
    if "record" in content:
        record = decode(Record, content["record"])
        if reason := explain_invalid_record(record):
            raise Malformed(f"Record: {reason}")
        reading.records.append(record)
    elif "resumed" in content:
        resumption = decode(Resumption, content["resumed"])
        # A resumption measures an incomplete group again. Drop its earlier records, because a group must not mix
        # records of two sessions.
        if reading.run is not None:
            incomplete = find_incomplete_groups(replace(reading.run, records=tuple(reading.records)))
            remeasured = set(chain.from_iterable(map(_case_ids, incomplete)))
            reading.records = [record for record in reading.records if record.case.id not in remeasured]
        reading.resumptions.append(resumption)
        reading.finished = False
    elif "note" in content:
        reading.notes.append(decode(str, content["note"]))
    elif "end" in content:
        if content["end"] not in ("finished", "interrupted"):
            raise Malformed("its end is of an unknown kind")
        reading.finished = content["end"] == "finished"
    elif "schema" in content:
        raise Malformed("it is an invalid or second header")
    else:
        raise UnknownKind


def _case_ids(group: Group) -> list[str]:
    return [planned.case.id for planned in group.cases]


def _to_run(reading: _RunReading, path: Path) -> Run:
    """Returns the run with the newest record of each case, in the order of the plan."""
    # 1. Without a header, infer the plan from the records.
    run = reading.run
    if run is None:
        suites = ",".join(dict.fromkeys(record.case.workload for record in reading.records))
        plan = infer_plan(reading.records)
        run = Run(path.stem.rpartition("-")[2], "", "", Request(suites), plan, Environment({}), ())
    # 2. If a case was measured again, use its newest record.
    order_by_case = {case: index for index, case in enumerate(chain.from_iterable(map(_case_ids, run.plan)))}
    latest_by_case = {record.case.id: record for record in reading.records}
    sorted_records = sorted(
        latest_by_case.values(), key=lambda record: order_by_case.get(record.case.id, len(order_by_case))
    )
    return replace(
        run,
        records=tuple(sorted_records),
        path=str(path),
        finished=reading.finished,
        troubles=tuple(reading.troubles),
        notes=tuple(reading.notes),
        resumptions=tuple(reading.resumptions),
    )


def _parse_header(content: Content, path: Path) -> Run:
    check_schema(content, path)
    run = decode(Run, content.get("header"))
    if not all(0 <= group.reference < len(group.cases) for group in run.plan):
        raise Malformed("a group's reference is not among its cases")
    return run


def find_incomplete_groups(run: Run) -> tuple[Group, ...]:
    """Returns the groups of the plan that lack records."""
    measured_ids = {record.case.id for record in run.records}
    return tuple(group for group in run.plan if not measured_ids.issuperset(_case_ids(group)))


def infer_plan(records: Sequence[Record]) -> Plan:
    """Infers the plan of a run from its records. Cases with the same setting form a group."""
    by_setting: dict[str, list[Record]] = {}
    for record in records:
        by_setting.setdefault(record.case.setting, []).append(record)
    groups = []
    for members in by_setting.values():
        cases = []
        for record in members:
            skip_reason = record.reason if record.status is Status.SKIPPED else ""
            cases.append(PlannedCase(record.case, record.support, record.work, skip_reason))
        reference = next((index for index, record in enumerate(members) if record.is_reference), 0)
        groups.append(Group(tuple(cases), reference))
    return Plan(tuple(groups))


def file_name(run: Run) -> str:
    """Returns the name of a run's file: start, commit and id. Runs of a commit are found by this name."""
    commit = str(run.environment.get("commit") or "nocommit")[:8]
    return f"{stamp(run.started)}-{commit}-{run.id}.jsonl"


def folder_name(run: Run) -> str:
    return to_folder_name(str(run.environment.get("machine") or ""))


def to_folder_name(machine: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", machine).strip(".") or "unknown"


_FIELDS_NOT_IN_HEADER = {"records", "path", "finished", "troubles", "notes", "resumptions"}
MIN_FREE_BYTES = 4 << 20  # Runs need at least this many free bytes. This is less than a short run writes.


@dataclass
class RunWriter(LineWriter):
    """An open run file, locked until it is closed."""

    called: str = "the run file"

    def append(self, records: Sequence[Record]) -> None:
        self._append_numbered_lines([{"record": encode(record)} for record in records])


def check_store(store: Path) -> None:
    """Raises StoreError if runs cannot be written to the store, or if little space is left."""
    folder = store / "runs"
    with keeping(f"the store {store}", "Choose another --store DIR."):
        make_store(store)
        try_writing(folder)
        free_bytes = shutil.disk_usage(folder).free
    if free_bytes < MIN_FREE_BYTES:
        raise StoreError(
            f"the store {store} has only {free_bytes} bytes left. Make room, or choose another --store DIR."
        )


def start_run(run: Run, store: Path) -> RunWriter:
    """Creates the run's file with its header in one step."""
    path = store / "runs" / folder_name(run) / file_name(run)
    header = {
        field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name not in _FIELDS_NOT_IN_HEADER
    }
    return RunWriter.start(path, {"schema": SCHEMA, "header": header})


def reopen_run(path: Path, resumption: Resumption) -> RunWriter:
    """Opens a run's file for appending. A last line that was cut short gets a line end."""
    try:
        file = open_file(path, "a+b")
        lock_run(file, path)
        end_line(file)
    except OSError as error:
        raise StoreError(f"the run file {path} cannot be written ({error.strerror}).") from None
    writer = RunWriter(path, file)
    writer._append_numbered_lines([{"resumed": encode(resumption)}])
    return writer


def lock_run(file: IO[Any], path: Path) -> None:
    """Locks the file if the file system supports it. Raises StoreError if another process has locked it."""
    if not lock(file, 0):
        file.close()
        raise StoreError(f"another process is writing the run {path.stem}. Wait for its end, or start another run.")
