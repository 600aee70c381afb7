"""Writing the truth: one append-only file a run, every group through to the disk before the next one starts.

The file is locked while it is written, so that two processes never write the same run, and so that a run can tell
whether another one is measuring beside it. A kill at any moment leaves a file that can be read: the header appears
with the file's name, and a line that was cut short is skipped by readers.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from fp8bench.errors import StoreError
from fp8bench.files import LineWriter, end_line, is_locked, lock, make_store, try_writing
from fp8bench.model import Record, Resumption, Run
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.store.runs.listing import all_files, file_name, folder_name, store_of

_HEADER_LEFT_OUT = {"records", "path", "finished", "troubles", "notes", "resumptions"}
# Less than a short run needs; said before anything is measured.
LEAST_FREE_BYTES = 4 << 20
_LOCK_SECONDS = 0.3
_LOOKED_AT = 100
_RECENT_SECONDS = 7 * 86400.0


@dataclass
class RunWriter(LineWriter):
    """An open run file, locked until it is closed."""

    called: str = "the run file"

    def append(self, records: Sequence[Record]) -> None:
        """Write the records of one group through to the disk."""
        self._lines([{"record": encode(record)} for record in records])


def check_store(store: Path) -> None:
    """Raise if runs cannot be written there, or there is hardly any room; asked before anything is measured."""
    folder = store / "runs"
    try:
        make_store(store)
        try_writing(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StoreError(
            f"the store {store} cannot be written ({error.strerror}). Choose another --store DIR."
        ) from None
    if free < LEAST_FREE_BYTES:
        raise StoreError(f"the store {store} has only {free} bytes left. Make room, or choose another --store DIR.")


def start_run(run: Run, store: Path) -> RunWriter:
    """Create the run's file with its header, in one step: nobody ever sees it without."""
    path = store / "runs" / folder_name(run) / file_name(run)
    header = {one.name: encode(getattr(run, one.name)) for one in fields(run) if one.name not in _HEADER_LEFT_OUT}
    return RunWriter.started(path, {"schema": SCHEMA, "header": header})


def reopen_run(path: Path, resumption: Resumption) -> RunWriter:
    """Open a run's file to go on with it; a last line that was cut short stays alone on its line."""
    try:
        file = path.open("a+b")
        lock_run(file, path)
        end_line(file)
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
    for path, _ in zip(all_files(store), range(_LOOKED_AT), strict=False):
        with contextlib.suppress(OSError):
            if path != own and path.stat().st_mtime > recent and is_locked(path):
                found.append(path.stem)
    return found


def lock_run(file: IO[Any], path: Path) -> None:
    """Take the file's lock; raises where another process has it. Where a file system has no locks, do without."""
    if not lock(file, _LOCK_SECONDS):  # another run may be looking whether this one is alive
        file.close()
        raise StoreError(
            f"another process is writing the run {path.stem}. Wait for its end, or start a run of your own."
        )
