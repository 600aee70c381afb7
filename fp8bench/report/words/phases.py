"""What the phases of a step do when its precision changes, in half sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from fp8bench import units
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Finding
from fp8bench.report.words.legend import PHASE_WORDS
from fp8bench.report.words.naming import listed

LEAST_SHARE = 0.03
LEAST_CHANGE = 1.05


class Change(StrEnum):
    """What became of a phase."""

    GAINS = "gains"
    LOSES = "loses"
    SAME = "same"
    NEW = "new"
    GONE = "gone"


def is_mixed(finding: Finding) -> bool:
    """Whether a step is made of several phases that matter: then its whole says little of any of them."""
    return len(set(_large(finding)) - {UNATTRIBUTED}) > 1


def phase_clauses(own: Finding, base: Finding) -> str:
    """'; products gain 1.50x; data loading takes 13% of the step and does not gain', in the order of what happens."""
    seconds, before = dict(own.phases), dict(base.phases)
    unknown = {*own.below_floor, *base.below_floor}
    large = {*_large(own), *_large(base)} - unknown
    names: dict[Change, list[str]] = {change: [] for change in Change}
    for name in (one for one in CELL_PHASES if one in large):
        names[change_of(seconds.get(name, 0.0), before.get(name, 0.0))].append(name)
    times = {name: units.speed_up(before[name] / seconds[name]) for name in names[Change.GAINS]}
    times |= {name: units.speed_up(seconds[name] / before[name]) for name in names[Change.LOSES]}
    clauses = [
        listed([f"{_subject([name], 'gain')} {times[name]}" for name in names[Change.GAINS]], len(CELL_PHASES)),
        _taking(names[Change.SAME], own, "do not gain", "does not gain"),
        listed([f"{_subject([name], 'take')} {times[name]} as long" for name in names[Change.LOSES]], len(CELL_PHASES)),
        _taking(names[Change.NEW], own, "come on top", "comes on top"),
        _subject(names[Change.GONE], "fall") + " away" if names[Change.GONE] else "",
    ]
    return "".join(f"; {clause}" for clause in clauses if clause)


def change_of(own: float, base: float) -> Change:
    """A phase gains or loses where its times differ by more than 5%."""
    if base <= 0:
        return Change.NEW
    if own <= 0:
        return Change.GONE
    if base / own > LEAST_CHANGE:
        return Change.GAINS
    return Change.LOSES if own / base > LEAST_CHANGE else Change.SAME


def _large(finding: Finding) -> Iterable[str]:
    """The phases that take more than 3% of the step."""
    best = finding.best_seconds or 0.0
    return [name for name, seconds in finding.phases if seconds > LEAST_SHARE * best > 0]


def _taking(names: Sequence[str], finding: Finding, many: str, one: str) -> str:
    """'data loading and casts take 23% of the step and do not gain'."""
    if not names or not finding.best_seconds:
        return ""
    seconds = dict(finding.phases)
    share = sum(seconds[name] for name in names) / finding.best_seconds
    return f"{_subject(names, 'take')} {units.percent(share, 0)} of the step and {many if _plural(names) else one}"


def _subject(names: Sequence[str], verb: str) -> str:
    """'products gain', 'attention gains'."""
    words = listed([PHASE_WORDS[name][0] for name in names], len(CELL_PHASES))
    return f"{words} {verb}{'' if _plural(names) else 's'}"


def _plural(names: Sequence[str]) -> bool:
    return len(names) > 1 or PHASE_WORDS[names[0]][1]
