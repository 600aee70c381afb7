"""Reads and writes run files: `<store>/runs/<machine>/<utc>-<commit8>-<id>.jsonl`, append-only, one per run.

The first line is the header. Records, notes, resumptions and an end follow. Broken lines and lines of unknown kinds
are left out and reported. docs/run-format.md describes the lines.

The records of a group are synced to the disk before the next group starts. A run locks its file until it ends, so
that two processes never write one run, and so that a run can find other runs that are being measured. A process that
is killed at any moment leaves a readable file: the file is created with its header, and readers skip a line that was
cut short.
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
from fp8bench.files import (
    LineWriter,
    complete_last_line,
    convert_write_errors,
    lock,
    make_store,
    open_file,
    parse_checksummed_line,
    try_writing,
)
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
from fp8bench.model.codec import SCHEMA, MalformedValueError, decode, encode
from fp8bench.model.file_names import format_start_time
from fp8bench.store.kept_lines import (
    FileLines,
    LineContent,
    UnknownKind,
    check_schema,
    process_line_contents,
    read_file_lines,
    refuse_newer,
)

# Counts of nanoseconds, bytes or tokens are invalid from this number on.
_MIN_INVALID_COUNT = 1 << 62


def explain_invalid_record(record: Record) -> str:
    """Returns why the numbers of a record cannot have been measured. Returns '' if they are possible."""
    work_amounts = (record.work.flops, record.work.bytes, record.work.least_memory)
    if not all(0 <= number < math.inf for number in work_amounts) or not 0 <= record.work.tokens < _MIN_INVALID_COUNT:
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
        return f"a step does not have a time for each of the {cells} cells of its segments"
    if calls and (min(map(min, calls)) < 0 or max(map(max, calls)) >= _MIN_INVALID_COUNT or not all(map(any, calls))):
        return "a step has a time of 0, or more than a clock can count"
    for slot in timing.slots:
        clocks = (slot.wall_seconds, slot.cpu_seconds, slot.host_seconds)
        optional_clocks = (slot.thread_seconds, slot.stolen_seconds, slot.waited_seconds, slot.clock)
        if not all(clock is None or 0 <= clock < math.inf for clock in (*clocks, *optional_clocks)):
            return "a slot has invalid times"
    return ""


@dataclass
class _RunReading:
    """The contents of a run file, as far as its lines have been read."""

    run: Run | None = None
    records: list[Record] = field(default_factory=list)
    resumptions: list[Resumption] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    finished: bool = False


def load_run(path: Path) -> Run:
    """Reads a run file. The run's `troubles` describe broken lines. If the header is missing, the plan is inferred from
    the records.

    Raises StoreError for a file of a newer version, and for a file with neither a header nor a record.
    """
    return load_run_with_lines(path)[0]


def load_run_with_lines(path: Path) -> tuple[Run, FileLines]:
    """Reads a run file like load_run, and also returns its lines."""
    file_lines = read_file_lines(path, "the run file")
    if not (file_lines.lines or file_lines.broken):
        raise StoreError(f"{path} is not a run file: it is empty.")
    refuse_newer(file_lines, path)
    header, run, reason = _find_run_header(file_lines, path)
    reading = _RunReading(run)
    reading.troubles += process_line_contents(file_lines, partial(_add_run_line, reading), header)
    if run is None:
        run_header_problem = f"line {header}, the header, is broken ({reason})" if header else ""
        if not reading.records:
            raise StoreError(f"{path} is not a run file: {run_header_problem or 'it has no header'}.")
        reading.troubles.insert(
            0, f"{run_header_problem or 'the header is missing'}: the request, plan and environment are lost"
        )
    return _build_run_from_reading(reading, path), file_lines


def load_header(path: Path) -> Run:
    """Reads a run without its records, from the first line of its file. If the first line is not a header, reads the
    whole file. Raises StoreError like load_run.
    """
    try:
        with open_file(path) as file:
            content, _ = parse_checksummed_line(file.readline().removeprefix(b"\xef\xbb\xbf"))
        if "schema" in content:
            return replace(_parse_header(content, path), path=str(path))
    except OSError as error:
        raise RunNotFound(f"the run file {path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        pass
    return load_run(path)


def _find_run_header(file_lines: FileLines, path: Path) -> tuple[int, Run | None, str]:
    """Returns three values: the number of the header line, the run that it describes, and why the header is broken.

    With a valid header the reason is ''. With a broken header the run is None. If no line looks like a header, the
    number is 0.
    """
    suspected_header_lines: list[tuple[int, None, str]] = [
        (broken.number, None, broken.why) for broken in file_lines.broken
    ]
    for line_number, content in file_lines.lines:
        if "schema" in content:
            try:
                return line_number, _parse_header(content, path), ""
            except ValueError as error:
                suspected_header_lines.append((line_number, None, str(error)[:200]))
    # A damaged line that contains "schema" was probably the header. Without such a line, the first line was.
    start_text_by_line = {broken.number: broken.start_text for broken in file_lines.broken}
    for suspected_header_line in sorted(suspected_header_lines):
        if '"schema"' in start_text_by_line.get(suspected_header_line[0], '"schema"'):
            return suspected_header_line
    first_line = min([*start_text_by_line, *dict(file_lines.lines)], default=0)
    return next(
        (
            suspected_header_line
            for suspected_header_line in suspected_header_lines
            if suspected_header_line[0] == first_line
        ),
        (0, None, ""),
    )


def _add_run_line(reading: _RunReading, content: LineContent) -> None:
    """Adds the value in a line to what was read. Raises MalformedValueError for a wrong value, and UnknownKind for a
    line of an unknown kind.
    """
    if "record" in content:
        record = decode(Record, content["record"])
        if reason := explain_invalid_record(record):
            raise MalformedValueError(f"Record: {reason}")
        reading.records.append(record)
    elif "resumed" in content:
        resumption = decode(Resumption, content["resumed"])
        # A resumed run measures incomplete groups again. Drop their earlier records, because a group must not mix
        # records from before and after the interruption.
        if reading.run is not None:
            incomplete_groups = find_incomplete_groups(replace(reading.run, records=tuple(reading.records)))
            remeasured_ids = set(chain.from_iterable(map(_case_ids, incomplete_groups)))
            reading.records = [record for record in reading.records if record.case.id not in remeasured_ids]
        reading.resumptions.append(resumption)
        reading.finished = False
    elif "note" in content:
        reading.notes.append(decode(str, content["note"]))
    elif "end" in content:
        if content["end"] not in ("finished", "interrupted"):
            raise MalformedValueError("its end is of an unknown kind")
        reading.finished = content["end"] == "finished"
    elif "schema" in content:
        raise MalformedValueError("it is an invalid or second header")
    else:
        raise UnknownKind


def _case_ids(group: Group) -> list[str]:
    return [planned.case.id for planned in group.cases]


def _build_run_from_reading(reading: _RunReading, path: Path) -> Run:
    """Returns the run in a file's lines, with the newest record of each case, in the order of the plan."""
    # 1. Without a header, infer the plan from the records.
    run = reading.run
    if run is None:
        suites = ",".join(dict.fromkeys(record.case.workload for record in reading.records))
        plan = infer_plan(reading.records)
        run = Run(path.stem.rpartition("-")[2], "", "", Request(suites), plan, Environment({}), ())
    # 2. If a case was measured again, use its newest record.
    plan_order_by_id = {case: index for index, case in enumerate(chain.from_iterable(map(_case_ids, run.plan)))}
    record_by_case_id = {record.case.id: record for record in reading.records}
    # Cases outside of the plan come last.
    records_in_plan_order = sorted(
        record_by_case_id.values(), key=lambda record: plan_order_by_id.get(record.case.id, len(plan_order_by_id))
    )
    return replace(
        run,
        records=tuple(records_in_plan_order),
        path=str(path),
        finished=reading.finished,
        troubles=tuple(reading.troubles),
        notes=tuple(reading.notes),
        resumptions=tuple(reading.resumptions),
    )


