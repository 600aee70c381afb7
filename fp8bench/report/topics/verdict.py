"""The answer: a word for each question, then plain sentences."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.model import Status
from fp8bench.report.case_status import (
    Standing,
    emulated,
    show_speed_up,
    speed_up,
    standing,
    status_words,
    tone_of,
    what_intervals_hold,
)
from fp8bench.report.elements import Element, Field, Items, Text, Tone, Verdicts
from fp8bench.report.energies import ratio_against
from fp8bench.report.page.section import Entry, Material, section
from fp8bench.report.panels import NamedCase, Panel, together
from fp8bench.report.topics.memory import share_of
from fp8bench.report.topics.tensors import about_tensors, best_by_width, timed_panels
from fp8bench.report.words import legend
from fp8bench.report.words.naming import MOSTLY, counts, listed, many, missing_of, setting_of, shortened, suites_of
from fp8bench.report.words.speed import comparisons, doubt_of_all, over_loads, shared_labels

LONGEST_REASON = 300
_MOST_SUITES = 2
# Up to this many emulated precisions have a sentence each.
_MOST_ALONE = 2
# The most sentences of one kind; the table has every case.
_MOST = 12
# Smaller differences of memory are called the same.
_ALIKE = 0.03
_TONES = {"less": Tone.GOOD, "more": Tone.BAD, "unclear": Tone.DOUBT}
_NOT_MEASURED = Field("not measured", tone=Tone.DOUBT)
_NO_CLAIM = Field("no claim", tone=Tone.DOUBT, hint="emulated")


def _reason(case: NamedCase) -> str:
    return shortened(case.result.record.reason, LONGEST_REASON) or "no reason was given"


def cases_of(panels: Iterable[Panel]) -> list[NamedCase]:
    return [case for panel in panels for case in panel.members]


def failures(cases: Sequence[NamedCase]) -> list[str]:
    """'FAILED: fp8 on gemm m=512: out of memory, even alone'."""
    failed = [case for case in cases if standing(case.result) is Standing.FAILED]
    told = []
    by_reason = together(((case.suite, case.result.mode, _reason(case)), case) for case in failed)
    for (suite, mode, reason), alike in by_reason.items():
        places = listed([setting_of(case.group) for case in alike])
        where = f"in {len(alike)} cases of {suite} ({places})" if len(alike) > 1 else f"on {suite} {places}".rstrip()
        told.append(f"FAILED: {mode} {where}: {reason}")
    return told


def skips(cases: Sequence[NamedCase]) -> list[str]:
    """'nvfp4 was skipped in 3 of 4 cases of gemm: no hardware for FP4'."""
    skipped = [case for case in cases if standing(case.result) is Standing.SKIPPED]
    told = []
    for reason, alike in together((_reason(case), case) for case in skipped).items():
        modes = list(dict.fromkeys(case.result.mode for case in alike))
        suites = list(dict.fromkeys(case.suite for case in alike))
        were = "was" if len(modes) == 1 else "were"
        total = sum(case.result.mode in modes and case.suite in suites for case in cases)
        some = "all " * (total > 1) if total == len(alike) else f"{len(alike)} of "
        told.append(f"{listed(modes)} {were} skipped in {some}{many(total, 'case')} of {listed(suites)}: {reason}")
    return told


def emulations(cases: Sequence[NamedCase], name_devices: bool = False) -> list[str]:
    """'fp8 is emulated on this CPU: its numbers are right (product_error 3.7e-02), its time says nothing ...'."""
    emulated = [case for case in cases if standing(case.result) is Standing.EMULATED]
    by_mode = together(((case.result.mode, case.result.record.case.device), case) for case in emulated).values()
    by_place = together((_place(alike, cases, name_devices), alike) for alike in by_mode)
    told = []
    for place, modes in by_place.items():
        names = [alike[0].result.mode for alike in modes]
        if len(modes) > _MOST_ALONE and all(map(_finite, modes)):  # one sentence for all of many
            named = f"{listed(names)} are emulated {place}"
            told.append(f"{named}: their numbers are right, their times say nothing about speed")
        else:
            numbers = zip(names, map(_numbers, modes), strict=True)
            told += [f"{mode} is emulated {place}: {say}, its time says nothing about speed" for mode, say in numbers]
    return told


def _place(alike: Sequence[NamedCase], cases: Sequence[NamedCase], name_devices: bool) -> str:
    first = alike[0].result.record.case
    here = "this CPU" if first.device == "cpu" else "this device"
    suites = dict.fromkeys(case.suite for case in alike)
    ran = [case for case in cases if standing(case.result) not in (Standing.SKIPPED, Standing.FAILED)]
    same = [case for case in ran if (case.result.mode, case.result.record.case.device) == (first.mode, first.device)]
    others = {case.suite for case in same} - {*suites}
    return f"on {first.device if name_devices else here}{f' in {listed(list(suites))}' if others else ''}"


def _errors(alike: Iterable[NamedCase]) -> dict[tuple[str, str], list[float]]:
    return together(((case.suite, case.group.error), case.error) for case in alike if case.error is not None)


def _finite(alike: Iterable[NamedCase]) -> bool:
    return all(math.isfinite(value) for values in _errors(alike).values() for value in values)


def _numbers(alike: Sequence[NamedCase]) -> str:
    errors = _errors(alike)
    if not _finite(alike):
        return "its errors are not all finite"
    if not errors or len(errors) > _MOST_SUITES:
        return "its numbers are right"
    several = len({suite for suite, _ in errors}) > 1
    shown = [
        f"{metric} {units.span(values, units.relative_error)}{f' in {suite}' if several else ''}"
        for (suite, metric), values in errors.items()
    ]
    return f"its numbers are right ({listed(shown)})"


def _lead(material: Material) -> str:
    results = [result for _, panel in timed_panels(material) for result in panel.results]
    speeds = [speed for result in results if (speed := speed_up(result))]
    said = f"[low, high]: {words}." if (words := what_intervals_hold(results)) else ""
    ranges = f"{legend.RANGE}." if any(speed.level == 0 for speed in speeds) else ""
    return " ".join(filter(None, ["Speed against the reference: above 1x is faster.", said, ranges])) if speeds else ""


@section("verdict", "Verdict", 10, lead=_lead)
def verdict_section(material: Material) -> Iterator[Element]:
    rows = tuple(row for entry, suites in _suites_to_name(material) for row in _rows(entry, suites))
    strip = [Verdicts(("speed", "error", "memory", "energy"), rows[:_MOST])] if rows else []
    told = [element for entry in material.entries for element in _entry(entry, material.alone)]
    yield from [*strip, *told] or [Text("There is no run.")]


def _suites_to_name(material: Material) -> Iterator[tuple[Entry, str]]:
    """Each run's suites where runs have different ones that their labels do not tell; else ''."""
    several = len({suites_of(entry.run) for entry in material.entries}) > 1
    for entry in material.entries:
        untold = [suite for suite in suites_of(entry.run) if several and suite not in entry.label]
        yield entry, listed(untold)


