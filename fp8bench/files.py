"""Reads and writes files that several processes share. A file is either replaced atomically, or locked, appended to
and synced.

Lines and JSON objects can have checksums, so that damage on the disk is detected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import IO, Any, Self, cast

from fp8bench import units
from fp8bench.errors import OpenStore, StoreError, UsageError

# These names do not end in .json, because asv warns about *.json files of other programs.
LOCK_FILE_NAME = ".lock"
LOCK_SECONDS = 60.0
PARTIAL_FILE_SUFFIX = ".partial"
_LOCK_PAUSE_SECONDS = 0.02
_CHECKSUM_KEY = "sum"
# Matches the end of every line that has a checksum.
_CHECKSUM_FIELD = re.compile(rb',"sum":"([0-9a-f]{16})"}\r?$')
_MAX_CHECKSUM_FIELD_BYTES = 40  # no checksum field is longer
# Matches the end of every line that has a line number and a checksum.
_NUMBERED_LINE_END_PATTERN = re.compile(rb',"line":(\d+),"sum":"([0-9a-f]{16})"}\r?$', re.MULTILINE)


# The largest file of lines or JSON that is read, in bytes. A run with many thousand cases has about 100 MB. A sparse
# file may pretend to be larger than memory.
MAX_FILE_BYTES = 1 << 30
# The limit for files of weights, in bytes: a larger file cannot be loaded.
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_STREAM_PATH_PREFIXES = ("/dev/stdin", "/dev/fd/")
_SPECIAL_FILE_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))


class DamagedFileError(ValueError):
    """The content that was read differs from what was written."""


def add_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """Returns an object with a checksum added. The checksum does not depend on how the JSON text is formatted."""
    return {**content, _CHECKSUM_KEY: _checksum(format_compact_json(content).encode())}


def format_checksummed_line(content: dict[str, Any]) -> str:
    """Returns an object with a checksum added, as a line of JSON."""
    text = format_compact_json(content)
    return f'{text[:-1]},"{_CHECKSUM_KEY}":"{_checksum(text.encode())}"}}'


def remove_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """Returns an object without its checksum, if it has one. Raises DamagedFileError if the checksum does not match."""
    if _CHECKSUM_KEY not in content:
        return content
    content_without_checksum = {name: value for name, value in content.items() if name != _CHECKSUM_KEY}
    if content[_CHECKSUM_KEY] != _checksum(format_compact_json(content_without_checksum).encode()):
        raise DamagedFileError("its checksum does not match its content")
    return content_without_checksum


def parse_json(text: str | bytes) -> Any:
    """Parses JSON from a file. Raises ValueError, also for lists or objects that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_checksummed_line(line: bytes) -> tuple[dict[str, Any], str]:
    """Returns the object in a line of JSON, and its checksum ('' if it has none). Raises ValueError if the line is not
    a JSON object or was changed.
    """
    checksum_match = _CHECKSUM_FIELD.search(line, max(0, len(line) - _MAX_CHECKSUM_FIELD_BYTES))
    if (
        checksum_match is not None
        and _checksum(plain := line[: checksum_match.start()] + b"}") == checksum_match[1].decode()
    ):
        return parse_json(plain), checksum_match[1].decode()  # no need to format the object again, which is slow
    content = parse_json(line)
    if not isinstance(content, dict):
        raise DamagedFileError("expected an object")
    return remove_checksum(content), str(content.get(_CHECKSUM_KEY, ""))


def format_compact_json(content: object) -> str:
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def find_checksums(text: bytes) -> list[str]:
    """Returns the checksums of the numbered lines in a file's content, in order."""
    return [checksum_match[2].decode() for checksum_match in _NUMBERED_LINE_END_PATTERN.finditer(text)]


def digest_checksums(sums: Iterable[str]) -> str:
    """Returns one digest for several lines, computed from the checksums of the lines in order."""
    from hashlib import blake2b

    return blake2b("".join(sums).encode(), digest_size=16).hexdigest()


