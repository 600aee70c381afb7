"""A fleet's machines beside each other: like with like only, who is odd and in what, and what is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

from fp8bench.analysis.fleet import alarms
from fp8bench.analysis.fleet.clocks import of_clocks
from fp8bench.analysis.fleet.found import Deviation, Fields, Figure, FleetReport, Kind, Machine, Oddity, differences
from fp8bench.analysis.fleet.outliers import deviations, seen_from
from fp8bench.analysis.fleet.seen import Seen
from fp8bench.model.fleet import FleetPlan


def report_of(
    seen: Sequence[Seen], plans: Sequence[FleetPlan] = (), expected: Collection[str] = (), excluded: Sequence[str] = ()
) -> FleetReport:
    """What some runs come to. `expected` are machines of which something should have come."""
    members = _kinds(seen)
    figures: list[Figure] = []
    kinds: list[Kind] = []
    for name, ((hardware, software), ones) in zip(_names(), members.items(), strict=False):
        times = _times(ones)
        odd = deviations(times)
        figures += _figures(name, times, odd)
        machines = tuple(dict.fromkeys(one.machine for one in sorted(ones, key=lambda one: one.machine)))
        differs = tuple(differences((hardware, software), next(iter(members)))) if kinds else ()
        kinds.append(Kind(name, machines, hardware, software, differs, seen_from(times)))
    settings = dict.fromkeys(cell.setting for plan in plans for cell in plan.cells)
    settings |= dict.fromkeys(setting for one in seen for setting in (*one.whole, *one.cut))
    done = {setting for one in seen for setting in one.whole}
    wrong, doubts = of_clocks(seen, plans)
    found = (
        *alarms.of_software(kinds), *alarms.of_times(figures), *alarms.of_bits(members.values()),
        *alarms.of_coverage(seen, expected), *alarms.of_failures(seen), *wrong,
    )  # fmt: skip
    return FleetReport(
        tuple(_machines(seen, kinds, figures)), tuple(kinds), tuple(figures),
        tuple(sorted(found, key=lambda one: (one.machine, list(Oddity).index(one.what)))),
        len(settings), tuple(one for one in settings if one not in done),
        (*excluded, *_without_bits(seen), *doubts),
        {kind.name: why for kind in kinds[1:] if (why := _why_not(kind, kinds[0]))},
    )  # fmt: skip


def _without_bits(seen: Sequence[Seen]) -> Iterator[str]:
    for machine, count in Counter(one.machine for one in seen if one.cell and not one.bits).items():
        yield f"of {machine} {count} runs have no bits: its devices could not compute them"


def _names() -> Iterator[str]:
    """A, B, ..., Z, A1, ..."""
    number = 0
    while True:
        yield from (chr(ord("A") + letter) + (str(number) if number else "") for letter in range(26))
        number += 1


def _kinds(seen: Sequence[Seen]) -> dict[tuple[Fields, Fields], list[Seen]]:
    """Runs by what they were made under, those of most machines first."""
    found: dict[tuple[Fields, Fields], list[Seen]] = {}
    for one in seen:
        found.setdefault((one.hardware, one.software), []).append(one)
    most = sorted(found.items(), key=lambda pair: (-len({one.machine for one in pair[1]}), pair[0]))
    return dict(most)


def _why_not(kind: Kind, first: Kind) -> str:
    """The fields of software and settings that keep a kind's times from being held against the first kind's."""
    return "; ".join(differences(((), kind.software), ((), first.software)))


def _times(ones: Sequence[Seen]) -> dict[str, dict[str, float]]:
    """Seconds by case and machine: the middle of a machine's runs."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in ones:
        for case, seconds in one.times.items():
            found.setdefault(case, {}).setdefault(one.machine, []).append(seconds)
    return {case: {name: median(values) for name, values in by.items()} for case, by in found.items()}


def _figures(kind: str, times: Mapping[str, Mapping[str, float]], odd: Sequence[Deviation]) -> Iterator[Figure]:
    by_case: dict[str, dict[str, Deviation]] = {}
    for one in odd:
        by_case.setdefault(one.case, {})[one.machine] = one
    if "" in by_case:
        yield Figure("", kind, {}, by_case[""])
    for case, seconds in times.items():
        yield Figure(case, kind, seconds, by_case.get(case, {}))


def _machines(seen: Sequence[Seen], kinds: Sequence[Kind], figures: Sequence[Figure]) -> Iterator[Machine]:
    middles = (figure.deviations for figure in figures if not figure.case)
    overall = {machine: one.change for middle in middles for machine, one in middle.items()}
    for name in sorted({one.machine for one in seen}):
        own = [one for one in seen if one.machine == name]
        yield Machine(
            name, tuple(kind.name for kind in kinds if name in kind.machines), len(own),
            len({setting for one in own for setting in one.whole}),
            len({case for one in own for case in one.failed}), overall.get(name),
        )  # fmt: skip
