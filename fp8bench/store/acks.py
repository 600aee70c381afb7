"""Changes that somebody has seen and accepted: `<store>/acks.jsonl`, a line each, append-only.

A line is {"version": 1, "ack": {...}} or {"version": 1, "undo": {"id": ..., "when": ...}}. What holds is a matter of
which lines there are and not of their order, so that files of two machines merge line by line (in git:
`acks.jsonl merge=union`). A line that cannot be read acknowledges nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import Damaged, append_lines, sealed_line, unsealed_line
from fp8bench.model import Ack
from fp8bench.model.codec import Malformed, decode, encode

VERSION = 1


@dataclass(frozen=True)
class Undo:
    """An ack, by its id, that does not hold any more."""

    id: str
    when: str


@dataclass(frozen=True)
class Acks:
    """Those that hold, oldest first. `troubles` say which lines were not taken, and why."""

    acks: tuple[Ack, ...] = ()
    troubles: tuple[str, ...] = ()


def acks_of(store: Path) -> Path:
    """Where a store keeps them."""
    return store / "acks.jsonl"


def load_acks(store: Path) -> Acks:
    """A store's acks: none without the file."""
    try:
        lines, troubles = _lines(acks_of(store))
    except OSError as error:
        return Acks(troubles=(f"it cannot be read ({error.strerror}), so that nothing counts as acknowledged",))
    undone = {one.id for one in lines.values() if isinstance(one, Undo)}
    found: dict[str, Ack] = {}
    for one in lines.values():
        if isinstance(one, Ack) and one.id not in undone:
            found.setdefault(one.id, one)
    return Acks(tuple(sorted(found.values(), key=lambda one: (one.when, one.id))), tuple(troubles))


def _lines(path: Path) -> tuple[dict[bytes, Ack | Undo], list[str]]:
    """The lines of a file and what they say, and a sentence on each that says nothing. Raises OSError."""
    sound: dict[bytes, Ack | Undo] = {}
    troubles = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else (), 1):
        try:
            if line.strip():
                sound[line] = _read(line)
        except Malformed as error:
            troubles.append(f"line {number} {error}, and acknowledges nothing")
    return sound, troubles


def append_acks(store: Path, lines: Sequence[Ack | Undo]) -> None:
    """Write them through to the disk, after whatever stands there, a line that was cut off included."""
    kinds = {Ack: "ack", Undo: "undo"}
    _append(store, [sealed_line({"version": VERSION, kinds[type(one)]: encode(one)}) for one in lines])


def merge_acks(store: Path, other: Path) -> int:
    """Take in the lines of another store that can be read and are not here; returns how many those are."""
    try:
        theirs, _ = _lines(acks_of(other))
    except OSError as error:
        raise StoreError(f"{acks_of(other)} was not taken ({error.strerror}).") from None
    ours, _ = _lines(acks_of(store))
    new = [line.decode() for line in theirs if line not in ours]
    if new:
        _append(store, new)
    return len(new)


def _append(store: Path, lines: Sequence[str]) -> None:
    path = acks_of(store)
    try:
        append_lines(path, lines)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}). Make room, or acknowledge where the store may be written."
        ) from None


def _read(line: bytes) -> Ack | Undo:
    """What a line says; raises Malformed with the rest of a sentence that begins with the line's name."""
    try:
        content, _ = unsealed_line(line)
    except Damaged as error:
        raise Malformed(f"is not as it was written: {error}") from None
    except (ValueError, RecursionError):
        raise Malformed("is no JSON") from None
    if content.get("version") != VERSION:
        raise Malformed(f"is of version {content.get('version')!r:.20} (this fp8bench reads {VERSION})")
    try:
        if "undo" in content:
            return decode(Undo, content["undo"])
        return decode(Ack, content.get("ack"))
    except Malformed as error:
        raise Malformed(f"is no acknowledgement ({error})") from None
