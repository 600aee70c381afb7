"""Files that several processes read and write: replaced in one step, appended to and synced, and locked.

Lines and objects can carry checksums, so that a digit that changes on a disk is noticed.
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

# asv warns about every *.json that is not its own, and about nothing else: names here never end with that.
LOCK = ".lock"
LOCK_SECONDS = 60.0
PARTIAL = ".partial"
_PAUSE_SECONDS = 0.02
_SUM = "sum"
# Matches the end of a line with a checksum, also of a numbered one.
_SEAL = re.compile(rb',"sum":"([0-9a-f]{16})"}\r?$')
_SEALED_WITH = 40  # bytes, more than a checksum field has
_NUMBERED = re.compile(rb',"line":(\d+),"sum":"([0-9a-f]{16})"}\r?$', re.MULTILINE)


# The largest file of lines or JSON that is read: a run of many thousand cases has about 100 MB, while a sparse file may
# claim more than any memory holds.
LARGEST_FILE = 1 << 30
# No file of weights larger than the machine's memory can be loaded.
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_STREAMS = ("/dev/stdin", "/dev/fd/")
_SPECIAL = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))


class Damaged(ValueError):
    """What was read differs from what was written."""


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """The object with a checksum of its content, whatever its formatting."""
    return {**content, _SUM: _checksum(compact(content).encode())}


def sealed_line(content: dict[str, Any]) -> str:
    """Like sealed, as a line of JSON."""
    return with_checksum(compact(content))


def with_checksum(plain: str) -> str:
    """Adds the checksum to a JSON object in compact text form."""
    return f'{plain[:-1]},"{_SUM}":"{_checksum(plain.encode())}"}}'


def unseal(content: dict[str, Any]) -> dict[str, Any]:
    """The object without its checksum, if it has one. Raises Damaged if the two do not agree."""
    if _SUM not in content:
        return content
    plain = {name: value for name, value in content.items() if name != _SUM}
    if content[_SUM] != _checksum(compact(plain).encode()):
        raise Damaged("its checksum does not match its content")
    return plain


def unsealed_line(line: bytes) -> tuple[dict[str, Any], str]:
    """Like unsealed for a line of JSON, with the checksum ('' if there is none). Raises ValueError for other text."""
    seal = _SEAL.search(line, max(0, len(line) - _SEALED_WITH))
    if seal is not None and _checksum(plain := line[: seal.start()] + b"}") == seal[1].decode():
        return json.loads(plain), seal[1].decode()  # as written, which is quick to check
    content = json.loads(line)
    if not isinstance(content, dict):
        raise Damaged("expected an object")
    return unseal(content), str(content.get(_SUM, ""))


def compact(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def sums_of(text: bytes) -> list[str]:
    """Returns the checksums of a file's numbered lines, in order."""
    return [seal[2].decode() for seal in _NUMBERED.finditer(text)]


def digest_of(sums: Iterable[str]) -> str:
    """Returns one digest for all lines of a file, from their checksums in order."""
    from hashlib import blake2b

    return blake2b("".join(sums).encode(), digest_size=16).hexdigest()


def _checksum(text: bytes) -> str:
    from hashlib import blake2b  # takes 2 ms, and most command lines check nothing

    return blake2b(text, digest_size=8).hexdigest()


@contextlib.contextmanager
def keeping(subject: object, remedy: str = "", kind: type[StoreError] = StoreError) -> Iterator[None]:
    """Turns an OSError into the error `kind`, with the sentence that `subject` cannot be written."""
    try:
        yield
    except OSError as error:
        raise kind(f"{subject} cannot be written ({error.strerror}). {remedy}".rstrip()) from None


def read_file(path: Path, most: int = LARGEST_FILE) -> bytes:
    """Reads a regular file of at most `most` bytes, or one of the caller's streams (`/dev/stdin`). Raises OSError."""
    is_stream = str(path).startswith(_STREAMS)
    with open_file(path, most=most) as file:
        content = file.read(most + 1 if is_stream else -1)
    _check_size(len(content), most)
    return content


