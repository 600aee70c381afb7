"""Who is named in a report of a fleet, for what, and in which words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from fp8bench.analysis.fleet.dissent import Dissent, dissents, shortened
from fp8bench.analysis.fleet.found import Alarm, Figure, Kind, Oddity, differences
from fp8bench.analysis.fleet.seen import Seen
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
