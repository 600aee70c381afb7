"""The answer, in plain sentences: what a person reads first."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.model import Status
from fp8bench.report.elements import Element, Items, Part, Text, Tone
from fp8bench.report.material import Entry, Material
from fp8bench.report.outcomes import emulations, failures, outcomes, skips
from fp8bench.report.run_facts import counts, missing_of
from fp8bench.report.section import Section, sections
from fp8bench.report.sentences import comparisons, doubt_of_all, said_once
from fp8bench.report.standing import speed_up
from fp8bench.report.tensor_panels import about_tensors, timed_panels
from fp8bench.report.tensor_sentences import best_by_width

# More sentences of one kind are not read; the table has each case.
_MOST = 12
_LEAD = "Speed against the reference: above 1x is faster. [low, high] is the 99% interval."


@sections.register("verdict")
class VerdictSection(Section):
    """For every suite and precision a sentence, failures first; nothing that the verdicts do not say."""

    name = "verdict"
    summary = "the answer in plain sentences"
    rank = 10

    def build(self, material: Material) -> Part:
        elements = tuple(element for entry in material.entries for element in _entry(entry, material.alone))
        compared = any(speed_up(result) for _, panel in timed_panels(material) for result in panel.results)
        return Part(self.name, "Verdict", elements or (Text("There is no run."),), _LEAD if compared else "")


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
