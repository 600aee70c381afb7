"""The truth: one append-only JSONL file a run, `<store>/runs/<machine>/<utc>-<commit8>-<id>.jsonl`.

The first line is the header, then a record a line, then an end line; every line is flushed to the disk as soon as
it is known, so that a crash loses nothing that was finished. docs/run-format.md describes the lines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.history.codec import Malformed, decode, encode
from fp8bench.model import Record, Run

SCHEMA = 1
_HEADER_LEFT_OUT = {"records", "path", "finished", "troubles"}


@dataclass
class RunWriter:
    """An open run file."""

    path: Path
    _file: IO[str]

    def append(self, record: Record) -> None:
        """Write one record through to the disk."""
        self._line({"record": encode(record)})

    def finish(self, how: str) -> None:
        """Write the end line and close."""
        self._line({"end": how})
        self._file.close()

    def _line(self, value: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(
                f"the run file {self.path} cannot be written ({error.strerror}). What was finished before is in it; "
                "make room, or choose another --store DIR."
            ) from None


def check_store(store: Path) -> None:
    """Raise if runs cannot be written there; asked before anything is measured."""
    folder = store / "runs"
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("probe")
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"the store {store} cannot be written ({error.strerror}). Choose another --store DIR."
        ) from None


def start_run(run: Run, store: Path) -> RunWriter:
    """Create the run's file and write its header."""
    machine = _word(str(run.environment.get("machine") or "unknown"))
    commit = str(run.environment.get("commit") or "nocommit")[:8]
    stamp = re.sub(r"[-:]", "", run.started).partition("+")[0] + "Z"
    path = store / "runs" / machine / f"{stamp}-{commit}-{run.id}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("x", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"the run file {path} cannot be made ({error.strerror}). Choose another --store DIR."
        ) from None
    writer = RunWriter(path, file)
    header = {name.name: encode(getattr(run, name.name)) for name in fields(run) if name.name not in _HEADER_LEFT_OUT}
    writer._line({"schema": SCHEMA, "header": header})
    return writer


def _word(text: str) -> str:
    """A name that is safe as a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).strip(".") or "unknown"


def load_run(path: Path) -> Run:
    """Read a run file. Broken lines are left out and named in `troubles`; a broken header raises."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise RunNotFound(f"the run file {path} cannot be read ({error.strerror}).") from None
    run: Run | None = None
    records: list[Record] = []
    troubles: list[str] = []
    finished = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise Malformed("expected an object")
            if run is None:
                run = _header(content, path)
            elif "record" in content:
                records.append(_record(content["record"]))
            elif "end" in content:
                finished = content["end"] == "finished"
        except (ValueError, RecursionError) as error:
            if run is None:
                raise StoreError(f"{path} is no run file: its first line is broken ({str(error)[:200]}).") from None
            troubles.append(f"line {number} is broken and was left out ({str(error)[:120]})")
    if run is None:
        raise StoreError(f"{path} is no run file: it is empty.")
    return replace(run, records=tuple(records), path=str(path), finished=finished, troubles=tuple(troubles))


def _header(content: dict[str, Any], path: Path) -> Run:
    schema = content.get("schema")
    if not isinstance(schema, int):
        raise Malformed("it has no schema version")
    if schema > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer fp8bench (schema {schema}, this one reads {SCHEMA}). Upgrade it."
        )
    return decode(Run, content.get("header"))


def _record(plain: Any) -> Record:
    """A record whose samples fit their segments, which their types alone do not say."""
    record = decode(Record, plain)
    for timing in (record.timing, record.control, record.paired_with):
        cells = len(timing.segments.phases) if timing else 0
        if timing and any(len(call) != cells for slot in timing.slots for call in slot.calls_ns):
            raise Malformed(f"Record: a step has not the {cells} cells of its segments")
    return record


def run_files(store: Path) -> Iterator[Path]:
    """All run files of a store, newest first."""
    yield from sorted((store / "runs").glob("*/*.jsonl"), key=lambda path: path.name, reverse=True)


def find_run(word: str, store: Path) -> Path:
    """A run by path, file stem or id; the beginning of either will do if it is the only one. 'last' is the newest."""
    direct = Path(word)
    try:
        if direct.is_file():
            return direct
        files = list(run_files(store))
    except OSError as error:
        raise RunNotFound(f"looking for run {word!r:.80} in {str(store)!r:.80} failed ({error.strerror}).") from None
    if word == "last" and files:
        return files[0]
    exact = [path for path in files if word in (path.stem, path.stem.rpartition("-")[2])]
    found = exact or [
        path for path in files if word and (path.stem.startswith(word) or path.stem.rpartition("-")[2].startswith(word))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.stem for path in found[:5])
        raise RunNotFound(f"{word!r} fits {len(found)} runs ({names}). Give more of the name.")
    newest = f" The newest is {files[0].stem}." if files else " The store has no runs yet."
    raise RunNotFound(f"no run {word!r} in {store}.{newest} Give an id, a file's stem, a path, or 'last'.")
