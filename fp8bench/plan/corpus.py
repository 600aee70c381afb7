"""The text a run trains on, as a token file to map into memory: one 16-bit token a byte.

By default it is the source of Python's own standard library, found on the machine: real text that every machine with
this Python has in the same words. Its hash is part of every case that reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError, UsageError
from fp8bench.files import open_file, read_file, write_whole
from fp8bench.plan.bpe import encoded

MOST_BYTES = 8 << 20
LEAST_BYTES = 64 << 10
# Prose has hardly any but those that move the cursor; in compressed data every tenth byte is one.
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\r\f\b"))
_MOST_CONTROLS = 0.02


@dataclass(frozen=True)
class Corpus:
    """A token file: where it is, what to call it, and the hash of its text."""

    path: str
    name: str
    digest: str
    num_tokens: int

    @property
    def identity(self) -> str:
        """What goes into the case: 'python-3.11.7:1a2b3c4d'."""
        return f"{self.name}:{self.digest[:8]}"


def standard_library_text() -> bytes:
    """The first 8 MiB of the standard library's modules, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("asyncio/*.py")) + sorted(root.glob("email/*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= MOST_BYTES:
            break
    return b"".join(parts)[:MOST_BYTES]


def given_text(path: Path, most: int | None = None) -> bytes:
    """The text of a user's file, `most` bytes of it; what cannot be trained on is refused with a sentence."""
    try:
        with open_file(path, most=None) as file:
            text = file.read(most or MOST_BYTES)
    except OSError as error:
        raise UsageError(f"--data {path} cannot be read ({error.strerror}). Give a text file.") from None
    if len(text) < LEAST_BYTES:
        raise UsageError(f"--data {path} has {len(text)} bytes. Give a text of at least {LEAST_BYTES} bytes.")
    if b"\0" in text:
        raise UsageError(f"--data {path} has zero bytes, so it is no text. Give a text file.")
    why = _no_text(text)
    if why:
        raise UsageError(f"--data {path} is no text: {why}. Give a text file, best in UTF-8.")
    return text


def named_text(data: str | None, most: int | None = None) -> tuple[bytes, str]:
    """The text of a run and its name: the user's, or Python's own sources."""
    if data is not None:
        return given_text(Path(data), most=most), name_of(data)
    text = standard_library_text()
    if len(text) < LEAST_BYTES:
        raise UsageError(f"Python's own sources were not found ({len(text)} bytes). Name a text with --data FILE.")
    return text, f"python-{platform.python_version()}"


def name_of(data: str) -> str:
    """A file by its name, which need not be text, and stands in case ids."""
    return "".join(letter if letter.isprintable() else "?" for letter in Path(data).stem)


def _no_text(text: bytes) -> str:
    """What tells bytes from prose, whatever its language; '' if nothing does."""
    controls = len(text) - len(text.translate(None, _CONTROLS))
    if controls > _MOST_CONTROLS * len(text):
        return f"{controls} of {len(text)} bytes are control characters"
    undecodable = text.decode("utf-8", errors="replace").count("\ufffd")
    if undecodable > len(text) / 2:
        return f"{undecodable} of {len(text)} bytes fit no UTF-8"
    return ""


def prepare_corpus(data: str | None, folder: Path, write: bool = True) -> Corpus:
    """The corpus for a run; its token file is made in `folder` once for each text, if it is to be written."""
    text, name = named_text(data)
    digest = hashlib.sha256(text).hexdigest()
    path = folder / f"{digest[:16]}.tokens"
    if write:
        write_tokens(path, lambda: encoded(text, ()))
    return Corpus(str(path.resolve()), name, digest, len(text))


def default_identity() -> str:
    """What cases that read the default text say of it."""
    return prepare_corpus(None, Path(), write=False).identity


def write_tokens(path: Path, tokens: Callable[[], bytes]) -> None:
    """Make a token file where there is none that is as it was written: a digest lies beside it."""
    noted = path.with_suffix(".sha256")
    with contextlib.suppress(OSError):
        if read_file(noted).decode() == hashlib.sha256(read_file(path)).hexdigest():
            return
    made = tokens()
    replace_tokens(path, made)
    replace_tokens(noted, hashlib.sha256(made).hexdigest().encode())


def replace_tokens(path: Path, tokens: bytes) -> None:
    """Make a token file, whatever lies there: who reads that one goes on with it."""
    try:
        write_whole(path, tokens, sync=False)  # another run may be reading or making the same file
    except OSError as error:
        raise StoreError(f"the token file {path} cannot be written: {error.strerror}. Choose --store DIR.") from None
