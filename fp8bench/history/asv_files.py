"""Files that fp8bench and asv both write: read with suspicion, replaced in one step, under a lock, and never lost.

asv writes its files in place, without a lock. So a reader may meet half a file that is whole a moment later
(`settled_read`), and a file that stays broken is somebody's all the same: it is renamed, not overwritten (`set_aside`).
The lock keeps fp8bench's own processes apart; asv knows nothing of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import IO, Any, TypeVar

from fp8bench.errors import AsvFileAbsent, AsvFileBroken, AsvFileError, AsvFileOfOtherVersion, AsvFileTorn

# asv warns at every *.json that is not its own, and at nothing else: names here never end so.
LOCK = ".lock"
_PAUSE_SECONDS = 0.02
# A file that was changed so long ago is no longer being written.
_LATELY_SECONDS = 10.0
# Nobody writes a file for so long: whoever began it was killed.
_LEFT_SECONDS = 3600.0

T = TypeVar("T")


class _Twice(ValueError):
    """A key stands twice in one object, so that one of its values would be lost unseen."""


def read_object(path: Path, version: int) -> dict[str, Any]:
    """The object in a JSON file of that version, which is taken out of it.

    NaN and Infinity are asv's own words. A byte order mark, which asv refuses, is gone when the file is next written.
    """
    raw = _content(path)
    try:
        text = raw.decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise AsvFileTorn(f"{path} is broken: byte {error.start} of {len(raw)} is no UTF-8.") from None
    except json.JSONDecodeError as error:
        place = len(raw) - len(text[error.pos :].encode())
        why = f"its JSON breaks off at byte {place} of {len(raw)} ({error.msg})" if text.strip() else "it is empty"
        raise AsvFileTorn(f"{path} is broken: {why}.") from None
    except _Twice as error:
        raise AsvFileBroken(f"{path} is broken: it has the key {error.args[0]!r:.100} twice in one object.") from None
    except ValueError:
        raise AsvFileBroken(f"{path} is broken: a number in it has thousands of digits.") from None
    except RecursionError:
        raise AsvFileBroken(f"{path} is broken: it is nested too deeply.") from None
    if not isinstance(content, dict):
        raise AsvFileBroken(f"{path} is broken: expected an object, found {type(content).__name__}.")
    _check_version(path, content.pop("version", None), version)
    return content


def _content(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise AsvFileError(f"{path} cannot be read (it is not a file).")  # a pipe would be waited for
        return path.read_bytes()
    except FileNotFoundError:
        raise AsvFileAbsent(f"{path} cannot be read (it is not there).") from None
    except OSError as error:
        raise AsvFileError(f"{path} cannot be read ({error.strerror}).") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return content


def _check_version(path: Path, found: object, version: int) -> None:
    if found is None:
        raise AsvFileBroken(f"{path} is broken: it has no 'version' (fp8bench reads version {version}).")
    if type(found) is not int:
        raise AsvFileBroken(f"{path} is broken: its 'version' is {shown(found)}, expected {version}.")
    if found != version:
        age, remedy = ("an older", "Run 'asv update' first") if found < version else ("a newer", "Upgrade fp8bench")
        raise AsvFileOfOtherVersion(
            f"{path} was written by {age} asv: it is of version {found!s:.20}, "
            f"fp8bench reads version {version}. {remedy}."
        )


def write_object(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Put a JSON file in the place of the one before, in one step: a reader sees the old one or the new one, whole.

    With an indent keys are sorted, without one the file is compact: asv's two ways.
    """
    try:
        text = json.dumps(content, indent=indent, sort_keys=indent is not None)
    except (TypeError, ValueError, RecursionError) as error:
        raise AsvFileError(f"{path} cannot be written: its content is no JSON ({str(error)[:200]}).") from None
    target = Path(os.path.realpath(path))  # a link stays one, as when asv writes it
    partial = target.with_name(f".asv-{secrets.token_hex(8)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            partial.chmod(stat.S_IMODE(target.stat().st_mode))  # who could write the old one can write the new one
        partial.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise AsvFileError(
                f"{path} cannot be written ({error.strerror}). What was there before is untouched; "
                "make room, or choose another --store DIR."
            ) from None
        raise


def settled_read(load: Callable[[Path], T], path: Path, seconds: float = 2.0) -> T:
    """What `load` makes of a file; one that is torn and was changed lately is looked at again for so many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            return load(path)
        except AsvFileTorn:
            if time.monotonic() >= end or not _changed_lately(path):
                raise
        time.sleep(_PAUSE_SECONDS)


def _changed_lately(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) < _LATELY_SECONDS
    except OSError:
        return True  # it has just vanished, which the next look says in a sentence


def set_aside(path: Path) -> Path:
    """Rename a broken file to `<name>.broken-<n>`, and give its new path. Earlier ones stay."""
    for number in itertools.count(1):
        target = path.with_name(f"{path.name}.broken-{number}")
        try:
            target.open("x").close()  # taken, also against another process that sets something aside
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


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left half done. For holders of the lock."""
    for path in folder.glob(".asv-*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                path.unlink()


@contextlib.contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """Hold a folder's lock, for which it waits so many seconds; where a file system has no locks, go on without.

    Reading, merging and writing belong under one lock. It is not for use inside itself.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        is_file = os.path.isfile(folder)  # noqa: PTH113 - is_file raises where it may not look
        why = f"{folder} is a file" if is_file else error.strerror
        raise AsvFileError(f"the lock {path} cannot be made ({why}). Choose another --store DIR.") from None
    with file:
        _take(file, path, seconds)
        yield


def _take(file: IO[str], path: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise AsvFileError(
                    f"another process has held the lock {path} for {seconds:g} s. Wait for its end, and try again."
                ) from None
        except OSError:
            return
        time.sleep(_PAUSE_SECONDS)
