"""Every sample of every case: what the medians and intervals were made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.analysis.samples import step_samples
from fp8bench.model import Label
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Axis, Element, Items, Strips, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Result
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words import legend
from fp8bench.report.words.naming import listed, many, named_cases

# What a look at the samples themselves can confirm or clear.
_UNSTEADY = (Label.BIMODAL, Label.DRIFT, Label.NOISY)
_MOST_ROWS = 250
# Percent above the median: further out an axis would hide what the other points have to say.
_FAR = 100.0


@dataclass(frozen=True)
class _Row:
    name: str
    result: Result
    percent: tuple[float, ...]  # of each round, above (or below) the median

    @property
    def unsteady(self) -> tuple[Label, ...]:
        return tuple(label for label in _UNSTEADY if label in self.result.labels)

    @property
    def label(self) -> str:
        words = [*self.unsteady, *(["emulated"] if emulated(self.result) else [])]
        return f"{self.name} ({', '.join(words)})" if words else self.name

    @property
    def tone(self) -> Tone:
        doubtful = self.result.finding is not None and self.result.finding.doubtful
        return Tone.DOUBT if doubtful or emulated(self.result) else Tone.PLAIN

    @property
    def spread(self) -> float:
        if len(self.percent) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.percent, n=4, method="inclusive")
        return high - low


@sections.register("samples")
class Samples(Section):
    """The rounds of all cases beside each other, as distances from the case's own median; unsteady cases first."""

    name = "samples"
    title = "Samples"
    lead = (
        "Each point is one round: the fastest call of the case in it, as a distance from the case's median. Two "
        "clusters are two states of the machine or of the code. A long tail to the right is other work on the "
        "machine: it hardly touches the best case, which verdicts rest on."
    )
    rank = 120

    def elements(self, material: Material) -> Iterator[Element]:
        rows = sorted(_rows(material), key=lambda row: not row.unsteady)  # a stable sort: else as in the table
        kinds = [[row for row in rows[:_MOST_ROWS] if emulated(row.result) is cost] for cost in (False, True)]
        yield from (_strips(found) for found in kinds if found)
        if len(rows) > _MOST_ROWS:
            yield Text(f"{len(rows) - _MOST_ROWS} more cases are not shown here; their samples are in the run.")
        yield from _words(rows)


def _rows(material: Material) -> Iterator[_Row]:
    for title, panel in timed_panels(material):
        for case in named_cases(panel):
            timing = case.result.record.timing
            finite = [one for one in step_samples(timing) if math.isfinite(one)] if timing is not None else []
            middle = statistics.median(finite) if finite else 0.0
            if middle > 0:
                yield _Row(f"{title} {case.name}", case.result, tuple(100 * (one / middle - 1) for one in finite))


def _strips(rows: Sequence[_Row]) -> Strips:
    shown = tuple((row.label, tuple(one for one in row.percent if one <= _FAR), row.tone) for row in rows)
    cost = emulated(rows[0].result)
    name, whose = ("samples-of-emulations", "emulated case") if cost else ("samples-by-case", "case")
    title, axis = f"Rounds of each {whose}, relative to its median", Axis("distance from the case's median", "%")
    return Strips(name, title, _description(rows), axis, shown, folded=cost)


def _description(rows: Sequence[_Row]) -> str:
    widest = max(rows, key=lambda row: row.spread)
    words = (
        f"{many(len(rows), 'case')}. The middle half of the rounds spans most in {widest.name}: "
        f"{units.significant(widest.spread)}% of the median."
    )
    far = [(one, row) for row in rows for one in row.percent if one > _FAR]
    if not far:
        return words
    most, case = max(far, key=lambda pair: pair[0])
    return (
        f"{words} {many(len(far), 'round')} took more than twice the median, which is not drawn; "
        f"the longest took {units.ratio(1 + most / 100)} of it, in {case.name}."
    )


def _words(rows: Sequence[_Row]) -> Iterator[Element]:
    named = {label: [row.name for row in rows if label in row.unsteady] for label in _UNSTEADY}
    items = [
        Text(f"{label} ({listed(names)}): {legend.LABELS[label]}.", Tone.DOUBT)
        for label, names in named.items()
        if names
    ]
    if items:
        yield Items(tuple(items))
