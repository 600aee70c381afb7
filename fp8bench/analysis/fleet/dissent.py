"""Machines that give other bits than others of their kind for the same numbers, or cannot repeat their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench.analysis.fleet.seen import Seen

# Names that stand in one sentence.
_MOST = 4


@dataclass(frozen=True)
class Dissent:
    """What a machine gives other bits for: operations, or errors of cases. `unstable`: they differ from its own;
    `others`: from those of most machines of its kind; `torn`: from some, and nobody has most on their side."""

    machine: str
    unstable: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()


def dissents(kind: Sequence[Seen]) -> tuple[Dissent, ...]:
    """Of the machines of one kind, by all of their runs."""
    found: dict[str, dict[str, list[str]]] = {}

    def note(machine: str, which: str, what: str) -> None:
        found.setdefault(machine, {}).setdefault(which, []).append(what)

    for what, told in sorted(_told(kind).items()):
        steady = {machine: next(iter(values)) for machine, values in told.items() if len(values) == 1}
        for machine in sorted(told.keys() - steady.keys()):
            note(machine, "unstable", what)
        votes = Counter(steady.values())
        if len(votes) < 2:
            continue
        most, count = votes.most_common(1)[0]
        for machine, value in steady.items():
            if 2 * count <= len(steady):
                note(machine, "torn", what)
            elif value != most:
                note(machine, "others", what)
    return tuple(
        Dissent(machine, **{which: tuple(names) for which, names in by.items()})
        for machine, by in sorted(found.items())
    )


def _told(kind: Sequence[Seen]) -> dict[str, dict[str, set[str]]]:
    """What was told of each operation and error: all that a machine ever gave, by machine."""
    told: dict[str, dict[str, set[str]]] = {}
    for one in kind:
        for what, values in _said(one):
            if values:
                told.setdefault(what, {}).setdefault(one.machine, set()).update(values)
    return told


def _said(one: Seen) -> Iterator[tuple[str, tuple[str, ...]]]:
    for bits in one.bits:
        yield f"{bits.dtype} {bits.operation} on {bits.device}", bits.digests
    for name, value in one.errors.items():
        yield name, (value,)


def shortened(names: Sequence[str]) -> str:
    """'float32 product on cpu, ... and 3 more'."""
    more = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")
