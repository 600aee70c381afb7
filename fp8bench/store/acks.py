"""Stores acknowledgements: changes of a series that a person has accepted. The file `<store>/acks.jsonl` has one
acknowledgement per line, and lines are only appended.

A line is {"version": 1, "ack": {...}} or {"version": 1, "undo": {"id": ..., "when": ...}}. In git, the setting
`acks.jsonl merge=union` merges the files of two machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.model import Ack
from fp8bench.store.kept_lines import Log

ACKNOWLEDGEMENT_LOG_VERSION = 1


@dataclass(frozen=True)
class AckWithdrawal:
    """A line of the file that withdraws the acknowledgement with this `id`."""

    id: str
    when: str


@dataclass(frozen=True)
class Acks:
    """The valid acknowledgements, oldest first. `troubles` has a sentence for each invalid line of the file."""

    acks: tuple[Ack, ...] = ()
    troubles: tuple[str, ...] = ()


def get_acks_path(store: Path) -> Path:
    return store / "acks.jsonl"


def load_acks(store: Path) -> Acks:
    try:
        lines, troubles = _open_acks_log(store).lines()
    except StoreError as error:
        # The error's text is '<path> cannot be read (...).' Replace the path by 'it', because reports already print it.
        unreadable_text = "it" + str(error).removeprefix(str(get_acks_path(store))).rstrip(".")
        return Acks(troubles=(f"{unreadable_text}, so nothing counts as acknowledged",))
    ids_of_undone_acks = {line.id for line in lines if isinstance(line, AckWithdrawal)}
    # If two lines have the same id, the earlier line counts.
    acknowledgement_by_id = {
        line.id: line for line in reversed(lines) if isinstance(line, Ack) and line.id not in ids_of_undone_acks
    }
    return Acks(
        tuple(sorted(acknowledgement_by_id.values(), key=lambda ack: (ack.when, ack.id))),
        tuple(f"{trouble}, and is ignored" for trouble in troubles),
    )


def append_acks(store: Path, lines: Sequence[Ack | AckWithdrawal]) -> None:
    _open_acks_log(store).append(lines)


def merge_acks(store: Path, theirs: Path) -> int:
    """Adds the acknowledgements of a second store that this store lacks. Returns the number of added lines. Raises
    StoreError.
    """
    return len(_open_acks_log(store).merge(_open_acks_log(theirs).lines()[0]))


def _open_acks_log(store: Path) -> Log[Ack | AckWithdrawal]:
    remedy = "Make room, or acknowledge in a store that is writable."
    return Log(
        get_acks_path(store),
        {"undo": AckWithdrawal, "ack": Ack},
        "acknowledgement",
        ACKNOWLEDGEMENT_LOG_VERSION,
        remedy,
    )
