"""Prepares the text that a run trains on, as a file of tokens that workers map into memory. Each byte of the text is a
16-bit token.

The default text is the source of Python's standard library, which is equal on all machines with the same version of
Python. The hash of the text is part of every case that reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import open_file, read_file, write_whole

MAX_BYTES = 8 << 20
MIN_BYTES = 64 << 10
# A file with a larger share of control characters is not text. Except for tabs and line ends, text has hardly any
# control characters, and in compressed data they are a tenth of all bytes.
_CONTROL_CHARACTERS = bytes({*range(32), 127} - set(b"\t\n\r\f\b"))
_MAX_CONTROL_CHARACTER_SHARE = 0.02


@dataclass(frozen=True)
class Corpus:
    """The path of a token file, and the name and the hash of the text in it."""

    path: str
    name: str
    digest: str
    num_tokens: int

    @property
    def identity(self) -> str:
        """How a case's parameters name the text, like 'python-3.11.7:1a2b3c4d'."""
        return f"{self.name}:{self.digest[:8]}"


def read_standard_library() -> bytes:
    """Returns the first 8 MiB of the standard library's modules, sorted by file name."""
    library_folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for pattern in ("*.py", "asyncio/*.py", "email/*.py"):
        # Sort the files, because the order in a folder differs between machines.
        for path in sorted(library_folder.glob(pattern)):
            if len(text) < MAX_BYTES:
                text += path.read_bytes()
    return bytes(text[:MAX_BYTES])


def read_user_text(path: Path, max_bytes: int | None = None) -> bytes:
    """Reads at most `max_bytes` of a user's text file. Raises UsageError if it is not text or too short."""
    try:
        with open_file(path, most=None) as file:
            text = file.read(max_bytes or MAX_BYTES)
    except OSError as error:
        raise UsageError(f"--data {path} cannot be read ({error.strerror}). Give a text file.") from None
    if len(text) < MIN_BYTES:
        raise UsageError(f"--data {path} has {len(text)} bytes. Give a text of at least {MIN_BYTES} bytes.")
    if b"\0" in text:
        raise UsageError(f"--data {path} contains zero bytes, so it is not text. Give a text file.")
    control_character_count = len(text) - len(text.translate(None, _CONTROL_CHARACTERS))
    replacement_character_count = text.decode("utf-8", errors="replace").count("\ufffd")
    reason = ""
    if control_character_count > _MAX_CONTROL_CHARACTER_SHARE * len(text):
        reason = f"{control_character_count} of {len(text)} bytes are control characters"
    elif replacement_character_count > len(text) / 2:
        reason = f"{replacement_character_count} of {len(text)} bytes are not valid UTF-8"
    if reason:
        raise UsageError(f"--data {path} is not text: {reason}. Give a text file, best in UTF-8.")
    return text


def read_named_text(data: str | None, max_bytes: int | None = None) -> tuple[bytes, str]:
    """Returns the text that a run reads and the name of the text. It is the user's file `data`, or the sources of
    Python's standard library.
    """
    if data is not None:
        return read_user_text(Path(data), max_bytes=max_bytes), name_user_corpus(data)
    text = read_standard_library()
    if len(text) < MIN_BYTES:
        raise UsageError(
            f"the sources of Python's standard library were not found ({len(text)} bytes). Give --data FILE."
        )
    return text, f"python-{platform.python_version()}"


def name_user_corpus(data: str) -> str:
    """Returns how case ids name the file `data`. Characters that cannot be printed become '?'."""
    return "".join(letter if letter.isprintable() else "?" for letter in Path(data).stem)


def prepare_corpus(data: str | None, folder: Path, write: bool = True) -> Corpus:
    """Returns the corpus of a run. If `write` is True, also writes the token file to `folder`, unless it exists."""
    text, name = read_named_text(data)
    digest = hashlib.sha256(text).hexdigest()
    path = folder / f"{digest[:16]}.tokens"
    if write:
        write_tokens(path, lambda: make_byte_tokens(text))
    return Corpus(str(path.resolve()), name, digest, len(text))


def default_corpus_identity() -> str:
    return prepare_corpus(None, Path(), write=False).identity


def make_byte_tokens(text: bytes) -> bytes:
    """Returns a 16-bit token for each byte, in the byte order of this machine."""
    token_bytes = bytearray(2 * len(text))
    token_bytes[0 if sys.byteorder == "little" else 1 :: 2] = text
    return bytes(token_bytes)


def write_tokens(path: Path, make_tokens: Callable[[], bytes]) -> None:
    """Writes a token file and its digest, unless an undamaged token file exists."""
    digest_file = path.with_suffix(".sha256")
    # Without a readable file, write it below.
    with contextlib.suppress(OSError):
        if read_file(digest_file).decode() == hashlib.sha256(read_file(path)).hexdigest():
            return
    content = make_tokens()
    replace_tokens(path, content)
    replace_tokens(digest_file, hashlib.sha256(content).hexdigest().encode())


def replace_tokens(path: Path, tokens: bytes) -> None:
    """Replaces a token file. Runs that have the old file open can still read the old content."""
    try:
        write_whole(path, tokens, sync=False)  # atomic, because other runs may use the same file
    except OSError as error:
        raise StoreError(f"the token file {path} cannot be written: {error.strerror}. Choose --store DIR.") from None
