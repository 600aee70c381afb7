"""Changes that a person has accepted: `<store>/acks.jsonl`, one a line, append-only.

A line is {"version": 1, "ack": {...}} or {"version": 1, "undo": {"id": ..., "when": ...}}. In git, `acks.jsonl
merge=union` merges two machines' files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.model import Ack
from fp8bench.store.kept_lines import Log

VERSION = 1


@dataclass(frozen=True)
class Undo:
    """Withdraws the ack of this id."""

    id: str
    when: str


@dataclass(frozen=True)
class Acks:
    """The valid acks, oldest first. `troubles` name the lines that were left out, with the reason."""

    acks: tuple[Ack, ...] = ()
    troubles: tuple[str, ...] = ()


def acks_of(store: Path) -> Path:
    return store / "acks.jsonl"


def load_acks(store: Path) -> Acks:
    try:
        lines, troubles = _log(store).lines()
    except StoreError as error:
        reason = str(error).removeprefix(str(acks_of(store))).rstrip(".")
        return Acks(troubles=(f"it{reason}, so that nothing counts as acknowledged",))
    undone = {line.id for line in lines if isinstance(line, Undo)}
    acks = {line.id: line for line in reversed(lines) if isinstance(line, Ack) and line.id not in undone}
    return Acks(
        tuple(sorted(acks.values(), key=lambda ack: (ack.when, ack.id))),
        tuple(f"{trouble}, and acknowledges nothing" for trouble in troubles),
    )


def append_acks(store: Path, lines: Sequence[Ack | Undo]) -> None:
    _log(store).append(lines)


def merge_acks(store: Path, theirs: Path) -> int:
    """Adds the lines of a second store that are missing here; returns their number. Raises StoreError."""
    return len(_log(store).merge(_log(theirs).lines()[0]))


def _log(store: Path) -> Log[Ack | Undo]:
    remedy = "Make room, or acknowledge where the store may be written."
    return Log(acks_of(store), {"undo": Undo, "ack": Ack}, "acknowledgement", VERSION, remedy)
