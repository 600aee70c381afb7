"""What each case takes of the device's memory, what that is for, and where a lower precision saves none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.analysis.metric import why_no_larger
from fp8bench.model import MemoryRole
from fp8bench.model.specs import MEMORY_COUNTERS
from fp8bench.report.capacities import EMULATED, place_of, searched, share_within, show_batch
from fp8bench.report.capacities import sentences as largest
from fp8bench.report.capacities import title as room_of
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Axis, Bars, Column, Element, Field, Items, Mark, Stacks, Table, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.memories import PEAK, highest_in, peak_of, roles_of, sentences, share_of, use_of
from fp8bench.report.metric_columns import column_of
from fp8bench.report.page.charts import grouped, stacked
from fp8bench.report.page.section import PRECISION, Section, case_field, number, sections, told
from fp8bench.report.panels import Figures, Panel
from fp8bench.report.tensor_panels import timed_panels
from fp8bench.report.words.legend import MEMORY_WORDS
from fp8bench.report.words.naming import NamedCase, named_cases, phase_order, phase_words, titled_panels

_NOTHING_BESIDE = "There is nothing beside it to compare with."
# A longer table is for who asks.
_MOST_OPEN = 12


@sections.register("memory")
class Memory(Section):
    """Bars of peak memory, cut into what it is for where that is known; a sentence for every precision."""

    name = "memory"
    title = "Memory"
    rank = 90

    def elements(self, material: Material) -> Iterator[Element]:
        panels = [
            (title, panel, [case for case in named_cases(panel) if peak_of(case.result) is not None])
            for title, panel in timed_panels(material)
        ]
        known = {role for _, _, cases in panels if _known(cases) for case in cases for role in _parts(case)}
        # The same parts everywhere, so that a role has one colour on the whole page; in short, for the key.
        parts = {role.value: MEMORY_WORDS[role].replace(" copies of", "") for role in MemoryRole if role in known}
        for title, panel, cases in panels:
            yield from _panel(title, panel, cases, parts) if cases else ()
        for place, (title, panel) in enumerate(titled_panels(material)):
            yield from _largest(title, panel, place)

    def lead_of(self, material: Material) -> str:
        """With the words of the device's own count."""
        results = (result for _, panel in timed_panels(material) for result in panel.results)
        measured = (result.record.measurement(PEAK) for result in results)
        described = next((one.description for one in measured if one and one.description), "")
        words = described or "memory at the highest point of a step"
        return f"{words[:1].upper()}{words[1:]}; from a pass of its own, which is not timed."


def _panel(title: str, panel: Panel, cases: Sequence[NamedCase], parts: Mapping[str, str]) -> Iterator[Element]:
    said = list(sentences(panel, cases))
    known = _known(cases)
    text = "What each case takes, by what it is for." if known and said else " ".join(said) or _NOTHING_BESIDE
    yield _chart(title, cases, parts, text)
    if known and said:
        yield Items(tuple(Text(one) for one in said))
    if any(use_of(case.result.record) for case in cases):
        yield _table(title, cases)


def _known(cases: Sequence[NamedCase]) -> bool:
    """Whether of any case it is known what its memory is for."""
    return any(roles_of(case.result) for case in cases)


def _parts(case: NamedCase) -> dict[str, float]:
    """Bytes by what they are for; all of them are the rest where that is not known."""
    known = {role.value: float(size) for role, size in roles_of(case.result).items()}
    return known or {MemoryRole.OTHER.value: peak_of(case.result) or 0.0}


def _chart(title: str, cases: Sequence[NamedCase], parts: Mapping[str, str], description: str) -> Stacks | Bars:
    """By what the memory is for, where that is known of any case."""
    name = f"memory-{cases[0].result.record.case.workload}"
    if not _known(cases):
        groups = grouped((case.place, _mark(case)) for case in cases)
        return Bars(name, f"{title}: peak memory", description, Axis("peak memory", "B"), groups)
    rows = [(told(case.result, case.name)[0], peak_of(case.result) or 0.0, _parts(case)) for case in cases]
    axis = Axis("memory at the highest point of a step", "B")
    return stacked(name, f"{title}: peak memory by what it is for", description, axis, "share of the peak", parts, rows)


def _mark(case: NamedCase) -> Mark:
    """Its hint: '1.63 MiB, 0.542x of fp32's'."""
    label, tone = told(case.result, case.result.mode)
    peak, share = peak_of(case.result), share_of(case.group, case.result)
    beside = "" if share is None else f", {units.ratio(share)} of {case.group.reference}'s"
    return Mark(label, peak or 0.0, tone=tone, hint=f"{units.size(peak)}{beside}")


def _table(title: str, cases: Sequence[NamedCase]) -> Table:
    """The highest points of phases, and what others count."""
    uses = [(case, use) for case in cases if (use := use_of(case.result.record)) is not None]
    phases = sorted({one.phase for _, use in uses for one in use.phases}, key=phase_order)
    figures = [Figures(case.group, case.result) for case, _ in uses]
    counted = [spec for spec in MEMORY_COUNTERS if any(one[spec].value is not None for one in figures)]
    columns = [
        PRECISION, Column("peak", number=True, unit="B"),
        Column("of the reference's", number=True, unit="x"),
        Column("highest in", hint="the phase of the highest point"),
        *(Column(phase_words(phase), number=True, unit="B", hint="the most that was held at once in this phase")
          for phase in phases),
        *map(column_of, counted),
    ]  # fmt: skip
    rows = [
        (
            case_field(case),
            _size(use.peak),
            number(share_of(case.group, case.result), units.ratio),
            Field(phase_words(next(iter(highest_in(use)), units.NONE))),
            *(_size({one.phase: one.allocated for one in use.phases}.get(phase)) for phase in phases),
            *(number(own[spec].value, spec.shown) if own[spec].value is not None
              else Field(units.NONE, hint=use.why) for spec in counted),
        )
        for (case, use), own in zip(uses, figures, strict=True)
    ]
    name = f"memory-phases-{cases[0].result.record.case.workload}"
    caption = f"{title}: the most that was held in each phase"
    return Table(name, caption, tuple(columns), tuple(rows), folded=len(rows) > _MOST_OPEN)


def _size(value: int | None) -> Field:
    return Field(units.size(value), None if value is None else float(value))


def _largest(name: str, panel: Panel, place: int) -> Iterator[Element]:
    found = list(searched(panel))
    if not found:
        return
    columns = (
        PRECISION, Column("largest", number=True), Column(f"vs {panel.reference}", number=True, unit="x"),
        Column("tokens a step", number=True), Column("peak memory", number=True, unit="B"),
        Column("does not fit"),
    )  # fmt: skip
    rows = []
    for group, result, capacity in found:
        share = share_within(group, result)
        versus = EMULATED if emulated(result) else units.speed_up(share)
        tone = Tone.DOUBT if emulated(result) else Tone.PLAIN
        rows.append((
            Field(", ".join(filter(None, (result.mode, place_of(panel, group, capacity)))), tone=tone),
            Field(show_batch(capacity), capacity.batch, tone),
            Field(versus, share, tone),
            Field(units.whole(capacity.tokens) if capacity.tokens else units.NONE, capacity.tokens or None, tone),
            Field(units.size(capacity.peak), capacity.peak, tone),
            Field(why_no_larger(capacity)),
        ))  # fmt: skip
    yield Table(f"capacity-{panel.case.workload}-{place}", f"{name}: {room_of(found[0][2])}", columns, tuple(rows))
    yield from (Text(text) for text in largest(panel))
