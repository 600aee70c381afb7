"""The answer: a word for each question, then plain sentences."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.model import Status
from fp8bench.report.case_status import (
    Standing,
    emulated,
    show_speed,
    speed_up,
    standing,
    status_words,
    tone_of,
    what_intervals_hold,
)
from fp8bench.report.elements import Element, Field, Items, Text, Tone, Verdicts
from fp8bench.report.page.section import Entry, Material, section
from fp8bench.report.panels import NamedCase, Panel, together
from fp8bench.report.topics.energy import ratio_against
from fp8bench.report.topics.memory import share_of
from fp8bench.report.topics.tensors import about_tensors, best_by_width, timed_panels
from fp8bench.report.words import legend
from fp8bench.report.words.naming import (
    MOSTLY,
    common_tone,
    counts,
    listed,
    many,
    missing_of,
    setting_of,
    shortened,
    suites_of,
)
from fp8bench.report.words.speed import comparisons, over_loads

LONGEST_REASON = 300
# The most sentences of one kind; the table has every case.
_MOST = 12
# Smaller differences of memory are called the same.
_ALIKE = 0.03
_TONES = {"less": Tone.GOOD, "more": Tone.BAD, "unclear": Tone.DOUBT}
_NOT_MEASURED = Field("not measured", tone=Tone.DOUBT)
_NO_CLAIM = Field("no claim", tone=Tone.DOUBT, hint="emulated")


def cases_of(panels: Iterable[Panel]) -> list[NamedCase]:
    return [case for panel in panels for case in panel.members]


def missed(cases: Sequence[NamedCase], status: Standing, word: str) -> list[str]:
    """'FAILED: fp8 in 1 of 3 cases of gemm (m=512): out of memory, even alone'; the same of those that were skipped."""
    gone = [case for case in cases if standing(case.result) is status]
    reasons = ((shortened(case.result.record.reason, LONGEST_REASON) or "no reason was given", case) for case in gone)
    told = []
    for reason, alike in together(reasons).items():
        modes, suites = ({case.result.mode: None for case in alike}, {case.suite: None for case in alike})
        total = sum(case.result.mode in modes and case.suite in suites for case in cases)
        places = listed(list(dict.fromkeys(setting_of(case.group) for case in alike)))
        some = f" ({places})" if len(alike) < total else ""
        where = f"in {len(alike)} of {many(total, 'case')} of {listed(list(suites))}{some}"
        told.append(f"{word}: {listed(list(modes))} {where}: {reason}")
    return told


def skips(cases: Sequence[NamedCase]) -> list[str]:
    return at_most(missed(cases, Standing.SKIPPED, "skipped"))


def emulations(cases: Sequence[NamedCase]) -> list[str]:
    reasons = together((case.result.record.support.reason, case.result.mode) for case in cases if emulated(case.result))
    told = [", ".join(dict.fromkeys(modes)) + f" ({why})" * bool(why) for why, modes in reasons.items()]
    return [f"emulated: {'; '.join(told)}: right in numbers; time and memory are what emulating costs"] if told else []


def _lead(material: Material) -> str:
    results = [result for _, panel in timed_panels(material) for result in panel.results]
    speeds = [speed for result in results if (speed := speed_up(result))]
    said = f"[low, high]: {words}." if (words := what_intervals_hold(results)) else ""
    ranges = f"{legend.RANGE}." if any(speed.level == 0 for speed in speeds) else ""
    return " ".join(filter(None, ["Speed against the reference: above 1x is faster.", said, ranges])) if speeds else ""


@section("verdict", "Verdict", 10, lead=_lead)
def verdict_section(material: Material) -> Iterator[Element]:
    several = len({suites_of(entry.run) for entry in material.entries}) > 1
    rows = tuple(row for entry in material.entries for row in _rows(entry, several))
    strip = [Verdicts(("speed", "error", "memory", "energy"), rows[:_MOST])] if rows else []
    told = [element for entry in material.entries for element in _entry(entry, material.alone)]
    yield from [*strip, *told] or [Text("There is no run.")]


def _rows(entry: Entry, name_suites: bool) -> Iterator[tuple[str, tuple[Field, ...]]]:
    panels = (panel for panel in entry.panels if not about_tensors(panel))
    others = (case for case in cases_of(panels) if not case.result.record.is_reference)
    of_run = (listed(list(suites_of(entry.run))) if name_suites else "", entry.label)
    for mode, cases in together((case.result.mode, case) for case in others).items():
        native = [case for case in cases if not emulated(case.result)]
        shares = [share for case in native if (share := share_of(*case)) is not None]
        sizes = {"less" if value < 1 - _ALIKE else "more" if value > 1 + _ALIKE else "same" for value in shares}
        ratios = [ratio for group, result in native if (ratio := ratio_against(result, group.lead))]
        demands, points = {ratio.demand.value for ratio in ratios}, [ratio.point for ratio in ratios]
        yield (
            ", ".join(dict.fromkeys(filter(None, (mode, *of_run)))),
            (_speed(cases), _error(cases), _of_reference(cases, sizes, shares), _of_reference(cases, demands, points)),
        )


def _speed(cases: Sequence[NamedCase]) -> Field:
    """Its verdict if all cases have the same; 'mostly faster' if most have."""
    words = Counter(status_words(result).replace(units.NONE, "not timed") for _, result in cases)
    (word, number), *others = words.most_common()
    speeds = [speed for _, result in cases if (speed := speed_up(result))]
    points = [speed.point for speed in speeds]
    shown = f"mostly {word}" if number >= MOSTLY * len(cases) else "mixed"
    counted = ", ".join(f"{count} {word}" for word, count in words.most_common()) if others else ""
    alone = speeds[0] if len(cases) == 1 and speeds else None
    hint = "; ".join(filter(None, (counted, units.span(points, units.speed_up))))
    return Field(
        shown if others else word, statistics.median(points) if points else None,
        common_tone(tone_of(result) for _, result in cases), show_speed(alone) if alone else hint,
        interval=(alone.low, alone.high) if alone else None,
    )  # fmt: skip


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
        against_emulation = all(emulated(result) or (group.lead and emulated(group.lead)) for group, result in cases)
        return _NO_CLAIM if against_emulation else _NOT_MEASURED
    word = words.pop() if len(words) == 1 else "mixed"
    return Field(word, tone=_TONES.get(word, Tone.PLAIN), hint=f"{units.span(shares, units.ratio)} of the reference's")


def _entry(entry: Entry, alone: bool) -> Iterator[Element]:
    if not alone:
        yield Text(entry.label, Tone.STRONG)
    yield from losses(entry)
    several = len({panel.case.device for panel in entry.panels}) > 1
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    sentences = [Text(f"{text}.", Tone.STRONG) for panel in timed for text in over_loads(panel)]
    sentences += [text for panel in timed for text in comparisons(panel, panel.case.device if several else "")]
    sentences += [Text(text) for panel in entry.panels if about_tensors(panel) for text in best_by_width(panel)]
    cases = cases_of(entry.panels)
    sentences += [Text(text, Tone.DOUBT) for text in (*emulations(cases), *skips(cases))]
    if sentences:
        yield Items(tuple(sentences))


def losses(entry: Entry) -> Iterator[Element]:
    failed = missed(cases_of(entry.panels), Standing.FAILED, "FAILED")
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