def open_file(path: Path, mode: str = "rb", most: int | None = LARGEST_FILE) -> BufferedRandom:
    """Opens a regular file of at most `most` bytes (None: of any size), or one of the caller's streams.

    Raises OSError for anything else, for example a named pipe, which would block forever. Its `strerror` says what to
    do.
    """
    if str(path).startswith(_STREAMS):
        return cast(BufferedRandom, path.open(mode))

    def open_regular(name: str, flags: int) -> int:
        with contextlib.suppress(FileNotFoundError):  # opening a device may already change something
            _check(os.stat(name), most)  # noqa: PTH116
        descriptor = os.open(name, flags | os.O_NONBLOCK, 0o666)
        try:
            _check(os.fstat(descriptor), most)  # another file may have taken its place
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return cast(BufferedRandom, open(path, mode, opener=open_regular))


def check_file(path: Path, most: int | None = LARGEST_FILE) -> None:
    """Raises OSError like open_file, for a file that a library will open."""
    _check(path.stat(), most)


def is_no_folder(path: Path) -> bool:
    """Whether the path exists and is not a folder, so that open_file opens it or explains why not. Raises OSError."""
    return path.exists() and not path.is_dir()


def _check(status: os.stat_result, most: int | None) -> None:
    # Pipes and devices could block for ever, or change when they are read.
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _SPECIAL if is_kind(status.st_mode)), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}: put a regular file in its place")
    _check_size(status.st_size, most)


def _check_size(size: int, most: int | None) -> None:
    if most is not None and size > most:
        reason = (
            f"it has {units.size(size)}, and at most {units.size(most)} are read: move it away, or give a smaller one"
        )
        raise OSError(errno.EFBIG, reason)


def make_store(store: Path) -> None:
    """Creates a store's folder if it does not exist, ignored by git; warns if it is world-writable. Raises OSError."""
    if not store.exists():
        store.mkdir(parents=True, exist_ok=True)
        write_whole(store / ".gitignore", "*\n")
        if store.stat().st_mode & stat.S_IWOTH:
            words = f"every user of this machine may change what the new store {store} says, as umask lets them write."
            warnings.warn(f"{words} Set umask 022, and run chmod -R o-w {store}", OpenStore, stacklevel=2)


def write_whole(path: Path, content: str | bytes, sync: bool = True) -> None:
    """Replaces a file atomically: readers see all of the old content or all of the new.

    Creates its folder. Raises OSError, and then the old file is unchanged. Without `sync` a power failure may lose it.
    """
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    with replacing(target, sync) as partial:
        with partial.open("xb") as file:
            append(file, content, sync)
        with contextlib.suppress(OSError):
            partial.chmod(stat.S_IMODE(target.stat().st_mode))  # keep the old file's permissions


@contextlib.contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[Path]:
    """Yields a path to write to, which replaces `path` at the end; on failure it is removed.

    Without `sync` a power failure may bring the old file back.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to the disk: otherwise a power failure may undo a rename. Does nothing if folders cannot
    be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def append(file: IO[bytes], content: str | bytes, sync: bool = True) -> None:
    """Appends and, with `sync`, syncs to the disk. Raises OSError."""
    file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    file.flush()
    if sync:
        os.fsync(file.fileno())


def end_line(file: IO[bytes]) -> None:
    """Ensures that the next append begins a line, even after one that was cut short."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    if file.read(1) not in (b"", b"\n"):
        file.write(b"\n")


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Appends lines under the file's lock and syncs, also after a line that was cut off. Raises OSError."""
    with open_file(path, "a+b") as file:
        lock(file, LOCK_SECONDS)
        end_line(file)
        append(file, "".join(line + "\n" for line in lines))


