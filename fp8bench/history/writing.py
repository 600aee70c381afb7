"""Writing the truth: one append-only file a run, every group through to the disk before the next one starts.

The file is locked while it is written, so that two processes never write the same run, and so that a run can tell
whether another one is measuring beside it. A kill at any moment leaves a file that can be read: the header appears
with the file's name, and a line that was cut short is skipped by readers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from fp8bench.codec import SCHEMA, encode
from fp8bench.errors import StoreError
from fp8bench.history.runs import run_files, store_of
from fp8bench.model import Record, Resumption, Run

_HEADER_LEFT_OUT = {"records", "path", "finished", "troubles", "notes", "resumptions"}
# Less than a short run needs; said before anything is measured.
LEAST_FREE_BYTES = 4 << 20
_LOOKED_AT = 100
_RECENT_SECONDS = 7 * 86400.0


@dataclass
class RunWriter:
    """An open run file, locked until it is closed."""

    path: Path
    _file: IO[str]

    def append(self, records: Sequence[Record]) -> None:
        """Write the records of one group through to the disk."""
        self._lines([{"record": encode(record)} for record in records])

    def note(self, text: str) -> None:
        """Write down something a reader of the run should know."""
        self._lines([{"note": text}])

    def finish(self, how: str) -> None:
        """Write the end line and close."""
        try:
            self._lines([{"end": how}])
        finally:
            self.close()

    def close(self) -> None:
        """Give the file and its lock back. May be called twice."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _lines(self, values: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n" for value in values)
        try:
            self._file.write(text)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(
                f"the run file {self.path} cannot be written ({error.strerror}). What was finished before is in it; "
                "make room, or choose another --store DIR."
            ) from None


def check_store(store: Path) -> None:
    """Raise if runs cannot be written there, or there is hardly any room; asked before anything is measured."""
    folder = store / "runs"
    probe = folder / f".probe-{secrets.token_hex(4)}"  # containers that share a store share process ids
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_text("probe")
        finally:  # a full disk has room for a name
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StoreError(
            f"the store {store} cannot be written ({error.strerror}). Choose another --store DIR."
        ) from None
    if free < LEAST_FREE_BYTES:
        raise StoreError(f"the store {store} has only {free} bytes left. Make room, or choose another --store DIR.")


def start_run(run: Run, store: Path) -> RunWriter:
    """Create the run's file with its header, in one step: nobody ever sees it without."""
    machine = _word(str(run.environment.get("machine") or "unknown"))
    path = store / "runs" / machine / file_name(run)
    partial = path.with_suffix(".partial")
    header = {name.name: encode(getattr(run, name.name)) for name in fields(run) if name.name not in _HEADER_LEFT_OUT}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise FileExistsError(17, "it exists already")
        writer = RunWriter(path, partial.open("x", encoding="utf-8"))
    except OSError as error:
        raise _cannot_be_made(path, error) from None
    try:
        lock_run(writer._file, path)
        writer._lines([{"schema": SCHEMA, "header": header}])
        partial.rename(path)
    except BaseException as error:
        writer.close()
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise _cannot_be_made(path, error) from None
        raise
    return writer


def file_name(run: Run) -> str:
    """What a run's file is called: when it was started, its commit, its id. Readers find a commit's runs by it."""
    commit = str(run.environment.get("commit") or "nocommit")[:8]
    stamp = re.sub(r"[-:]", "", run.started).partition("+")[0] + "Z"
    return f"{stamp}-{commit}-{run.id}.jsonl"


def _cannot_be_made(path: Path, error: OSError) -> StoreError:
    return StoreError(f"the run file {path} cannot be made ({error.strerror}). Choose another --store DIR.")


def reopen_run(path: Path, resumption: Resumption) -> RunWriter:
    """Open a run's file to go on with it; a last line that was cut short stays alone on its line."""
    try:
        file = path.open("a+", encoding="utf-8", errors="replace")
        lock_run(file, path)
        with path.open("rb") as raw:
            size = raw.seek(0, os.SEEK_END)
            raw.seek(max(0, size - 1))
            torn = raw.read(1) not in (b"", b"\n")
        if torn:
            file.write("\n")
    except OSError as error:
        raise StoreError(f"the run file {path} cannot be written ({error.strerror}).") from None
    writer = RunWriter(path, file)
    writer._lines([{"resumed": encode(resumption)}])
    return writer


def running_beside(own: Path) -> list[str]:
    """The stems of the other runs that are being measured into the same store right now."""
    own = own.resolve()
    store = store_of(own)
    if store is None:
        return []
    recent = time.time() - _RECENT_SECONDS
    found = []
    for path, _ in zip(run_files(store), range(_LOOKED_AT), strict=False):
        with contextlib.suppress(OSError):
            if path != own and path.stat().st_mtime > recent and is_being_written(path):
                found.append(path.stem)
    return found


def lock_run(file: IO[Any], path: Path) -> None:
    """Take the file's lock; raises where another process has it. Where a file system has no locks, do without."""
    for attempt in range(4):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05 * attempt)  # another run may be looking whether this one is alive
        except OSError:
            return
    file.close()
    raise StoreError(f"another process is writing the run {path.stem}. Wait for its end, or start a run of your own.")


def is_being_written(path: Path) -> bool:
    """Whether a process has a run file's lock, or is just looking whether another one does."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _word(text: str) -> str:
    """A name that is safe as a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).strip(".") or "unknown"