def _checksum(text: bytes) -> str:
    from hashlib import blake2b  # this import takes 2 ms, and most commands do not need it

    return blake2b(text, digest_size=8).hexdigest()


@contextlib.contextmanager
def convert_write_errors(subject: object, remedy: str = "", kind: type[StoreError] = StoreError) -> Iterator[None]:
    """A context that turns an OSError of its body into an error of type `kind`. Its message states that `subject`
    cannot be written, why, and what to do (`remedy`).
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{subject} cannot be written ({error.strerror}). {remedy}".rstrip()) from None


def read_file(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Reads a regular file, or a stream like /dev/stdin, of at most `most` bytes. Raises OSError."""
    is_stream = str(path).startswith(_STREAM_PATH_PREFIXES)
    with open_file(path, most=most) as file:
        # The size of a stream is unknown. Reading one byte too many shows that it is too long.
        content = file.read(most + 1 if is_stream else -1)
    _check_read_size(len(content), most)
    return content


def open_file(path: Path, mode: str = "rb", most: int | None = MAX_FILE_BYTES) -> BufferedRandom:
    """Opens a regular file of at most `most` bytes (None: of any size), or a stream like /dev/stdin.

    Raises OSError for anything else, for example for a named pipe, which would block forever. The error's `strerror`
    explains what to do.
    """
    if str(path).startswith(_STREAM_PATH_PREFIXES):
        return cast(BufferedRandom, path.open(mode))

    def open_regular(name: str, flags: int) -> int:
        # Refuse anything but a regular file before opening it, because merely opening a device may change the device.
        with contextlib.suppress(FileNotFoundError):
            _require_regular_file(os.stat(name), most)  # noqa: PTH116
        # Without O_NONBLOCK, opening a named pipe would wait. The pipe may have replaced the file after the check.
        file_descriptor = os.open(name, flags | os.O_NONBLOCK, 0o666)
        try:
            # Another process may have replaced the file since the first check.
            _require_regular_file(os.fstat(file_descriptor), most)
        except OSError:
            os.close(file_descriptor)
            raise
        return file_descriptor

    return cast(BufferedRandom, open(path, mode, opener=open_regular))


def check_file(path: Path, most: int | None = MAX_FILE_BYTES) -> None:
    """Raises OSError if `open_file` would refuse the file. This is for files that a library opens by itself."""
    _require_regular_file(path.stat(), most)


def is_not_folder(path: Path) -> bool:
    """Returns whether the path exists and is not a folder, so that `open_file` either opens it or explains why not.
    Raises OSError.
    """
    return path.exists() and not path.is_dir()


def _require_regular_file(status: os.stat_result, most: int | None) -> None:
    # Reading a pipe or a device could block forever, or change its content.
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _SPECIAL_FILE_KINDS if is_kind(status.st_mode)), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}: put a regular file in its place")
    _check_read_size(status.st_size, most)


def _check_read_size(size: int, most: int | None) -> None:
    if most is not None and size > most:
        reason = (
            f"it has {units.size(size)}, and at most {units.size(most)} are read: move it away, or give a smaller one"
        )
        raise OSError(errno.EFBIG, reason)


def make_store(store: Path) -> None:
    """Creates a store's folder, with a .gitignore, if it does not exist. Warns if every user of the machine can write
    to it. Raises OSError.
    """
    if not store.exists():
        store.mkdir(parents=True, exist_ok=True)
        write_whole(store / ".gitignore", "*\n")
        if store.stat().st_mode & stat.S_IWOTH:
            warning_text = f"every user of this machine can change the new store {store}, because umask allows it."
            warnings.warn(f"{warning_text} Set umask 022, and run chmod -R o-w {store}", OpenStore, stacklevel=2)


