"""What the memory of cases says: what it is for, against the reference's, and in sentences why little was saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from fp8bench import units
from fp8bench.model import PHASES, UNATTRIBUTED, MemoryRole, MemoryUse, Phase, Record, Status
from fp8bench.report.case_status import emulated
from fp8bench.report.panels import Panel, Result, ResultGroup, together
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


def highest_in(use: MemoryUse) -> list[str]:
    """The phases whose highest point is the step's, inner ones first."""
    most = max((one.allocated for one in use.phases), default=0)
    found = [one.phase for one in use.phases if one.allocated == most]
    return sorted(found, key=lambda phase: (phase in _OUTER, PHASES.index(phase) if phase in PHASES else 0))


def share_of(group: ResultGroup, result: Result) -> float | None:
    """A peak over that of the group's reference; None for the reference, and where either is no number."""
    base, peak = _base(group), peak_of(result)
    if result.record.is_reference or peak is None or not (0 < base < math.inf and 0 <= peak < math.inf):
        return None
    return peak / base


def _base(group: ResultGroup) -> float:
    return (peak_of(group.lead) if group.lead else None) or 0.0


def sentences(panel: Panel, cases: Iterable[NamedCase]) -> Iterator[str]:
    """What each precision takes against the reference, and what that comes from as far as it is known."""
    shares = ((case, share_of(case.group, case.result)) for case in cases)
    by_mode = together((case.result.mode, (case, share)) for case, share in shares if share is not None)
    for mode, found in by_mode.items():
        none = [(case, share) for case, share in found if share > 1 - _LEAST_SAVING]
        words = f"{mode} takes {units.span((share for _, share in found), units.ratio)} of {panel.reference}'s memory"
        if none:
            where = "" if len(none) == len(found) else f" in {len(none)} of {len(found)} groups"
            words += f": nothing is saved{where}"
        largest, share = max(none or found, key=lambda pair: _base(pair[0].group))
        yield f"{words}{_why(largest, share, len(found) > 1)}."


def _why(case: NamedCase, share: float, several: bool) -> str:
    """That it is emulated, where it is and saves nothing; then what stays and what differs, as far as it is known."""
    told = _told(case)
    place = f"at {case.place} " if several and case.place else ""
    text = f"{place}{told}" if told else ""
    if share <= 1 - _LEAST_SAVING:
        return f": {text}" if text else ""
    reason = case.result.record.support.reason
    if emulated(case.result) and reason:
        because = f", because it is emulated ({reason}): its peak is the cost of emulation"
        return f"{because}; {text}" if text else because
    return f"; {text}" if text else ""


def _told(case: NamedCase) -> str:
    """'weights and optimizer state stay (11.5 MiB), low-precision copies of weights are 2.000x (3.38 MiB)'."""
    before, after = (roles_of(one) if one else {} for one in (case.group.lead, case.result))
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
    there, here = (use_of(one.record) if one else None for one in (case.group.lead, case.result))
    if there is None or here is None or not there.phases or set(highest_in(there)) & set(highest_in(here)):
        return ""
    phase = highest_in(here)[0]
    return f"and its highest point is in {PHASE_WORDS.get(phase, (phase, False))[0]}"