def _rows(entry: Entry, suites: str) -> Iterator[tuple[str, tuple[Field, ...]]]:
    by_mode = together(
        (case.result.mode, case)
        for panel in entry.panels
        for case in (panel.members if not about_tensors(panel) else ())
        if not case.result.record.is_reference
    )
    for mode, cases in by_mode.items():
        native = [case for case in cases if not emulated(case.result)]
        shares = [share for case in native if (share := share_of(*case)) is not None]
        sizes = {"less" if value < 1 - _ALIKE else "more" if value > 1 + _ALIKE else "same" for value in shares}
        ratios = [ratio for group, result in native if (ratio := ratio_against(result, group.lead))]
        demands, points = {ratio.demand.value for ratio in ratios}, [ratio.point for ratio in ratios]
        yield (
            ", ".join(filter(None, (mode, suites, entry.label))),
            (_speed(cases), _error(cases), _of_reference(cases, sizes, shares), _of_reference(cases, demands, points)),
        )


def _speed(cases: Sequence[NamedCase]) -> Field:
    """Its verdict if all cases have the same; 'mostly faster' if most have."""
    words = Counter(status_words(result) for _, result in cases).most_common()
    points = [speed.point for _, result in cases if (speed := speed_up(result))]
    speeds, middle = units.span(points, units.speed_up), statistics.median(points) if points else None
    (word, number), *others = words
    if not others:
        alone = speed_up(cases[0].result) if len(cases) == 1 else None
        return Field(
            word.replace(units.NONE, "not timed"), middle, tone_of(cases[0].result),
            (show_speed_up(cases[0].result) if len(cases) == 1 else "") or speeds,
            interval=(alone.low, alone.high) if alone else None,
        )  # fmt: skip
    said = ", ".join(f"{number} {word.replace(units.NONE, 'not timed')}" for word, number in words)
    mostly = number >= MOSTLY * len(cases)
    tone = tone_of(next(result for _, result in cases if status_words(result) == word)) if mostly else Tone.PLAIN
    return Field(f"mostly {word}" if mostly else "mixed", middle, tone, "; ".join(filter(None, (said, speeds))))


