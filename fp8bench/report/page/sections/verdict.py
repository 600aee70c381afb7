"""The answer: a word for each question, then plain sentences. What a person reads first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.model import Status
from fp8bench.report.case_status import emulated, show_speed_up, speed_up, status_words, tone_of
from fp8bench.report.elements import Element, Field, Items, Text, Tone, Verdicts
from fp8bench.report.energies import ratio_against
from fp8bench.report.material import Entry, Material
from fp8bench.report.memories import share_of
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel, Result, ResultGroup, together
from fp8bench.report.tensor_panels import about_tensors, timed_panels
from fp8bench.report.terminal.tables import main_error, value_of
from fp8bench.report.words import legend
from fp8bench.report.words.outcomes import emulations, failures, outcomes, skips
from fp8bench.report.words.run_facts import counts, missing_of
from fp8bench.report.words.speed import comparisons, doubt_of_all, said_once
from fp8bench.report.words.tensors import best_by_width

# More sentences of one kind are not read; the table has each case.
_MOST = 12
# Of the cases so many make a verdict that most have.
_MOSTLY = 0.75
# Memory that differs by less is called the same.
_ALIKE = 0.01
_TONES = {"less": Tone.GOOD, "more": Tone.BAD, "unclear": Tone.DOUBT}
_NOT_MEASURED = Field("not measured", tone=Tone.DOUBT)
_NO_CLAIM = Field("no claim", tone=Tone.DOUBT, hint="emulated")
_Case = tuple[Panel, ResultGroup, Result]


@sections.register("verdict")
class VerdictSection(Section):
    """For every precision a word a question, then a sentence a suite, failures first; nothing but the verdicts."""

    name = "verdict"
    title = "Verdict"
    lead = "Speed against the reference: above 1x is faster. [low, high] is the 99% interval of these rounds."
    rank = 10

    def elements(self, material: Material) -> Iterator[Element]:
        rows = tuple(row for entry in material.entries for row in _rows(entry))
        strip = [Verdicts(("speed", "error", "memory", "energy"), rows[:_MOST])] if rows else []
        told = [element for entry in material.entries for element in _entry(entry, material.alone)]
        yield from [*strip, *told] or [Text("There is no run.")]

    def lead_of(self, material: Material) -> str:
        speeds = [speed for _, panel in timed_panels(material) for one in panel.results if (speed := speed_up(one))]
        ranges = f" {legend.RANGE}." if any(speed.level == 0 for speed in speeds) else ""
        return self.lead + ranges if speeds else ""


def _rows(entry: Entry) -> Iterator[tuple[str, tuple[Field, ...]]]:
    """For each precision of a run whether it is faster, right, small and thrifty."""
    by_mode = together(
        (result.mode, (panel, group, result))
        for panel in entry.panels
        for group, result in (panel.members if not about_tensors(panel) else ())
        if not result.record.is_reference
    )
    for mode, cases in by_mode.items():
        yield (
            ", ".join(filter(None, (mode, entry.label))),
            (_speed(cases), _error(cases), _memory(cases), _energy(cases)),
        )


def _speed(cases: Sequence[_Case]) -> Field:
    """Its verdict where all cases have the same; 'mostly faster' where most have it."""
    words = Counter(status_words(result) for _, _, result in cases).most_common()
    speeds = units.span((speed.point for _, _, result in cases if (speed := speed_up(result))), units.speed_up)
    (word, number), *others = words
    if not others:
        alone = show_speed_up(cases[0][2]) if len(cases) == 1 else ""
        return Field(word.replace(units.NONE, "not timed"), tone=tone_of(cases[0][2]), hint=alone or speeds)
    said = ", ".join(f"{number} {word.replace(units.NONE, 'not timed')}" for word, number in words)
    mostly = number >= _MOSTLY * len(cases)
    tone = tone_of(next(one for _, _, one in cases if status_words(one) == word)) if mostly else Tone.PLAIN
    return Field(f"mostly {word}" if mostly else "mixed", tone=tone, hint="; ".join(filter(None, (said, speeds))))


def _error(cases: Sequence[_Case]) -> Field:
    """By the largest: what a precision costs in numbers, emulated or not."""
    found = [value_of(result.record.measurement(main_error(panel))) for panel, _, result in cases]
    errors = [error for error in found if error is not None]
    if not errors:
        return _NOT_MEASURED
    word = legend.error_word(errors)
    tone = Tone.BAD if word == legend.NOT_FINITE else Tone.PLAIN
    return Field(word, tone=tone, hint=units.span(errors, units.relative_error))


def _memory(cases: Sequence[_Case]) -> Field:
    found = [
        share for _, group, result in cases if not emulated(result) if (share := share_of(group, result)) is not None
    ]
    words = {"less" if one < 1 - _ALIKE else "more" if one > 1 + _ALIKE else "same" for one in found}
    return _of_reference(cases, words, found)


def _energy(cases: Sequence[_Case]) -> Field:
    found = [ratio for _, group, one in cases if not emulated(one) if (ratio := ratio_against(one, group.lead))]
    return _of_reference(cases, {one.demand.value for one in found}, [one.point for one in found])


def _of_reference(cases: Sequence[_Case], words: set[str], shares: Sequence[float]) -> Field:
    """What is taken of what the reference takes; of an emulation it would be the cost of emulating."""
    if not words:
        return _NO_CLAIM if all(emulated(result) for _, _, result in cases) else _NOT_MEASURED
    word = words.pop() if len(words) == 1 else "mixed"
    return Field(word, tone=_TONES.get(word, Tone.PLAIN), hint=f"{units.span(shares, units.ratio)} of the reference's")


def _entry(entry: Entry, alone: bool) -> Iterator[Element]:
    """What one run says, under its label where there are several."""
    if not alone:
        yield Text(entry.label, Tone.STRONG)
    yield from _losses(entry)
    devices = dict.fromkeys(panel.case.device for panel in entry.panels)
    name_devices = len(devices) > 1
    found = outcomes(entry.panels)
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    said = said_once(timed)
    if said:
        yield Text(doubt_of_all(said), Tone.DOUBT)
    sentences = [
        text for panel in timed for text in comparisons(panel, panel.case.device if name_devices else "", said)
    ]
    sentences += [Text(text) for panel in entry.panels if about_tensors(panel) for text in best_by_width(panel)]
    sentences += [Text(text, Tone.DOUBT) for text in _few(emulations(found, name_devices))]
    sentences += [Text(text, Tone.DOUBT) for text in _few(skips(found))]
    if sentences:
        yield Items(tuple(sentences))


def _losses(entry: Entry) -> Iterator[Element]:
    """What failed, what is missing, or that there is nothing at all."""
    failed = failures(outcomes(entry.panels))
    if failed:
        number = sum(record.status is Status.FAILED for record in entry.run.records)
        yield Text(f"{number} of {len(entry.run.records)} cases failed.", Tone.BAD)
        yield Items(tuple(Text(text, Tone.BAD) for text in _few(failed)))
    missing = missing_of(entry.run)
    if missing:
        yield Text(f"{missing[0].upper()}{missing[1:]}.", Tone.BAD)
    if not any(record.status is Status.OK for record in entry.run.records):
        yield Text(f"Nothing was measured (cases: {counts(entry.run)}).", Tone.STRONG)


def _few(sentences: list[str]) -> list[str]:
    """The first ones, and how many more there are."""
    if len(sentences) <= _MOST:
        return sentences
    return [*sentences[: _MOST - 1], f"and {len(sentences) - _MOST + 1} more like these: the table has every case"]
