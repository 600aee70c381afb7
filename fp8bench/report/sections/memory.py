"""What each case takes of the device's memory, what that is for, and where a lower precision saves none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from fp8bench import units
from fp8bench.model import MemoryRole, MemoryUse
from fp8bench.report.blocks import Panel
from fp8bench.report.elements import Axis, Bars, Column, Element, Field, Items, Mark, Part, Stacks, Table, Text, Tone
from fp8bench.report.legend import MEMORY_WORDS
from fp8bench.report.material import Material
from fp8bench.report.memories import PEAK, highest_in, peak_of, roles_of, sentences, share_of, use_of
from fp8bench.report.naming import NamedCase, named_cases, phase_order, phase_words
from fp8bench.report.section import Section, sections
from fp8bench.report.standing import emulated
from fp8bench.report.tensor_panels import timed_panels

_NOTHING_BESIDE = "There is nothing beside it to compare with."
# Where the largest case takes so many times what the smallest takes, bars of bytes would hide the small one's parts.
_WIDE = 8.0
# A longer table is for who asks.
_MOST_OPEN = 12
_COUNTED: tuple[tuple[str, str, Callable[[MemoryUse], int | None]], ...] = (
    ("reserved", "what torch's allocator keeps from the driver for its tensors", lambda use: use.reserved),
    ("process", "what the driver counts for the process on the device", lambda use: use.process),
    ("resident", "the most that the process had in the machine's memory", lambda use: use.resident),
)


@sections.register("memory")
class Memory(Section):
    """Bars of peak memory, cut into what it is for where that is known; a sentence for every precision."""

    name = "memory"
    summary = "peak memory of every case, what it is for, and where a lower precision saves none"
    rank = 90

    def build(self, material: Material) -> Part | None:
        panels = [(title, panel, _measured(panel)) for title, panel in timed_panels(material)]
        known = {role for _, _, cases in panels if _known(cases) for case in cases for role in _parts(case)}
        # The same parts everywhere, so that a role has one colour on the whole page.
        parts = [role for role in MemoryRole if role in known]
        elements = [one for title, panel, cases in panels if cases for one in _panel(title, panel, cases, parts)]
        if not elements:
            return None
        return Part(self.name, "Memory", tuple(elements), _lead(material))


def _measured(panel: Panel) -> list[NamedCase]:
    return [case for case in named_cases(panel) if peak_of(case.result) is not None]


def _lead(material: Material) -> str:
    measured = (
        result.record.measurement(PEAK) for _, panel in timed_panels(material) for result in panel.results
    )  # fmt: skip
    described = next((one.description for one in measured if one and one.description), "")
    words = described or "memory at the highest point of a step"
    return f"{words[:1].upper()}{words[1:]}; from a pass of its own, which is not timed."


def _panel(title: str, panel: Panel, cases: Sequence[NamedCase], parts: Sequence[MemoryRole]) -> Iterator[Element]:
    said = list(sentences(panel, cases))
    known = _known(cases)
    text = "What each case takes, by what it is for." if known and said else " ".join(said) or _NOTHING_BESIDE
    yield _stacks(title, cases, parts, text) if known else _bars(title, cases, text)
    if known and said:
        yield Items(tuple(Text(one) for one in said))
    if any(use_of(case.result.record) for case in cases):
        yield _table(title, cases)


def _known(cases: Sequence[NamedCase]) -> bool:
    """Whether of any case it is known what its memory is for."""
    return any(roles_of(case.result) for case in cases)


def _parts(case: NamedCase) -> dict[MemoryRole, float]:
    """Bytes by what they are for; all of them are the rest where that is not known."""
    return {**roles_of(case.result)} or {MemoryRole.OTHER: peak_of(case.result) or 0.0}


def _name(case: NamedCase) -> str:
    return f"{case.name} (emulated)" if emulated(case.result) else case.name


def _stacks(title: str, cases: Sequence[NamedCase], parts: Sequence[MemoryRole], description: str) -> Stacks:
    peaks = [peak_of(case.result) or 0.0 for case in cases]
    wide = max(peaks) > _WIDE * min(peaks)
    rows = []
    for case, peak in zip(cases, peaks, strict=True):
        roles = _parts(case)
        scale = 100 / peak if wide and peak else 1.0
        label = f"{_name(case)}, {units.size(peak)}" if wide else _name(case)
        rows.append((label, tuple(scale * roles.get(part, 0) for part in parts)))
    axis = Axis("share of the peak", "%") if wide else Axis("memory at the highest point of a step", "B")
    name = f"memory-{cases[0].result.record.case.workload}"
    words = tuple(MEMORY_WORDS[part].replace(" copies of", "") for part in parts)  # short, for the key
    return Stacks(name, f"{title}: peak memory by what it is for", description, axis, words, tuple(rows))


def _bars(title: str, cases: Sequence[NamedCase], description: str) -> Bars:
    marks: dict[str, list[Mark]] = {}
    for case in cases:
        peak = peak_of(case.result)
        assert peak is not None
        tone = Tone.DOUBT if emulated(case.result) else Tone.PLAIN
        name = f"{case.result.mode} (emulated)" if emulated(case.result) else case.result.mode
        marks.setdefault(case.place, []).append(Mark(name, peak, tone=tone, hint=_hint(case)))
    groups = tuple((place, tuple(members)) for place, members in marks.items())
    name = f"memory-{cases[0].result.record.case.workload}"
    return Bars(name, f"{title}: peak memory", description, Axis("peak memory", "B"), groups)


def _hint(case: NamedCase) -> str:
    """'1.63 MiB, 0.542x of fp32's'."""
    peak, share = peak_of(case.result), share_of(case.group, case.result)
    if share is None:
        return units.size(peak)
    return f"{units.size(peak)}, {units.ratio(share)} of {case.group.reference}'s"


def _table(title: str, cases: Sequence[NamedCase]) -> Table:
    """The highest points of phases, and what others count."""
    uses = [(case, use) for case in cases if (use := use_of(case.result.record)) is not None]
    phases = sorted({one.phase for _, use in uses for one in use.phases}, key=phase_order)
    counted = [one for one in _COUNTED if any(one[2](use) is not None for _, use in uses)]
    columns = [
        Column("case"), Column("peak", number=True, unit="B"),
        Column("of the reference's", number=True, unit="x"),
        Column("highest in", hint="the phase of the highest point"),
        *(Column(phase_words(phase), number=True, unit="B", hint="the most that was held at once in this phase")
          for phase in phases),
        *(Column(name, number=True, unit="B", hint=hint) for name, hint, _ in counted),
    ]  # fmt: skip
    rows = []
    for case, use in uses:
        by_phase = {one.phase: one.allocated for one in use.phases}
        share = share_of(case.group, case.result)
        rows.append(
            (
                Field(_name(case), tone=Tone.DOUBT if emulated(case.result) else Tone.PLAIN),
                _size(use.peak),
                Field(units.ratio(share), share if share is not None and math.isfinite(share) else None),
                Field(phase_words(next(iter(highest_in(use)), units.NONE))),
                *(_size(by_phase.get(phase)) for phase in phases),
                *(_size(count(use), use.why) for _, _, count in counted),
            )
        )
    name = f"memory-phases-{cases[0].result.record.case.workload}"
    caption = f"{title}: the most that was held in each phase"
    return Table(name, caption, tuple(columns), tuple(rows), folded=len(rows) > _MOST_OPEN)


def _size(value: int | None, why: str = "") -> Field:
    return Field(units.size(value), None if value is None else float(value), hint=why if value is None else "")