@dataclass
class LineWriter:
    """An open file of JSON lines, each synced before the next one; `called` is its name in errors."""

    path: Path
    _file: IO[bytes]
    called: str = "the file"
    # The checksums of the lines in the file, and the number of the last line; a damaged line keeps its number.
    _sums: list[str] = field(default_factory=list)
    _last: int = 0

    def __post_init__(self) -> None:
        self._recount()

    @classmethod
    def start(cls, path: Path, head: dict[str, Any]) -> Self:
        """Makes a file together with its first line, and locks it: nobody ever sees it empty."""
        partial = path.with_suffix(PARTIAL)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise FileExistsError(17, "it exists already")
            with contextlib.ExitStack() as undone:
                writer = cls(path, undone.enter_context(partial.open("x+b")))
                undone.callback(partial.unlink, missing_ok=True)
                lock(writer._file, 0)
                writer._lines([head])
                partial.rename(path)
                sync_folder(path.parent)
                undone.pop_all()
                return writer
        except OSError as error:
            raise StoreError(
                f"{cls.called} {path} cannot be made ({error.strerror}). Choose another --store DIR."
            ) from None

    def note(self, text: str) -> None:
        self._lines([{"note": text}])

    def finish(self, how: str) -> None:
        """Writes the end line, 'finished' or 'interrupted', and closes the file."""
        try:
            if not self._file.closed:
                self._lines([{"end": how, "digest": digest_of(self._sums)}])
        finally:
            self.close()

    def close(self) -> None:
        """Releases the file and its lock. May be called twice."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _recount(self) -> None:
        """Counts the lines in the file, so that the next one gets the right number."""
        place = self._file.tell()
        self._file.seek(0)
        content = self._file.read()
        self._sums = sums_of(content)
        self._last = max((int(seal[1]) for seal in _NUMBERED.finditer(content)), default=0)
        self._file.seek(place)

    def _lines(self, values: Sequence[dict[str, Any]]) -> None:
        text = "".join(
            sealed_line({**value, "line": number}) + "\n" for number, value in enumerate(values, self._last + 1)
        )
        try:
            append(self._file, text)
            self._sums += sums_of(text.encode())
            self._last += len(values)
        except OSError as error:
            # Whatever part reached the file counts, so that the next line gets the right number.
            with contextlib.suppress(OSError):  # part of it may be in the file
                self._recount()
            has_lines = os.path.isfile(self.path) and self._last > 1  # noqa: PTH113 - is_file raises where it may not look
            advice = "What was finished before is in it; make room" if has_lines else "Make room"
            raise StoreError(
                f"{self.called} {self.path} cannot be written ({error.strerror}). {advice}, or choose another --store "
                "DIR."
            ) from None


def lock(file: IO[Any], seconds: float) -> bool:
    """Waits up to `seconds` for a file's lock; False if another process keeps it.

    A process that only checks (`is_locked`) has the lock briefly, and is always waited for: under load it may be
    suspended at that moment. On a file system without locks it returns True. Closing the file releases the lock.
    """
    begun = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - begun
            if waited >= seconds and (waited >= LOCK_SECONDS or not _is_only_looked_at(file)):
                return False
        except OSError:
            return True
        time.sleep(_PAUSE_SECONDS)


def _is_only_looked_at(file: IO[Any]) -> bool:
    """Whether the lock is only shared, as by `is_locked`, or has just been released."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether another process holds the file's lock, or is checking it right now. Raises OSError."""
    with open_file(path, most=None) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


@contextlib.contextmanager
def lock_folder(folder: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Holds a folder's lock, for which it waits up to `seconds`. Not reentrant.

    Reading, merging and writing belong under one lock.
    """
    path = folder / LOCK
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
    """Creates the folder if it does not exist, and writes and removes a file in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{secrets.token_hex(4)}"  # containers that share a folder share process ids
    try:
        probe.write_text("probe")
    finally:  # even a full disk has room for the name
        probe.unlink(missing_ok=True)


def check_folder(option: str, folder: Path) -> None:
    """Creates the folder if it does not exist; raises UsageError if it is not writable."""
    try:
        try_writing(folder)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{option} {str(folder)!r:.200} cannot be written ({reason}). Give a folder; it is made if it is not there."
        ) from None
