"""What each case takes of the device's memory, and where a lower precision saves none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.report.blocks import Panel
from fp8bench.report.elements import Axis, Bars, Element, Mark, Part, Tone
from fp8bench.report.material import Material
from fp8bench.report.naming import NamedCase, named_cases
from fp8bench.report.section import Section, sections
from fp8bench.report.standing import emulated
from fp8bench.report.tables import value_of
from fp8bench.report.tensor_panels import timed_panels

METRIC = "peak_memory"
# A saving of less is called none.
_LEAST_SAVING = 0.01
_NOTHING_BESIDE = "There is nothing beside it to compare with."


@sections.register("memory")
class Memory(Section):
    """Bars of peak memory, and a sentence for every precision."""

    name = "memory"
    summary = "peak memory of every case, and where a lower precision saves none"
    rank = 90

    def build(self, material: Material) -> Part | None:
        elements = [element for title, panel in timed_panels(material) for element in _panel(title, panel)]
        if not elements:
            return None
        described = next(
            (
                one.description
                for _, panel in timed_panels(material)
                for result in panel.results
                if (one := result.record.measurement(METRIC)) is not None and one.description
            ),
            "memory at the highest point of a step",
        )
        lead = f"{described[:1].upper()}{described[1:]}; from a pass of its own, which is not timed."
        return Part(self.name, "Memory", tuple(elements), lead)


def _panel(title: str, panel: Panel) -> Iterator[Element]:
    measured = [case for case in named_cases(panel) if _peak(case) is not None]
    if not measured:
        return
    yield _bars(title, measured, " ".join(_sentences(panel, measured)) or _NOTHING_BESIDE)


def _peak(case: NamedCase) -> float | None:
    return value_of(case.result.record.measurement(METRIC))


def _bars(title: str, cases: Sequence[NamedCase], description: str) -> Bars:
    marks: dict[str, list[Mark]] = {}
    for case in cases:
        peak = _peak(case)
        assert peak is not None
        tone = Tone.DOUBT if emulated(case.result) else Tone.PLAIN
        name = f"{case.result.mode} (emulated)" if emulated(case.result) else case.result.mode
        marks.setdefault(case.place, []).append(Mark(name, peak, tone=tone, hint=_hint(case)))
    groups = tuple((place, tuple(members)) for place, members in marks.items())
    name = f"memory-{cases[0].result.record.case.workload}"
    return Bars(name, f"{title}: peak memory", description, Axis("peak memory", "B"), groups)


def _hint(case: NamedCase) -> str:
    """'1.63 MiB, 0.542x of fp32's'."""
    peak, share = _peak(case), _share(case)
    if share is None:
        return units.size(peak)
    return f"{units.size(peak)}, {units.ratio(share)} of {case.group.reference}'s"


def _share(case: NamedCase) -> float | None:
    """A peak over that of the group's reference; None for the reference, and where either is no number."""
    if case.result.record.is_reference:
        return None
    found = [one for one in case.group.results if one.record.is_reference]
    base = value_of(found[0].record.measurement(METRIC)) if found else None
    peak = _peak(case)
    if base is None or peak is None or not (0 < base < math.inf and 0 <= peak < math.inf):
        return None
    return peak / base


def _sentences(panel: Panel, cases: Sequence[NamedCase]) -> Iterator[str]:
    """What each precision saves against the reference, and why where the support says so."""
    by_mode: dict[str, list[tuple[NamedCase, float]]] = {}
    for case in cases:
        share = _share(case)
        if share is not None:
            by_mode.setdefault(case.result.mode, []).append((case, share))
    for mode, found in by_mode.items():
        shares = [share for _, share in found]
        none = [case for case, share in found if share > 1 - _LEAST_SAVING]
        words = f"{mode} takes {_range(shares)} of {panel.reference}'s memory"
        if not none:
            yield f"{words}."
            continue
        where = "" if len(none) == len(found) else f" in {len(none)} of {len(found)} groups"
        yield f"{words}: nothing is saved{where}{_why(none[0])}."


def _why(case: NamedCase) -> str:
    """Why memory is not saved, as far as the support knows: the run knows no more."""
    if not emulated(case.result):
        return ""
    reason = case.result.record.support.reason
    return f", because it is emulated ({reason}): its peak is the cost of emulation" if reason else ""


def _range(shares: Sequence[float]) -> str:
    low, high = units.ratio(min(shares)), units.ratio(max(shares))
    return low if low == high else f"{low} to {high}"
