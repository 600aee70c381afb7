"""Where the time of each step goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Axis, Element, Part, Stacks, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.charts import lasting, phase_parts, stacked
from fp8bench.report.page.section import Section, sections
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
    summary = "the best case of every step, phase by phase"
    rank = 60

    def build(self, material: Material) -> Part | None:
        found = [(title, list(filter(_measured, named_cases(panel)))) for title, panel in timed_panels(material)]
        parts = phase_parts(case.result for _, cases in found for case in cases)
        elements = [element for title, cases in found for element in _suite(title, cases, parts)]
        if not elements:
            return None
        return Part(
            self.name,
            "Where the time goes",
            tuple(elements),
            "Each bar is the best case of one step, cut into its phases. Unattributed is what lies under none of them.",
        )


def _suite(title: str, cases: Sequence[NamedCase], parts: Sequence[str]) -> Iterator[Element]:
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


def _measured(case: NamedCase) -> bool:
    return lasting(case.result)


def _phases(case: NamedCase) -> dict[str, float]:
    """Seconds by phase; what is no length of time is none."""
    return {name: seconds if 0 < seconds < math.inf else 0.0 for name, seconds in phases_of(case.result)}


def _chart(kind: str, title: str, cases: Sequence[NamedCase], parts: Sequence[str], folded: bool) -> Stacks:
    rows = [(case.name, case.result.best or 0.0, [_phases(case).get(part, 0.0) for part in parts]) for case in cases]
    name, axis = f"{kind}-{cases[0].result.record.case.workload}", Axis("best case of a step", "s")
    words = [*map(phase_words, parts)]
    return stacked(name, title, _description(cases), axis, "share of the step", words, rows, folded)


def _description(cases: Sequence[NamedCase]) -> str:
    """Which phase takes most, and how much of the step."""
    by_phase: dict[str, list[tuple[NamedCase, float]]] = {}
    for case in cases:
        phase, seconds = max(_phases(case).items(), key=lambda pair: pair[1])
        by_phase.setdefault(phase, []).append((case, seconds / (case.result.best or math.inf)))
    said = []
    for phase, found in by_phase.items():
        low, high = (units.percent(choose(share for _, share in found), 0) for choose in (min, max))
        where = "of every step" if len(by_phase) == 1 else f"in {listed([case.name for case, _ in found], 3)}"
        said.append(f"{phase_words(phase)} takes most {where}, {low if low == high else f'{low} to {high}'}")
    return f"{'; '.join(said)}."


def _notes(title: str, cases: Sequence[NamedCase]) -> Iterator[Text]:
    """Phases too short to be known, labels, and why compiled steps have so few phases."""
    below = _by_word((phase_words(phase), case) for case in cases for phase in _below_floor(case))
    if below:
        yield Text(
            f"{title}, too short to be told from the cost of marking it (less than {BELOW_FLOOR_MARKERS} times that): "
            f"{_told(below, len(cases))}.",
            Tone.DOUBT,
        )
    labels = _by_word((label.value, case) for case in cases for label in case.result.labels if label.casts_doubt)
    if labels:
        yield Text(f"{title}, labelled: {_told(labels, len(cases))}.", Tone.DOUBT)
    if any(("compile", "yes") in case.result.record.case.params for case in cases):
        yield Text(COMPILED)


def _below_floor(case: NamedCase) -> tuple[str, ...]:
    return case.result.finding.below_floor if case.result.finding else ()


def _by_word(found: Iterable[tuple[str, NamedCase]]) -> dict[str, list[str]]:
    """The names of the cases that a word is true of."""
    names: dict[str, list[str]] = {}
    for word, case in found:
        names.setdefault(word, []).append(case.name)
    return names


def _told(by_word: Mapping[str, Sequence[str]], num_cases: int) -> str:
    """'unattributed in all 6; cast and gemm in bf16': words of the same cases stand together."""
    together: dict[tuple[str, ...], list[str]] = {}
    for word, names in by_word.items():
        together.setdefault(tuple(names), []).append(word)
    return "; ".join(f"{listed(words, len(words))} {_where(names, num_cases)}" for names, words in together.items())


def _where(names: Sequence[str], num_cases: int) -> str:
    if len(names) <= _MOST_NAMED:
        return f"in {listed(names)}"
    return f"in all {num_cases}" if len(names) == num_cases else f"in {len(names)} of {num_cases}"
