"""Who is named in a report of a fleet, for what, and in which words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

from fp8bench.features.fleet.machines import (
    Alarm,
    Deviation,
    Fields,
    Figure,
    FleetReport,
    Kind,
    Machine,
    Oddity,
    Seen,
    differences,
)
from fp8bench.features.fleet.odd import Dissent, deviations, dissents, of_clocks, seen_from, shortened
from fp8bench.model.fleet import FleetPlan
from fp8bench.units import change


def of_software(kinds: Sequence[Kind]) -> Iterator[Alarm]:
    """Of machines that have other software or settings than more machines of the same hardware."""
    for place, kind in enumerate(kinds):
        larger = next((one for one in kinds[:place] if one.hardware == kind.hardware), None)
        if larger is not None and len(larger.machines) > len(kind.machines):
            why = "; ".join(differences(((), kind.software), ((), larger.software)))
            for machine in kind.machines:
                yield Alarm(
                    machine,
                    Oddity.SOFTWARE,
                    f"{why}, as {len(larger.machines)} others of its hardware have it: not compared",
                )


def of_times(figures: Sequence[Figure]) -> Iterator[Alarm]:
    """Of machines that are odd over all cases, and else of each case in which one is."""
    overall = {(figure.kind, name) for figure in figures if not figure.case
               for name, one in figure.deviations.items() if one.odd}  # fmt: skip
    for figure in figures:
        for machine, one in figure.deviations.items():
            if not one.odd or (figure.case and (figure.kind, machine) in overall):
                continue
            what = Oddity.SLOW if one.change > 0 else Oddity.FAST
            far = f"{abs(one.score):.0f} spreads" if math.isfinite(one.score) else "while all others are alike"
            where = f"in {figure.case}" if figure.case else "in its median case"
            beside = f"beside {len(figure.deviations) - 1} others of its kind"
            yield Alarm(machine, what, f"{change(1 + one.change)} time {where}, {beside} ({far})")


def of_bits(kinds: Collection[Sequence[Seen]]) -> Iterator[Alarm]:
    for ones in kinds:
        for found in dissents(ones):
            yield from _of_dissent(found)


def _of_dissent(found: Dissent) -> Iterator[Alarm]:
    if found.unstable:
        words = f"does not repeat its own bits for the same numbers: {shortened(found.unstable)}"
        yield Alarm(found.machine, Oddity.UNSTABLE, words)
    if found.others:
        words = f"gives other bits than most of its kind for the same numbers: {shortened(found.others)}"
        yield Alarm(found.machine, Oddity.BITS, words)
    if found.torn:
        words = (
            "its bits and those of others of its kind differ, none with most on its side, so that either may be wrong"
        )
        yield Alarm(found.machine, Oddity.BITS, f"{words}: {shortened(found.torn)}")


def of_coverage(seen: Sequence[Seen], expected: Collection[str]) -> Iterator[Alarm]:
    """Of machines whose runs were cut off, or that have not what at least half of the others have."""
    own: dict[str, list[Seen]] = {}
    for one in seen:
        own.setdefault(one.machine, []).append(one)
    # Mappings, not sets: the same runs give the same words.
    whole = {machine: dict.fromkeys(setting for one in ones for setting in one.whole) for machine, ones in own.items()}
    for machine, ones in own.items():
        cut = {setting: one.run for one in ones for setting in one.cut if setting not in whole[machine]}
        if cut:
            words = f"{len(cut)} of its cells were cut off and not resumed: " + shortened(
                [f"{setting} (run {run})" for setting, run in cut.items()]
            )
            yield Alarm(machine, Oddity.CUT_OFF, words)
        others = [have for name, have in whole.items() if name != machine]
        common = Counter(setting for have in others for setting in have)
        wanted = [setting for setting, count in common.items() if count > 1 and 2 * count >= len(others)]
        lacking = [setting for setting in wanted if setting not in whole[machine] and setting not in cut]
        if lacking:
            words = (
                f"{len(lacking)} of {len(wanted)} cells that other machines measured are missing: {shortened(lacking)}"
            )
            yield Alarm(machine, Oddity.MISSING, words)
    for machine in sorted(set(expected) - own.keys()):
        yield Alarm(machine, Oddity.MISSING, "nothing came of it")


def of_failures(seen: Sequence[Seen]) -> Iterator[Alarm]:
    """Of cases that failed on a machine and came to numbers on others."""
    good = {case for one in seen for case in one.times}
    failed: dict[str, dict[str, str]] = {}
    for one in seen:
        failed.setdefault(one.machine, {}).update({case: why for case, why in one.failed.items() if case in good})
    for machine, cases in failed.items():
        if cases:
            case, why = next(iter(cases.items()))
            yield Alarm(
                machine, Oddity.FAILED, f"{len(cases)} of the cases that others measured failed: {case} ({why})"
            )


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
        *of_software(kinds), *of_times(figures), *of_bits(members.values()),
        *of_coverage(seen, expected), *of_failures(seen), *wrong,
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
