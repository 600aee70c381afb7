"""What the memory of cases says: what it is for, against the reference's, and in sentences why little was saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model import PHASES, UNATTRIBUTED, MemoryRole, MemoryUse, Phase, Record, Status
from fp8bench.report.case_status import emulated
from fp8bench.report.panels import Panel, Result, ResultGroup
from fp8bench.report.terminal.tables import value_of
from fp8bench.report.words.legend import MEMORY_WORDS, PHASE_WORDS
from fp8bench.report.words.naming import NamedCase, listed

PEAK = "peak_memory"
# A saving of less is called none.
_LEAST_SAVING = 0.01
# A change counts that is so large a part of all changes, and so large a part of the reference's memory.
_LEAST_OF_CHANGES = 0.1
_LEAST_OF_PEAK = 0.01
_MOST_CHANGES = 4
# What stays is named if it is such a part of the memory.
_LEAST_STAYING = 0.1
_MOST_EQUAL = 0.005
# Beside what it becomes, or was: a ratio would say little.
_NEXT_TO_NOTHING = 0.05
# Where the highest point lies in several phases that lie in each other, these are the outer ones.
_OUTER = (UNATTRIBUTED, Phase.ELEMENTWISE)


def use_of(record: Record) -> MemoryUse | None:
    """What a case's memory is made of; None where nobody looked, or could."""
    return record.memory if record.status is Status.OK else None


def peak_of(result: Result) -> float | None:
    """Bytes at the highest point of a step, however old the run."""
    return value_of(result.record.measurement(PEAK))


def roles_of(result: Result) -> dict[MemoryRole, int]:
    """Bytes by what they are for, in the order of the roles; {} where nobody knows."""
    use = use_of(result.record)
    known = dict(use.roles) if use else {}
    return {role: known[role] for role in MemoryRole if role in known}


def roles_in(results: Iterable[Result]) -> list[MemoryRole]:
    """The roles that occur, in their order."""
    present = {role for one in results for role in roles_of(one)}
    return [role for role in MemoryRole if role in present]


def highest_in(use: MemoryUse) -> list[str]:
    """The phases whose highest point is the step's, inner ones first."""
    most = max((one.allocated for one in use.phases), default=0)
    found = [one.phase for one in use.phases if one.allocated == most]
    return sorted(found, key=lambda phase: (phase in _OUTER, PHASES.index(phase) if phase in PHASES else 0))


def share_of(group: ResultGroup, result: Result) -> float | None:
    """A peak over that of the group's reference; None for the reference, and where either is no number."""
    reference = reference_of(group)
    if reference is None or result.record.is_reference:
        return None
    base, peak = peak_of(reference), peak_of(result)
    if base is None or peak is None or not (0 < base < math.inf and 0 <= peak < math.inf):
        return None
    return peak / base


def reference_of(group: ResultGroup) -> Result | None:
    return next((one for one in group.results if one.record.is_reference), None)


@dataclass(frozen=True)
class _Compared:
    """A case beside its group's reference."""

    case: NamedCase
    share: float


def _base(one: _Compared) -> float:
    reference = reference_of(one.case.group)
    return (peak_of(reference) if reference else None) or 0.0


def sentences(panel: Panel, cases: Iterable[NamedCase]) -> Iterator[str]:
    """What each precision takes against the reference, and what that comes from as far as it is known."""
    by_mode: dict[str, list[_Compared]] = {}
    for case in cases:
        share = share_of(case.group, case.result)
        if share is not None:
            by_mode.setdefault(case.result.mode, []).append(_Compared(case, share))
    for mode, found in by_mode.items():
        none = [one for one in found if one.share > 1 - _LEAST_SAVING]
        words = f"{mode} takes {_range([one.share for one in found])} of {panel.reference}'s memory"
        if none:
            where = "" if len(none) == len(found) else f" in {len(none)} of {len(found)} groups"
            words += f": nothing is saved{where}"
        yield f"{words}{_why(max(none or found, key=_base), len(found) > 1)}."


