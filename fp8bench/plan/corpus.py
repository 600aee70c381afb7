"""Prepares the text that a run trains on: a token file to map into memory, with one 16-bit token per byte.

The default text is the source of Python's standard library: real text that is the same on every machine with this
version of Python. Its hash is part of every case that reads it.
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

MOST_BYTES = 8 << 20
LEAST_BYTES = 64 << 10
# Prose has hardly any control characters except tabs and line ends; in compressed data they are a tenth of all bytes.
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\r\f\b"))
_MOST_CONTROLS = 0.02


@dataclass(frozen=True)
class Corpus:
    """A token file and the hash of its text."""

    path: str
    name: str
    digest: str
    num_tokens: int

    @property
    def identity(self) -> str:
        """The text's name in a case, like 'python-3.11.7:1a2b3c4d'."""
        return f"{self.name}:{self.digest[:8]}"


def standard_library_text() -> bytes:
    """Returns the first 8 MiB of the standard library's modules, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("asyncio/*.py")) + sorted(root.glob("email/*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= MOST_BYTES:
            break
    return b"".join(parts)[:MOST_BYTES]


def given_text(path: Path, most: int | None = None) -> bytes:
    """Reads a user's text, at most `most` bytes. Raises UsageError for what is not text, or too short to train on."""
    try:
        with open_file(path, most=None) as file:
            text = file.read(most or MOST_BYTES)
    except OSError as error:
        raise UsageError(f"--data {path} cannot be read ({error.strerror}). Give a text file.") from None
    if len(text) < LEAST_BYTES:
        raise UsageError(f"--data {path} has {len(text)} bytes. Give a text of at least {LEAST_BYTES} bytes.")
    if b"\0" in text:
        raise UsageError(f"--data {path} contains zero bytes, so it is not text. Give a text file.")
    if reason := _find_binary(text):
        raise UsageError(f"--data {path} is not text: {reason}. Give a text file, best in UTF-8.")
    return text


def named_text(data: str | None, most: int | None = None) -> tuple[bytes, str]:
    """Returns the text of a run and its name: the user's file, or the sources of Python's standard library."""
    if data is not None:
        return given_text(Path(data), most=most), name_of(data)
    text = standard_library_text()
    if len(text) < LEAST_BYTES:
        raise UsageError(
            f"the sources of Python's standard library were not found ({len(text)} bytes). Give --data FILE."
        )
    return text, f"python-{platform.python_version()}"


def name_of(data: str) -> str:
    """Returns a file's name for use in case ids: characters that cannot be printed become '?'."""
    return "".join(letter if letter.isprintable() else "?" for letter in Path(data).stem)


def _find_binary(text: bytes) -> str:
    """Returns why these bytes are not text in any language; '' if they may be."""
    controls = len(text) - len(text.translate(None, _CONTROLS))
    if controls > _MOST_CONTROLS * len(text):
        return f"{controls} of {len(text)} bytes are control characters"
    undecodable = text.decode("utf-8", errors="replace").count("\ufffd")
    if undecodable > len(text) / 2:
        return f"{undecodable} of {len(text)} bytes are not valid UTF-8"
    return ""


def prepare_corpus(data: str | None, folder: Path, write: bool = True) -> Corpus:
    """Returns the corpus for a run. With `write`, creates its token file in `folder` unless it exists."""
    text, name = named_text(data)
    digest = hashlib.sha256(text).hexdigest()
    path = folder / f"{digest[:16]}.tokens"
    if write:
        write_tokens(path, lambda: byte_tokens(text))
    return Corpus(str(path.resolve()), name, digest, len(text))


def default_identity() -> str:
    return prepare_corpus(None, Path(), write=False).identity


def byte_tokens(text: bytes) -> bytes:
    """Returns a token of 16 bits for each byte, in the machine's byte order."""
    plain = bytearray(2 * len(text))
    plain[0 if sys.byteorder == "little" else 1 :: 2] = text
    return bytes(plain)


def write_tokens(path: Path, tokens: Callable[[], bytes]) -> None:
    """Creates a token file and its digest, unless an undamaged one exists."""
    digest_file = path.with_suffix(".sha256")
    with contextlib.suppress(OSError):
        if read_file(digest_file).decode() == hashlib.sha256(read_file(path)).hexdigest():
            return
    content = tokens()
    replace_tokens(path, content)
    replace_tokens(digest_file, hashlib.sha256(content).hexdigest().encode())


def replace_tokens(path: Path, tokens: bytes) -> None:
    """Replaces a token file. Runs that have the old one open keep reading it."""
    try:
        write_whole(path, tokens, sync=False)  # replaces it in one step: other runs may read or create the same file
    except OSError as error:
        raise StoreError(f"the token file {path} cannot be written: {error.strerror}. Choose --store DIR.") from None