def _error(cases: Sequence[NamedCase]) -> Field:
    errors = [case.error for case in cases if case.error is not None]
    if not errors:
        return _NOT_MEASURED
    word = legend.error_word(errors)
    tone = Tone.BAD if word == legend.NOT_FINITE else Tone.PLAIN
    return Field(word, tone=tone, hint=units.span(errors, units.relative_error))


def _of_reference(cases: Sequence[NamedCase], words: set[str], shares: Sequence[float]) -> Field:
    """How a quantity compares with the reference's; emulations make no claim."""
    if not words:
        return _NO_CLAIM if all(emulated(result) for _, result in cases) else _NOT_MEASURED
    word = words.pop() if len(words) == 1 else "mixed"
    return Field(word, tone=_TONES.get(word, Tone.PLAIN), hint=f"{units.span(shares, units.ratio)} of the reference's")


def _entry(entry: Entry, alone: bool) -> Iterator[Element]:
    if not alone:
        yield Text(entry.label, Tone.STRONG)
    yield from losses(entry)
    devices = dict.fromkeys(panel.case.device for panel in entry.panels)
    name_devices = len(devices) > 1
    cases = cases_of(entry.panels)
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    said = shared_labels(timed)
    if said:
        yield Text(doubt_of_all(said), Tone.DOUBT)
    sentences = [Text(f"{text}.", Tone.STRONG) for panel in timed for text in over_loads(panel)]
    sentences += [
        text for panel in timed for text in comparisons(panel, panel.case.device if name_devices else "", said)
    ]
    sentences += [Text(text) for panel in entry.panels if about_tensors(panel) for text in best_by_width(panel)]
    sentences += [Text(text, Tone.DOUBT) for text in at_most(emulations(cases, name_devices))]
    sentences += [Text(text, Tone.DOUBT) for text in at_most(skips(cases))]
    if sentences:
        yield Items(tuple(sentences))


def losses(entry: Entry) -> Iterator[Element]:
    failed = failures(cases_of(entry.panels))
    if failed:
        number = sum(record.status is Status.FAILED for record in entry.run.records)
        yield Text(f"{number} of {len(entry.run.records)} cases failed.", Tone.BAD)
        yield Items(tuple(Text(text, Tone.BAD) for text in at_most(failed)))
    missing = missing_of(entry.run)
    if missing:
        yield Text(f"{missing[0].upper()}{missing[1:]}.", Tone.BAD)
    if not any(record.status is Status.OK for record in entry.run.records):
        yield Text(f"Nothing was measured (cases: {counts(entry.run)}).", Tone.STRONG)


def at_most(sentences: list[str]) -> list[str]:
    if len(sentences) <= _MOST:
        return sentences
    return [*sentences[: _MOST - 1], f"and {len(sentences) - _MOST + 1} more like these: the table has every case"]