def _why(one: _Compared, several: bool) -> str:
    """That it is emulated, where it is and saves nothing; then what stays and what differs, as far as it is known."""
    told = _told(one.case)
    place = f"at {one.case.place} " if several and one.case.place else ""
    text = f"{place}{told}" if told else ""
    if one.share <= 1 - _LEAST_SAVING:
        return f": {text}" if text else ""
    reason = one.case.result.record.support.reason
    if emulated(one.case.result) and reason:
        because = f", because it is emulated ({reason}): its peak is the cost of emulation"
        return f"{because}; {text}" if text else because
    return f"; {text}" if text else ""


def _told(case: NamedCase) -> str:
    """'weights and optimizer state stay (11.5 MiB), low-precision copies of weights are 2.000x (3.38 MiB)'."""
    reference = reference_of(case.group)
    before, after = (roles_of(one) if one else {} for one in (reference, case.result))
    if not before or not after:
        return ""
    return ", ".join(filter(None, (_staying(before, after), *_changes(before, after), _elsewhere(case))))


def _staying(before: Mapping[MemoryRole, int], after: Mapping[MemoryRole, int]) -> str:
    """What lower precision leaves as it is, where that is much."""
    total = sum(after.values())
    same = {
        role: size
        for role, size in after.items()
        if size >= _LEAST_STAYING * total and abs(size - before.get(role, 0)) <= _MOST_EQUAL * size
    }
    if not same:
        return ""
    word = "stays" if len(same) == 1 and not _plural(*same) else "stay"
    return f"{listed([MEMORY_WORDS[role] for role in same])} {word} ({units.size(sum(same.values()))})"


def _changes(before: Mapping[MemoryRole, int], after: Mapping[MemoryRole, int]) -> Iterator[str]:
    """The largest differences, the largest first."""
    changes = {role: after.get(role, 0) - before.get(role, 0) for role in MemoryRole}
    moved, total = sum(map(abs, changes.values())), sum(before.values())
    least = max(_LEAST_OF_CHANGES * moved, _LEAST_OF_PEAK * total, 1)
    for role in sorted(changes, key=lambda role: -abs(changes[role]))[:_MOST_CHANGES]:
        if abs(changes[role]) >= least:
            yield _change(role, before.get(role, 0), after.get(role, 0))


def _change(role: MemoryRole, before: int, after: int) -> str:
    words, ending = MEMORY_WORDS[role], "" if _plural(role) else "s"
    if before <= _NEXT_TO_NOTHING * after:
        return f"{words} add{ending} {units.size(after - before)}"
    if after <= _NEXT_TO_NOTHING * before:
        return f"{words} {'go' if _plural(role) else 'goes'} ({units.size(before)})"
    return f"{words} {'are' if _plural(role) else 'is'} {units.ratio(after / before)} ({units.size(after)})"


def _plural(role: MemoryRole) -> bool:
    return role not in (MemoryRole.OPTIMIZER, MemoryRole.DATA, MemoryRole.WORKSPACE, MemoryRole.OTHER)


def _elsewhere(case: NamedCase) -> str:
    """Where the highest point lies, if that is in another phase than the reference's."""
    reference = reference_of(case.group)
    there, here = (use_of(one.record) if one else None for one in (reference, case.result))
    if there is None or here is None or not there.phases or set(highest_in(there)) & set(highest_in(here)):
        return ""
    return f"and its highest point is in {phase_named(highest_in(here)[0])}"


def phase_named(phase: str) -> str:
    """As a sentence calls it."""
    return PHASE_WORDS[phase][0] if phase in PHASE_WORDS else phase


def _range(shares: Sequence[float]) -> str:
    low, high = units.ratio(min(shares)), units.ratio(max(shares))
    return low if low == high else f"{low} to {high}"