def _parse_header(content: LineContent, path: Path) -> Run:
    check_schema(content, path)
    run = decode(Run, content.get("header"))
    if not all(0 <= group.reference < len(group.cases) for group in run.plan):
        raise MalformedValueError("a group's reference is not among its cases")
    return run


def find_incomplete_groups(run: Run) -> tuple[Group, ...]:
    """Returns the groups of the run's plan in which at least one case has no record."""
    measured_case_ids = {record.case.id for record in run.records}
    return tuple(group for group in run.plan if not measured_case_ids.issuperset(_case_ids(group)))


def infer_plan(records: Sequence[Record]) -> Plan:
    """Infers the plan of a run from its records. Cases with the same setting form a group."""
    records_by_setting: dict[str, list[Record]] = {}
    for record in records:
        records_by_setting.setdefault(record.case.setting, []).append(record)
    groups = []
    for members in records_by_setting.values():
        cases = []
        for record in members:
            skip_reason = record.reason if record.status is Status.SKIPPED else ""
            cases.append(PlannedCase(record.case, record.support, record.work, skip_reason))
        reference = next((index for index, record in enumerate(members) if record.is_reference), 0)
        groups.append(Group(tuple(cases), reference))
    return Plan(tuple(groups))


def make_run_file_name(run: Run) -> str:
    """Returns the name of a run's file: start, commit and id. Runs of a commit are found by this name."""
    commit = str(run.environment.get("commit") or "nocommit")[:8]
    return f"{format_start_time(run.started)}-{commit}-{run.id}.jsonl"


def folder_name(run: Run) -> str:
    return to_folder_name(str(run.environment.get("machine") or ""))


def to_folder_name(machine: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", machine).strip(".") or "unknown"


# Later lines of the file have these fields, or reading the file determines them.
_FIELDS_NOT_IN_HEADER = {"records", "path", "finished", "troubles", "notes", "resumptions"}
# A run refuses to start with fewer free bytes than this. A short run writes more.
MIN_FREE_BYTES = 4 << 20


@dataclass
class RunWriter(LineWriter):
    """An open run file, locked until it is closed."""

    called: str = "the run file"

    def append(self, records: Sequence[Record]) -> None:
        self._append_numbered_lines([{"record": encode(record)} for record in records])


def check_store(store: Path) -> None:
    """Raises StoreError if runs cannot be written to the store, or if little space is left."""
    folder = store / "runs"
    with convert_write_errors(f"the store {store}", "Choose another --store DIR."):
        make_store(store)
        try_writing(folder)
        free_bytes = shutil.disk_usage(folder).free
    if free_bytes < MIN_FREE_BYTES:
        raise StoreError(
            f"the store {store} has only {free_bytes} bytes left. Make room, or choose another --store DIR."
        )


def start_run(run: Run, store: Path) -> RunWriter:
    """Creates the file of a run, which never exists without its header."""
    path = store / "runs" / folder_name(run) / make_run_file_name(run)
    header = {
        field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name not in _FIELDS_NOT_IN_HEADER
    }
    return RunWriter.start(path, {"schema": SCHEMA, "header": header})


def reopen_run(path: Path, resumption: Resumption) -> RunWriter:
    """Opens a run's file for appending, and appends the resumption. If the last line was cut short, it gets a line
    end.
    """
    try:
        file = open_file(path, "a+b")
        lock_run(file, path)
        complete_last_line(file)
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