def write_whole(path: Path, content: str | bytes, sync: bool = True) -> None:
    """Replaces a file atomically: readers see all of the old content or all of the new content.

    Creates the folder. Raises OSError, and then the old file is unchanged. Without `sync`, a power failure may lose
    the file.
    """
    target = Path(os.path.realpath(path))  # keep a symbolic link, and replace its target
    with replace_atomically(target, sync) as partial_path:
        with partial_path.open("xb") as file:
            append(file, content, sync)
        with contextlib.suppress(OSError):
            partial_path.chmod(stat.S_IMODE(target.stat().st_mode))  # keep the permissions of an old file


@contextlib.contextmanager
def replace_atomically(path: Path, sync: bool = True) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` at the end. On failure, the temporary file is removed.

    Without `sync`, a power failure may restore the old file.
    """
    partial_path = path.with_name(f".{secrets.token_hex(8)}{PARTIAL_FILE_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial_path
        partial_path.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException:  # also after an interrupt
        with contextlib.suppress(OSError):
            partial_path.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Syncs the entries of a folder to the disk. Without this, a power failure may undo a rename. Does nothing if the
    file system cannot sync folders.
    """
    with contextlib.suppress(OSError):
        folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder_descriptor)
        finally:
            os.close(folder_descriptor)


def append(file: IO[bytes], content: str | bytes, sync: bool = True) -> None:
    """Appends content and, with `sync`, syncs it to the disk. Raises OSError."""
    file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    file.flush()
    if sync:
        os.fsync(file.fileno())


def complete_last_line(file: IO[bytes]) -> None:
    """Writes a line end if the last line of a file has none, so that the next append starts a new line."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    if file.read(1) not in (b"", b"\n"):
        file.write(b"\n")


def append_file_lines(path: Path, lines: Sequence[str]) -> None:
    """Appends lines while holding the lock of the file, and syncs them. If the last line of the file was cut off, it
    gets a line end first. Raises OSError.
    """
    with open_file(path, "a+b") as file:
        lock(file, LOCK_SECONDS)
        complete_last_line(file)
        append(file, "".join(line + "\n" for line in lines))


@dataclass
class LineWriter:
    """An open file of JSON lines. Each line is synced before the next one. `called` names the file in errors."""

    path: Path
    _file: IO[bytes]
    called: str = "the file"
    # `_sums` are the checksums of the file's lines. A damaged line counts in `_last_line_number`, but is missing in
    # `_sums`.
    _sums: list[str] = field(default_factory=list)
    _last_line_number: int = 0

    def __post_init__(self) -> None:
        self._count_lines()

    @classmethod
    def start(cls, path: Path, header: dict[str, Any]) -> Self:
        """Creates and locks a file that already has its first line, so that no other process ever sees an empty
        file.
        """
        partial_path = path.with_suffix(PARTIAL_FILE_SUFFIX)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise FileExistsError(17, "it exists already")
            with contextlib.ExitStack() as cleanup:
                writer = cls(path, cleanup.enter_context(partial_path.open("x+b")))
                cleanup.callback(partial_path.unlink, missing_ok=True)
                lock(writer._file, 0)
                writer._append_numbered_lines([header])
                partial_path.rename(path)
                sync_folder(path.parent)
                # Keep the file open, because closing it would release the lock.
                cleanup.pop_all()
                return writer
        except OSError as error:
            raise StoreError(
                f"{cls.called} {path} cannot be made ({error.strerror}). Choose another --store DIR."
            ) from None

    def note(self, text: str) -> None:
        self._append_numbered_lines([{"note": text}])

    def finish(self, end_kind: str) -> None:
        """Writes the last line, which contains 'finished' or 'interrupted', and closes the file."""
        try:
            if not self._file.closed:
                self._append_numbered_lines([{"end": end_kind, "digest": digest_checksums(self._sums)}])
        finally:
            self.close()

    def close(self) -> None:
        """Closes the file and thereby releases its lock. May be called twice."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _count_lines(self) -> None:
        """Reads the number of the last line from the file, so that the next line gets the right number."""
        position = self._file.tell()
        self._file.seek(0)
        content = self._file.read()
        self._sums = find_checksums(content)
        self._last_line_number = max(
            (int(line_end_match[1]) for line_end_match in _NUMBERED_LINE_END_PATTERN.finditer(content)), default=0
        )
        self._file.seek(position)

    def _append_numbered_lines(self, values: Sequence[dict[str, Any]]) -> None:
        text = "".join(
            format_checksummed_line({**value, "line": number}) + "\n"
            for number, value in enumerate(values, self._last_line_number + 1)
        )
        try:
            append(self._file, text)
            self._sums += find_checksums(text.encode())
            self._last_line_number += len(values)
        except OSError as error:
            # The write may have stored some lines before it failed. Count them, so that the next line gets the right
            # number.
            with contextlib.suppress(OSError):
                self._count_lines()
            has_lines = os.path.isfile(self.path) and self._last_line_number > 1  # noqa: PTH113 - is_file raises where it may not look
            advice = "Finished results are in it; make room" if has_lines else "Make room"
            raise StoreError(
                f"{self.called} {self.path} cannot be written ({error.strerror}). {advice}, or choose another --store "
                "DIR."
            ) from None


def lock(file: IO[Any], seconds: float) -> bool:
    """Locks a file. Waits up to `seconds` for the lock, and returns False if another process still holds it. Closing
    the file releases the lock. Returns True on file systems without locks.

    A process that calls `is_locked` holds a shared lock for a moment. While the lock is only shared, waits up to
    LOCK_SECONDS, even if `seconds` is less.
    """
    start = time.monotonic()
    while True:
        try:
            # A blocking call would have no time limit.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited_seconds = time.monotonic() - start
            # A process with a shared lock may be suspended, so wait longer for it.
            if waited_seconds >= seconds and (waited_seconds >= LOCK_SECONDS or not _is_lock_only_shared(file)):
                return False
        except OSError:
            return True  # the file system has no locks
        time.sleep(_LOCK_PAUSE_SECONDS)


def _is_lock_only_shared(file: IO[Any]) -> bool:
    """Returns whether the lock of a file is only shared (a process calls `is_locked`) or was just released."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock of a file. Raises OSError."""
    with open_file(path, most=None) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def lock_folder(folder: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """A context that holds the lock of a folder. It waits up to `seconds` for the lock, and then raises StoreError.

    Code that reads, changes and writes a file must do all three in one such context. The lock is not reentrant: a
    process that already holds it waits in vain.
    """
    path = folder / LOCK_FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_file(path, "ab", most=None)
    except OSError as error:
        is_file = os.path.isfile(folder)  # noqa: PTH113 - is_file raises where it may not look
        reason = f"{folder} is a file" if is_file else error.strerror
        raise StoreError(f"the lock {path} cannot be made ({reason}). Choose another --store DIR.") from None
    with file:
        if not lock(file, seconds):
            raise StoreError(
                f"another process has held the lock {path} for {seconds:g} s. Wait for its end, and try again."
            )
        yield


def try_writing(folder: Path) -> None:
    """Raises OSError if a folder is not writable. Creates the folder if necessary, writes a file in it, and removes the
    file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The name is random, because processes in different containers may have the same process id.
    probe_file = folder / f".probe-{secrets.token_hex(4)}"
    try:
        probe_file.write_text("probe")
    finally:  # a full disk still creates an empty file
        probe_file.unlink(missing_ok=True)


def check_folder(option: str, folder: Path) -> None:
    """Raises UsageError if the folder of an option is not writable. Creates the folder if it does not exist."""
    try:
        try_writing(folder)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{option} {str(folder)!r:.200} cannot be written ({reason}). Give a folder; it is created if missing."
        ) from None
