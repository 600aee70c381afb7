"""Where the time of each step goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Axis, Element, Stacks, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.charts import lasting, phase_parts, stacked
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import together
from fp8bench.report.tensor_panels import timed_panels
from fp8bench.report.terminal.tables import phases_of
from fp8bench.report.words.naming import NamedCase, listed, named_cases, phase_words

_MOST_NAMED = 2
# A step of which one phase takes more is said in a sentence, and drawn for who asks.
_NEARLY_ALL = 0.9

COMPILED = (
    "With compile=yes the forward and the backward pass are one graph each, in which casts and products are fused: no "
    "split of their time would be true, so that it stands as unattributed."
)


@sections.register("phases")
class Phases(Section):
    """A bar for each measured case, cut into its phases; emulations in charts of their own."""

    name = "phases"
    title = "Where the time goes"
    lead = "Each bar is the best case of one step, cut into its phases. Unattributed is what lies under none of them."
    rank = 60

    def elements(self, material: Material) -> Iterator[Element]:
        found = [
            (title, [case for case in named_cases(panel) if lasting(case.result)])
            for title, panel in timed_panels(material)
        ]
        parts = phase_parts(case.result for _, cases in found for case in cases)
        for title, cases in found:
            yield from _suite(title, cases, parts)


def _suite(title: str, cases: Sequence[NamedCase], parts: Mapping[str, str]) -> Iterator[Element]:
    native = [case for case in cases if not emulated(case.result)]
    cost = [case for case in cases if emulated(case.result)]
    if native:
        plain = all(
            max(_phases(case).values(), default=0.0) > _NEARLY_ALL * (case.result.best or 0.0) for case in native
        )
        yield from [Text(f"{title}: {_description(native)}")] if plain else []
        yield _chart("phases", f"{title}: a step by phase", native, parts, folded=plain)
    if cost:
        yield _chart("emulation", f"{title}: what emulating costs, by phase (no speed)", cost, parts, folded=True)
    yield from _notes(title, cases)


def _phases(case: NamedCase) -> dict[str, float]:
    """Seconds by phase; what is no length of time is none."""
    return {name: seconds if 0 < seconds < math.inf else 0.0 for name, seconds in phases_of(case.result)}


def _chart(kind: str, title: str, cases: Sequence[NamedCase], parts: Mapping[str, str], folded: bool) -> Stacks:
    rows = [(case.name, case.result.best or 0.0, _phases(case)) for case in cases]
    name, axis = f"{kind}-{cases[0].result.record.case.workload}", Axis("best case of a step", "s")
    return stacked(name, title, _description(cases), axis, "share of the step", parts, rows, folded)


def _description(cases: Sequence[NamedCase]) -> str:
    """Which phase takes most, and how much of the step."""
    most = ((case, max(_phases(case).items(), key=lambda pair: pair[1])) for case in cases)
    by_phase = together((phase, (case, seconds / (case.result.best or math.inf))) for case, (phase, seconds) in most)
    said = []
    for phase, found in by_phase.items():
        shares = units.span((share for _, share in found), partial(units.percent, decimals=0))
        where = "of every step" if len(by_phase) == 1 else f"in {listed([case.name for case, _ in found], 3)}"
        said.append(f"{phase_words(phase)} takes most {where}, {shares}")
    return f"{'; '.join(said)}."


def _notes(title: str, cases: Sequence[NamedCase]) -> Iterator[Text]:
    """Phases too short to be known, labels, and why compiled steps have so few phases."""
    judged = [(case.name, case.result.finding) for case in cases if case.result.finding]
    below = together((phase_words(phase), name) for name, finding in judged for phase in finding.below_floor)
    if below:
        yield Text(
            f"{title}, too short to be told from the cost of marking it (less than {BELOW_FLOOR_MARKERS} times that): "
            f"{_told(below, len(cases))}.",
            Tone.DOUBT,
        )
    labels = together((label.value, case.name) for case in cases for label in case.result.labels if label.casts_doubt)
    if labels:
        yield Text(f"{title}, labelled: {_told(labels, len(cases))}.", Tone.DOUBT)
    if any(("compile", "yes") in case.result.record.case.params for case in cases):
        yield Text(COMPILED)


def _told(by_word: Mapping[str, Sequence[str]], num_cases: int) -> str:
    """'unattributed in all 6; cast and gemm in bf16': words of the same cases stand together."""
    by_names = together((tuple(names), word) for word, names in by_word.items())
    return "; ".join(f"{listed(words, len(words))} {_where(names, num_cases)}" for names, words in by_names.items())


def _where(names: Sequence[str], num_cases: int) -> str:
    if len(names) <= _MOST_NAMED:
        return f"in {listed(names)}"
    return f"in all {num_cases}" if len(names) == num_cases else f"in {len(names)} of {num_cases}"
