"""Where the time of each step goes, and what its phases do when the precision changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Finding, Level
from fp8bench.report.case_status import emulated
from fp8bench.report.columns import Col, case_cols, table
from fp8bench.report.elements import Axis, Element, Stacks, Table, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.charts import lasting, phase_parts, stacked
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel, Result, ResultGroup, phases_of, together
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import PHASE_TITLES, PHASE_WORDS
from fp8bench.report.words.naming import NamedCase, listed, named_cases, phase_words

LEAST_SHARE = 0.03
LEAST_CHANGE = 1.05
_MOST_NAMED = 2
# A step of which one phase takes more is said in a sentence, and drawn for who asks.
_NEARLY_ALL = 0.9
COMPILED = (
    "With compile=yes the forward and the backward pass are one graph each, in which casts and products are fused: no "
    "split of their time would be true, so that it stands as unattributed."
)


def phases_table(panel: Panel) -> Table | None:
    measured = [(group, result) for group, result in panel.members if result.best]
    if not measured:
        return None
    present = {name for _, one in measured for name, seconds in phases_of(one) if seconds or name == UNATTRIBUTED}
    names = sorted(present, key=lambda name: CELL_PHASES.index(name) if name in CELL_PHASES else len(CELL_PHASES))
    cols: list[Col[tuple[ResultGroup, Result]]] = [
        *case_cols(panel), Col("best", _cost, number=True),
        *(Col(PHASE_TITLES.get(name, name), partial(_share, name=name), number=True) for name in names),
    ]  # fmt: skip
    return table("phases", "phases, as shares of the best case", cols, measured)


def _cost(row: tuple[ResultGroup, Result]) -> str:
    """The best case; for an emulation with the word that keeps it from being read as a speed."""
    time = units.seconds(row[1].best)
    return f"{Level.EMULATED} {time}" if emulated(row[1]) else time


def _share(row: tuple[ResultGroup, Result], name: str) -> str:
    """Of the step, '<' if it is below the clock's floor, '-' if the step has no such phase."""
    finding, best = row[1].finding, row[1].best
    assert finding is not None and best
    seconds = dict(phases_of(row[1])).get(name)
    share = seconds / best if seconds is not None and (seconds or name == UNATTRIBUTED) else None
    return "<" if name in finding.below_floor else units.percent(share)


class Change(StrEnum):
    """What became of a phase."""

    GAINS = "gains"
    LOSES = "loses"
    SAME = "same"
    NEW = "new"
    GONE = "gone"


def is_mixed(finding: Finding) -> bool:
    """Whether a step is made of several phases that matter: then its whole says little of any of them."""
    return len(set(_large(finding)) - {UNATTRIBUTED}) > 1


def phase_clauses(own: Finding, base: Finding) -> str:
    """'; products gain 1.50x; data loading takes 13% of the step and does not gain', in the order of what happens."""
    seconds, before = dict(own.phases), dict(base.phases)
    unknown = {*own.below_floor, *base.below_floor}
    large = {*_large(own), *_large(base)} - unknown
    names: dict[Change, list[str]] = {change: [] for change in Change}
    for name in (one for one in CELL_PHASES if one in large):
        names[change_of(seconds.get(name, 0.0), before.get(name, 0.0))].append(name)
    times = {name: units.speed_up(before[name] / seconds[name]) for name in names[Change.GAINS]}
    times |= {name: units.speed_up(seconds[name] / before[name]) for name in names[Change.LOSES]}
    clauses = [
        listed([f"{_subject([name], 'gain')} {times[name]}" for name in names[Change.GAINS]], len(CELL_PHASES)),
        _taking(names[Change.SAME], own, "do not gain", "does not gain"),
        listed([f"{_subject([name], 'take')} {times[name]} as long" for name in names[Change.LOSES]], len(CELL_PHASES)),
        _taking(names[Change.NEW], own, "come on top", "comes on top"),
        _subject(names[Change.GONE], "fall") + " away" if names[Change.GONE] else "",
    ]
    return "".join(f"; {clause}" for clause in clauses if clause)


def change_of(own: float, base: float) -> Change:
    """A phase gains or loses where its times differ by more than 5%."""
    if base <= 0:
        return Change.NEW
    if own <= 0:
        return Change.GONE
    if base / own > LEAST_CHANGE:
        return Change.GAINS
    return Change.LOSES if own / base > LEAST_CHANGE else Change.SAME


def _large(finding: Finding) -> Iterable[str]:
    best = finding.best_seconds or 0.0
    return [name for name, seconds in finding.phases if seconds > LEAST_SHARE * best > 0]


def _taking(names: Sequence[str], finding: Finding, many: str, one: str) -> str:
    """'data loading and casts take 23% of the step and do not gain'."""
    if not names or not finding.best_seconds:
        return ""
    seconds = dict(finding.phases)
    share = sum(seconds[name] for name in names) / finding.best_seconds
    return f"{_subject(names, 'take')} {units.percent(share, 0)} of the step and {many if _plural(names) else one}"


def _subject(names: Sequence[str], verb: str) -> str:
    """'products gain', 'attention gains'."""
    words = listed([PHASE_WORDS[name][0] for name in names], len(CELL_PHASES))
    return f"{words} {verb}{'' if _plural(names) else 's'}"


def _plural(names: Sequence[str]) -> bool:
    return len(names) > 1 or PHASE_WORDS[names[0]][1]


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
